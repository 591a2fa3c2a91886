"""One decoder layer, for every family. Knows weights and activations, not pages or requests.

Activations are feature-major, [D, T], from the embedding to the logits: see `linear`. Letters:
T tokens, D width, N query heads, K KV heads, G = N // K, H head_dim, F MLP width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jserve.models.config import ModelConfig
from jserve.models.head_layout import HeadLayout
from jserve.models.params import ParamShape, is_norm, layer_shapes
from jserve.models.rope import apply_rope
from pallas_kernels.quantized_matmul import QuantizedTensor, quantized_matmul

# Which mesh axis each logical axis of params.py is split over.
LOGICAL_AXIS_RULES = (("vocab", "model"), ("kv_heads", "model"), ("mlp", "model"))
WEIGHT_STDDEV = 0.02  # of randomly initialised weights


class Attend(Protocol):
    """Writes one layer's keys and values into the pool and attends to it."""

    def __call__(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        kv_pool: Any,
        layer: Int[Array, ""],
        sliding_window: Int[Array, ""],
    ) -> tuple[Float[Array, "T N H"], Any]:
        """Takes rotated queries and keys, and values; window 0 is global.

        Returns the attention output in the dtype of q, and the new pool.
        """


def declare_params(
    module: nn.Module, shapes: Mapping[str, ParamShape], dtype: DTypeLike
) -> dict[str, Array]:
    """Declares `shapes` as parameters of `module`, with their logical axes, and returns them."""

    def declare(name: str, spec: ParamShape) -> Any:
        if is_norm(name):
            init: Callable = nn.initializers.ones
        elif name.endswith("bias"):
            init = nn.initializers.zeros
        else:
            init = nn.initializers.normal(WEIGHT_STDDEV)
        boxed = nn.with_logical_partitioning(init, spec.logical_axes)
        return module.param(name, boxed, spec.shape, jnp.float32 if is_norm(name) else dtype)

    return {name: declare(name, spec) for name, spec in shapes.items()}


def linear(
    w: Float[Array, "*out in"] | QuantizedTensor,
    x: Float[Array, "in T"],
    dtype: DTypeLike | None = None,
) -> Float[Array, "*out T"]:
    """Returns w @ x, summed in float32 on each device, in `dtype` or else the dtype of x.

    Sums over devices are of that dtype: of bfloat16, half the bytes of float32. An int8 weight
    takes activations in int8 as well, and sums of int32.

    The weight is the left operand because a CPU's matmul packs its right operand at every call:
    here the few activations, not the whole weight. That needs activations to be feature-major, as
    XLA folds (w @ x.T).T back into x @ w.T. TPUs and GPUs take either form in place. The axes of
    the output are left as they are, so that any may be sharded; XLA itself makes it one product.
    """
    if isinstance(w, QuantizedTensor):
        return quantized_matmul(w, x, dtype)
    return jax.lax.dot_general(
        w,
        x,
        (((w.ndim - 1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,  # float32 means that on accelerators too
        preferred_element_type=x.dtype if dtype is None else dtype,
    )


def rms_norm(
    x: Float[Array, "*shape"], scale: Float[Array, " features"], eps: float, axis: int = 0
) -> Float[Array, "*shape"]:
    """Divides x by its root mean square over `axis` and multiplies by scale; float32 result.

    Source: Root Mean Square Layer Normalization (arXiv 1910.07467).
    """
    x = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=axis, keepdims=True) + eps)
    others = [i for i in range(x.ndim) if i != axis % x.ndim]
    return x * inverse * jnp.expand_dims(scale, others)


class DecoderLayer(nn.Module):
    """Attention and MLP, each normed before, and in Gemma after, around a residual stream.

    Attributes:
      config: the architecture.
      layout: heads as the parameters have them.
      dtype: of weights made by `init`; norm scales are float32.
    """

    config: ModelConfig
    layout: HeadLayout
    dtype: DTypeLike = jnp.float32

    def setup(self) -> None:
        self.weights = declare_params(self, layer_shapes(self.config, self.layout), self.dtype)

    def before_attention(
        self, x: Float[Array, "D T"], rope: Float[Array, "2 H/2 T"]
    ) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
        """Returns queries and keys, both rotated, and values."""
        G, eps = self.layout.group_size, self.config.rms_norm_eps
        qkv = self._linear(self._norm(x, "attn_norm"), "qkv")  # [K, G+2, H, T]
        K, _, H, T = qkv.shape
        qk, v = qkv[:, : G + 1].astype(jnp.float32), qkv[:, G + 1]
        if self.config.qk_norm:
            q = rms_norm(qk[:, :G], self.weights["q_norm"], eps, axis=2)
            k = rms_norm(qk[:, G:], self.weights["k_norm"], eps, axis=2)
            qk = jnp.concatenate([q, k], axis=1)
        qk = apply_rope(qk, rope).astype(x.dtype)
        q = qk[:, :G].transpose(3, 0, 1, 2).reshape(T, K * G, H)
        return q, qk[:, G].transpose(2, 0, 1), v.transpose(2, 0, 1)

    def after_attention(
        self, x: Float[Array, "D T"], attended: Float[Array, "T N H"]
    ) -> Float[Array, "D T"]:
        """Returns the residual stream after this layer, given attention's output."""
        delta = self._linear(attended.reshape(attended.shape[0], -1).T, "o")
        x = x + self._norm(delta, "post_attn_norm")
        delta = self._mlp(self._norm(x, "mlp_norm"))
        return x + self._norm(delta, "post_mlp_norm")

    def _norm(self, x: Float[Array, "D T"], name: str) -> Float[Array, "D T"]:
        """Norms x where the family has the norm `name`."""
        if name not in self.weights:
            return x
        return rms_norm(x, self.weights[name], self.config.rms_norm_eps).astype(x.dtype)

    def _linear(self, x: Float[Array, "in T"], name: str) -> Float[Array, "*out T"]:
        out = linear(self.weights[name], x)
        bias = self.weights.get(f"{name}_bias")
        return out if bias is None else out + bias[..., None]

    def _mlp(self, x: Float[Array, "D T"]) -> Float[Array, "D T"]:
        gate, up = self._linear(x, "gate_up").astype(jnp.float32)
        if self.config.activation == "silu":
            gate = jax.nn.silu(gate)
        else:
            gate = jax.nn.gelu(gate, approximate=True)
        return self._linear((gate * up).astype(x.dtype), "down")
