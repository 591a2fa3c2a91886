"""Rounds parameters to int8 as they arrive on the devices. Knows names and axes, no files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import numpy as np

from jserve.models.params import Axes, is_matrix, is_norm
from pallas_kernels.quantized_matmul import QuantizedTensor, quantize

Quantization = Literal["none", "w8a8"]
ShardingOf = Callable[[Axes], jax.sharding.Sharding]


def loaded_dtype(leaf: str, dtype: np.dtype, quantization: Quantization) -> np.dtype:
    """Returns the dtype in which parameter `leaf` of a model in `dtype` is read from its files.

    What becomes int8 is read in float32, so as to be rounded once only.
    """
    in_float32 = is_norm(leaf) or (quantization != "none" and is_matrix(leaf))
    return np.dtype(np.float32) if in_float32 else dtype


def quantized(
    leaf: str, array: jax.Array, axes: Axes, quantization: Quantization, sharding: ShardingOf
) -> jax.Array | QuantizedTensor:
    """Returns parameter `leaf` as the model is to hold it, once it is there.

    Of a matrix, its values are split as it was and its scales as its outputs are: each device
    rounds its own part, and only a largest magnitude crosses between those that share a row.
    """
    if quantization == "none" or not is_matrix(leaf):
        return array
    # scales lack the last axis
    targets = jax.tree.map(lambda x: sharding(axes[: x.ndim]), jax.eval_shape(_w8a8, array))
    return jax.block_until_ready(jax.jit(_w8a8, out_shardings=targets)(array))


def _w8a8(w: jax.Array) -> QuantizedTensor:
    return quantize(w, "w8a8")
