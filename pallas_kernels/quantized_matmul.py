"""Matmuls with weights held in 8 or 4 bits. Knows arrays only.

Plain XLA, as no kernel is needed: where weights lie as they do here, the compilers for TPUs and for
the H200 read them in their own bits and convert them on the way to the matrix unit. What is read
per weight, a byte or half of one, is what decode costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

Kind = Literal["w8a8", "int8", "int4"]
_LEAST = 1e-30  # of a largest magnitude: a row of zeros has a scale too, and no division overflows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedTensor:
    """A weight `[*out, *in]` in few bits; a pytree whose leaves can be sharded. Made by `quantize`.

    "w8a8" has the weight's own shape and a scale per output channel, and rounds activations to int8
    too. "int8" and "int4" round the weight alone, and have a scale per group of g consecutive
    inputs of a channel. The groups lead, `[D/g, *out, g]`: a matmul for each group then takes its
    weights as they lie, where for `[*out, D/g, g]` XLA would first move or convert them all.

    Attributes:
      values: int8 or int4, `[*out, *in]` for "w8a8" and `[D/g, *out, g]` otherwise.
      scales: f32, `[*out]` for "w8a8" and `[D/g, *out]` otherwise.
      kind: "w8a8", "int8" or "int4".
    """

    values: Int[Array, "*shape"]
    scales: Float[Array, "*channels"]
    kind: Kind = field(metadata={"static": True})


def quantize(
    w: Float[Array, "*out_in"], kind: Kind, *, num_in_axes: int = 1, group_size: int | None = None
) -> QuantizedTensor:
    """Rounds a weight `[*out, *in]`, whose last `num_in_axes` axes are inputs, to the nearest.

    Scales are symmetric: the largest magnitude of a channel or group becomes 127, or 7 in 4 bits.

    Args:
      w: the weight.
      kind: "w8a8" (LLM.int8's vector-wise form, arXiv 2208.07339), "int8" or "int4".
      num_in_axes: how many axes a matmul sums over.
      group_size: g, inputs that share a scale; None takes all inputs of a channel, which "w8a8"
        must. A CPU reads int8 in place in groups only, and unpacks int4 at every call.

    Raises:
      ValueError: the kind is unknown or takes no groups, or g does not divide the inputs.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"{kind=} is unknown; use one of {', '.join(get_args(Kind))}")
    out_shape, in_shape = w.shape[: w.ndim - num_in_axes], w.shape[w.ndim - num_in_axes :]
    num_in = math.prod(in_shape)
    if kind == "w8a8" and group_size is not None:
        raise ValueError(f"{kind=} has a scale per channel; leave out {group_size=}")
    size = num_in if group_size is None else group_size
    if size < 1 or num_in % size:
        raise ValueError(f"{group_size=} must divide the {num_in} inputs of {w.shape=}")
    groups = w.astype(jnp.float32).reshape(*out_shape, num_in // size, size)
    values, scales = _rounded(groups, axis=-1, largest=7 if kind == "int4" else 127)
    if kind == "w8a8":
        return QuantizedTensor(values.astype(jnp.int8).reshape(w.shape), scales[..., 0, 0], kind)
    values = jnp.moveaxis(values, -2, 0).astype(jnp.int4 if kind == "int4" else jnp.int8)
    return QuantizedTensor(values, jnp.moveaxis(scales[..., 0], -1, 0), kind)


def dequantize(w: QuantizedTensor, in_shape: tuple[int, ...]) -> Float[Array, "*out_in"]:
    """Returns the float32 weight `[*out, *in]` that `w` stands for; `in_shape` is that of *in."""
    values = w.values.astype(jnp.float32)
    if w.kind == "w8a8":
        return values * jnp.expand_dims(w.scales, tuple(range(w.scales.ndim, values.ndim)))
    values = jnp.moveaxis(values * w.scales[..., None], 0, -2)
    return values.reshape(*values.shape[:-2], *in_shape)


def quantized_matmul(
    w: QuantizedTensor, x: Float[Array, "*in T"], dtype: DTypeLike | None = None
) -> Float[Array, "*out T"]:
    """Returns w @ x in `dtype`, or else the dtype of x, for feature-major activations.

    "w8a8" scales each token by its own largest magnitude, rounds it to int8 and sums in int32; what
    is not a number in one token stays in that token. The others sum in float32.
    """
    num_tokens = x.shape[-1]
    if num_tokens == 1:  # XLA:CPU converts the whole weight for a matrix times a vector
        x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, 1),))
    out = _w8a8(w, x) if w.kind == "w8a8" else _by_group(w, x)
    return out[..., :num_tokens].astype(x.dtype if dtype is None else dtype)


def _w8a8(w: QuantizedTensor, x: Float[Array, "*in T"]) -> Float[Array, "*out T"]:
    num_in = x.ndim - 1
    rounded, scales = _rounded(x.astype(jnp.float32), axis=tuple(range(num_in)), largest=127)
    contracted = tuple(range(w.values.ndim - num_in, w.values.ndim)), tuple(range(num_in))
    out = jax.lax.dot_general(
        w.values, rounded.astype(jnp.int8), (contracted, ((), ())),
        preferred_element_type=jnp.int32,
    )  # fmt: skip
    return out.astype(jnp.float32) * w.scales[..., None] * scales.reshape(-1)


def _by_group(w: QuantizedTensor, x: Float[Array, "*in T"]) -> Float[Array, "*out T"]:
    x = x.reshape(w.values.shape[0], w.values.shape[-1], x.shape[-1])  # [D/g, g, T]
    if w.values.shape[0] == 1 or 2 * x.shape[2] < x.shape[1]:
        return _scale_sums(w, x)
    # A GPU writes each group's sums to memory: from g / 2 tokens on, more than weights made anew.
    return jax.lax.platform_dependent(w, x, cuda=_scale_weights, default=_scale_sums)


def _scale_sums(w: QuantizedTensor, x: Float[Array, "D/g g T"]) -> Float[Array, "*out T"]:
    """A matmul per group, whose result takes the scale: weights are only read."""
    out = _dot(w.values.astype(x.dtype), x, ((w.values.ndim - 1,), (1,)), ((0,), (0,)))
    return (out * w.scales[..., None]).sum(0)


def _scale_weights(w: QuantizedTensor, x: Float[Array, "D/g g T"]) -> Float[Array, "*out T"]:
    """One matmul of weights written anew, in the dtype of x."""
    weights = w.values.astype(x.dtype) * w.scales[..., None].astype(x.dtype)
    return _dot(weights, x, ((0, w.values.ndim - 1), (0, 1)), ((), ()))


def _dot(w, x, contracted, batched):
    return jax.lax.dot_general(
        w, x, (contracted, batched), precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def _rounded(x: Float[Array, "*shape"], axis, largest: int):
    """Returns x / scales rounded to whole numbers, and the scales with `axis` kept as 1."""
    scales = jnp.maximum(jnp.abs(x).max(axis, keepdims=True), _LEAST) / largest
    return jnp.round(x / scales), scales
