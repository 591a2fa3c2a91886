"""Matmuls with weights held in 8 or 4 bits. Knows arrays only.

What is read per weight, a byte or half of one, is what decode costs. Where weights lie as they do
here, XLA's compilers for CPUs, TPUs and the H200 read them in their own bits and convert them on
the way to the matrix unit; weights in groups have a kernel of their own on TPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Backend

Kind = Literal["w8a8", "int8", "int4"]
_LEAST = 1e-30  # of a largest magnitude: a row of zeros has a scale too, and no division overflows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedTensor:
    """A weight `[*out, D]` in few bits; a pytree whose leaves can be sharded. Made by `quantize`.

    "w8a8" has the weight's own shape and a scale per output channel, and rounds activations to int8
    too. "int8" and "int4" round the weight alone, and have a scale per group of g consecutive
    inputs of a channel. The groups lead, `[D/g, *out, g]`: a matmul for each group then takes its
    weights as they lie, where for `[*out, D/g, g]` XLA would first move or convert them all.

    Attributes:
      values: int8 or int4, `[*out, D]` for "w8a8" and `[D/g, *out, g]` otherwise.
      scales: f32, `[*out]` for "w8a8" and `[D/g, *out]` otherwise.
      kind: "w8a8", "int8" or "int4".
    """

    values: Int[Array, "*shape"]
    scales: Float[Array, "*channels"]
    kind: Kind = field(metadata={"static": True})


def quantize(
    w: Float[Array, "*out D"], kind: Kind, *, group_size: int | None = None
) -> QuantizedTensor:
    """Rounds a weight to the nearest multiples of its channels' or groups' scales.

    Scales are symmetric: the largest magnitude of a channel or group becomes 127, or 7 in 4 bits.

    Args:
      w: the weight; its last axis is the inputs'.
      kind: "w8a8" (LLM.int8's vector-wise form, arXiv 2208.07339), "int8" or "int4".
      group_size: g, inputs that share a scale; None takes all inputs of a channel, which "w8a8"
        must. A CPU reads int8 in place in groups only, and unpacks int4 at every call.

    Raises:
      ValueError: the kind is unknown or takes no groups, or g does not divide the inputs.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"{kind=} is unknown; use one of {', '.join(get_args(Kind))}")
    if kind == "w8a8" and group_size is not None:
        raise ValueError(f"{kind=} has a scale per channel; leave out {group_size=}")
    num_in = w.shape[-1]
    size = num_in if group_size is None else group_size
    if size < 1 or num_in % size:
        raise ValueError(f"{group_size=} must divide the {num_in} inputs of {w.shape=}")
    w = w.astype(jnp.float32)
    if kind == "w8a8":
        values, scales = _rounded(w, axis=-1, largest=127)
    else:
        w = jnp.moveaxis(w.reshape(*w.shape[:-1], num_in // size, size), -2, 0)
        values, scales = _rounded(w, axis=-1, largest=7 if kind == "int4" else 127)
    dtype = jnp.int4 if kind == "int4" else jnp.int8
    return QuantizedTensor(values.astype(dtype), scales[..., 0], kind)


def dequantize(w: QuantizedTensor) -> Float[Array, "*out D"]:
    """Returns the float32 weight that `w` stands for."""
    values = w.values.astype(jnp.float32) * w.scales[..., None]
    if w.kind == "w8a8":
        return values
    values = jnp.moveaxis(values, 0, -2)
    return values.reshape(*values.shape[:-2], -1)


def quantized_matmul(
    w: QuantizedTensor,
    x: Float[Array, "D T"],
    dtype: DTypeLike | None = None,
    *,
    layer: Int[Array, ""] | int | None = None,
    backend: Backend = Backend.XLA,
    interpret: Any = False,
) -> Float[Array, "*out T"]:
    """Returns w @ x in `dtype`, or else the dtype of x, for feature-major activations.

    "w8a8" scales each token by its own largest magnitude, rounds it to int8 and sums in int32; what
    is not a number in one token stays in that token. The others sum in float32.

    Args:
      w: the weight.
      x: activations, a token in each column.
      dtype: of the result.
      layer: with it, all of w has a leading axis of layers, of which this one is taken; may be
        traced. A kernel reads it in place there, where a slice would be copied.
      backend: MOSAIC_TPU has a kernel for several groups per channel; all else is XLA's.
      interpret: runs the kernel on a CPU: True, or pltpu.InterpretParams.

    Raises:
      ValueError: the kernel does not take groups or outputs of that size.
    """
    dtype = x.dtype if dtype is None else dtype
    group_axis = 0 if layer is None else 1
    if backend is Backend.MOSAIC_TPU and w.kind != "w8a8" and w.values.shape[group_axis] > 1:
        return _by_kernel(w, x, layer, dtype, interpret)
    if layer is not None:
        w = jax.tree.map(lambda leaf: leaf[layer], w)
    num_tokens = x.shape[1]
    if num_tokens == 1:  # XLA:CPU converts the whole weight for a matrix times a vector
        x = jnp.pad(x, ((0, 0), (0, 1)))
    out = _w8a8(w, x) if w.kind == "w8a8" else _by_group(w, x)
    return out[..., :num_tokens].astype(dtype)


def _w8a8(w: QuantizedTensor, x: Float[Array, "D T"]) -> Float[Array, "*out T"]:
    values, scales = _rounded(x.astype(jnp.float32), axis=0, largest=127)
    contracted = (w.values.ndim - 1,), (0,)
    out = _dot(w.values, values.astype(jnp.int8), contracted, ((), ()), jnp.int32)
    return out.astype(jnp.float32) * w.scales[..., None] * _as_rank(scales, out.ndim)


def _as_rank(per_token: Float[Array, "1 T"], rank: int):
    return per_token.reshape(*[1] * (rank - 1), -1)


def _by_group(w: QuantizedTensor, x: Float[Array, "D T"]) -> Float[Array, "*out T"]:
    x = x.reshape(w.values.shape[0], w.values.shape[-1], x.shape[1])  # [D/g, g, T]
    if w.values.shape[0] == 1 or 2 * x.shape[2] < x.shape[1]:
        return _scale_sums(w, x)
    # A GPU writes each group's sums to memory: from g / 2 tokens on, more than weights made anew.
    return jax.lax.platform_dependent(w, x, cuda=_scale_weights, default=_scale_sums)


def _by_kernel(w: QuantizedTensor, x: Float[Array, "D T"], layer, dtype, interpret):
    # Pallas takes time to import, and not every platform needs it.
    kernel = import_module("pallas_kernels.quantized_matmul.mosaic_tpu")
    if layer is None:
        w, layer = jax.tree.map(lambda leaf: leaf[None], w), 0
    num_layers, num_groups, *out_shape, size = w.values.shape
    problem = kernel.why_unsupported(num_groups * size, math.prod(out_shape), size)
    if problem:
        raise ValueError(f"the TPU kernel does not take {problem}, or backend=Backend.XLA")
    values = w.values.reshape(num_layers, num_groups, -1, size)
    scales = w.scales.reshape(num_layers, num_groups, -1)
    layer = jnp.asarray(layer, jnp.int32)
    out = kernel.grouped_matmul(values, scales, layer, x.T, dtype, interpret)
    return out.T.reshape(*out_shape, -1)


def _scale_sums(w: QuantizedTensor, x: Float[Array, "D/g g T"]) -> Float[Array, "*out T"]:
    """A matmul per group, whose result takes the scale: weights are only read."""
    out = _dot(w.values.astype(x.dtype), x, ((w.values.ndim - 1,), (1,)), ((0,), (0,)))
    return (out * w.scales[..., None]).sum(0)


def _scale_weights(w: QuantizedTensor, x: Float[Array, "D/g g T"]) -> Float[Array, "*out T"]:
    """One matmul of weights written anew, in the dtype of x."""
    weights = w.values.astype(x.dtype) * w.scales[..., None].astype(x.dtype)
    return _dot(weights, x, ((0, w.values.ndim - 1), (0, 1)), ((), ()))


def _dot(w, x, contracted, batched, dtype=jnp.float32):
    return jax.lax.dot_general(
        w,
        x,
        (contracted, batched),
        precision=jax.lax.Precision.HIGHEST,  # float32 means that on accelerators too
        preferred_element_type=dtype,
    )


def _rounded(x: Float[Array, "*shape"], axis: int, largest: int):
    """Returns x / scales rounded to whole numbers, and the scales with `axis` kept as 1."""
    scales = jnp.maximum(jnp.abs(x).max(axis, keepdims=True), _LEAST) / largest
    return jnp.round(x / scales), scales
