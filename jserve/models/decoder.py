"""The decoder: embedding, the loop over layers, final norm, logits. Knows no pages or requests.

One layer function serves three loops: switched (CPU), unrolled (GPU), and scanned over weights
stacked on a leading axis (TPU). Letters: T tokens, S sampling
rows, D width, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jserve.models.config import ModelConfig
from jserve.models.head_layout import HeadLayout
from jserve.models.layers import Attend, DecoderLayer, declare_params, linear, rms_norm
from jserve.models.params import top_shapes
from jserve.models.rope import rope_table
from pallas_kernels.quantized_matmul import QuantizedTensor, dequantize

LayerLoop = Literal["unrolled", "switched", "scanned"]
# By platform, what its compiler makes the best program of (docs/accelerators.md).
BEST_LOOP: dict[str, LayerLoop] = {"cpu": "switched", "tpu": "scanned", "gpu": "unrolled"}


class StepTokens(Protocol):
    """What the decoder reads of a step's batch."""

    @property
    def token_ids(self) -> Int[Array, " T"]: ...  # in [0, V); padding may be any id

    @property
    def positions(self) -> Int[Array, " T"]: ...  # from 0


class Decoder(nn.Module):
    """Everything of a model but its layers' weights, which the loops take as an argument.

    Attributes:
      dtype: of weights made by `init`, and of activations where the embedding is in int8.
    """

    config: ModelConfig
    layout: HeadLayout
    dtype: DTypeLike = jnp.float32

    def setup(self) -> None:
        self.weights = declare_params(self, top_shapes(self.config, self.layout), self.dtype)

    def embed(self, token_ids: Int[Array, " T"]) -> Float[Array, "D T"]:
        # ids are checked on the host; "clip" spares the select that would fill with NaN
        table = self.weights["embed"]
        rows = jax.tree.map(lambda array: jnp.take(array, token_ids, axis=0, mode="clip"), table)
        if isinstance(rows, QuantizedTensor):
            rows = dequantize(rows).astype(self.dtype)
        x = rows.T
        if self.config.embedding_scale == 1.0:
            return x
        return x * jnp.asarray(self.config.embedding_scale, x.dtype)  # rounded as in training

    def final_norm(self, x: Float[Array, "D T"]) -> Float[Array, "D T"]:
        return rms_norm(x, self.weights["final_norm"], self.config.rms_norm_eps).astype(x.dtype)


def decoder_apply(
    params: Mapping[str, Any],
    config: ModelConfig,
    batch: StepTokens,
    kv_pool: Any,
    attend: Attend,
    loop: LayerLoop,
    dtype: DTypeLike = jnp.float32,
) -> tuple[Float[Array, "D T"], Any]:
    """Runs all layers over the tokens of one step.

    Args:
      params: the tree of params.py, "layers" stacked for the scanned loop; head counts are those
        of the arrays, so that a padded layout needs no other setting.
      config: the architecture. Dynamic rope takes max_position as the longest length served.
      batch: token ids and positions.
      kv_pool: any pytree; handed to `attend` layer after layer, and returned.
      attend: the attention of one layer, with scale and soft cap bound by the caller.
      loop: "unrolled" or "switched" (over a list of layers), or "scanned".
      dtype: of activations where the embedding is in int8; else they have its own.

    Returns:
      The hidden states after the final norm, in the dtype of activations, and the pool.

    Raises:
      ValueError: the loop does not fit the form of params["layers"].
    """
    layers = params["layers"]
    if (loop == "scanned") != isinstance(layers, Mapping):
        raise ValueError(f"{loop=} does not fit weights held as {type(layers).__name__}")
    layout = _layout_of(params)
    decoder, ends = Decoder(config, layout, dtype), {"params": _without_layers(params)}
    tables = _rope_tables(config, batch.positions)  # [1 or 2, 2, H/2, T]

    layer = DecoderLayer(config, layout)

    def before(weights, x, rope_index):
        return layer.apply({"params": weights}, x, tables[rope_index], method="before_attention")

    def after(weights, x, attended):
        return layer.apply({"params": weights}, x, attended, method="after_attention")

    x: Any = decoder.apply(ends, batch.token_ids, method="embed")
    run = {"unrolled": _run_unrolled, "switched": _run_switched, "scanned": _run_scanned}[loop]
    x, kv_pool = run(layers, _layer_scalars(config), x, kv_pool, before, attend, after)
    hidden: Any = decoder.apply(ends, x, method="final_norm")
    return hidden, kv_pool


def _run_unrolled(layers, scalars, x, kv_pool, before, attend, after):
    """One program piece per layer: for GPUs, where a scan would copy each layer's weights."""

    # Made anew in each trace of the step, as `attend` may hold that trace's arrays. Under jit its
    # L calls share one trace and one lowering, which XLA inlines.
    @jax.jit
    def run_layer(weights, x, kv_pool, layer, sliding_window, rope_index):
        q, k, v = before(weights, x, rope_index)
        attended, kv_pool = attend(q, k, v, kv_pool, layer, sliding_window)
        return after(weights, x, attended), kv_pool

    for weights, *of_layer in zip(layers, *scalars, strict=True):
        x, kv_pool = run_layer(weights, x, kv_pool, *of_layer)
    return x, kv_pool


def _run_switched(layers, scalars, x, kv_pool, before, attend, after):
    """A loop whose matmuls are switch branches, one per layer: for CPUs.

    Each layer's weights are read in place, as when unrolled, while the loops inside attention are
    compiled once instead of L times, which is most of the compile time on a CPU.
    """
    before, after = jax.jit(before), jax.jit(after)  # one trace for all branches

    def run_layer(index, carry):
        x, kv_pool = carry
        layer, sliding_window, rope_index = (jnp.asarray(array)[index] for array in scalars)
        q, k, v = jax.lax.switch(
            index, [partial(before, weights) for weights in layers], x, rope_index
        )
        attended, kv_pool = attend(q, k, v, kv_pool, layer, sliding_window)
        x = jax.lax.switch(index, [partial(after, weights) for weights in layers], x, attended)
        return x, kv_pool

    return jax.lax.fori_loop(0, len(layers), run_layer, (x, kv_pool))


def _run_scanned(layers, scalars, x, kv_pool, before, attend, after):
    """A scan over stacked weights: for TPUs, where slices of them fuse into the matmuls."""

    def run_layer(carry, inputs):  # the pool is carried: through xs and ys it would be copied
        (x, kv_pool), (weights, (layer, sliding_window, rope_index)) = carry, inputs
        q, k, v = before(weights, x, rope_index)
        attended, kv_pool = attend(q, k, v, kv_pool, layer, sliding_window)
        return (after(weights, x, attended), kv_pool), None

    (x, kv_pool), _ = jax.lax.scan(run_layer, (x, kv_pool), (layers, scalars))
    return x, kv_pool


def head_of(params: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Returns the part of the parameters that makes logits."""
    return {"table": params["embed" if config.tie_word_embeddings else "lm_head"]}


def logits(
    head: Mapping[str, Any], config: ModelConfig, hidden: Float[Array, "D S"]
) -> Float[Array, "S V"]:
    """Returns float32 logits of hidden states that `decoder_apply` returned, soft-capped if so."""
    out = linear(head["table"], hidden, jnp.float32)
    cap = config.final_soft_cap
    if cap is not None:
        out = cap * jnp.tanh(out / cap)
    # Without the barrier XLA turns this into hidden.T @ table.T, which on a CPU packs the whole
    # table: with one of 49152 x 576, 390 ms, not 21, for 2 rows, and 45, not 28, for 32.
    return jax.lax.optimization_barrier(out).T


def init_params(
    config: ModelConfig,
    layout: HeadLayout,
    key: Array,
    dtype: DTypeLike = jnp.float32,
    stacked: bool = False,
) -> dict[str, Any]:
    """Draws random parameters in the form of params.py.

    Every array is boxed with its logical axes: `flax.linen.unbox` takes them off. Under
    jax.eval_shape this gives shapes and axes and draws nothing.
    """
    ends_key, *keys = jax.random.split(key, config.num_layers + 1)

    def declared(module):
        return module.weights

    def init_layer(key):
        return DecoderLayer(config, layout, dtype).init(key, method=declared)["params"]

    ends = Decoder(config, layout, dtype).init(ends_key, method=declared)["params"]
    if not stacked:
        return {**ends, "layers": [init_layer(k) for k in keys]}
    layers = jax.vmap(init_layer)(jnp.stack(keys))
    return {**ends, "layers": meta.add_axis(layers, 0, {meta.PARTITION_NAME: None})}


def _layout_of(params: Mapping[str, Any]) -> HeadLayout:
    """The head counts of `params`; where each head came from is a loader's matter."""
    layers = params["layers"]
    qkv = layers["qkv"] if isinstance(layers, Mapping) else layers[0]["qkv"]
    qkv = qkv.values if isinstance(qkv, QuantizedTensor) else qkv
    return HeadLayout(qkv.shape[-4], qkv.shape[-3] - 2, kv_heads=(), query_heads=())


def _without_layers(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: array for name, array in params.items() if name != "layers"}


def _rope_tables(config: ModelConfig, positions: Int[Array, " T"]) -> Float[Array, "R 2 H/2 T"]:
    ropes = [config.rope] if config.rope_local is None else [config.rope, config.rope_local]
    return jnp.stack(
        [rope_table(rope, config.head_dim, config.max_position, positions) for rope in ropes]
    )


def _layer_scalars(config: ModelConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns i32[L] each: layer index, sliding window, row of the rope tables."""
    layer = np.arange(config.num_layers, dtype=np.int32)
    sliding_window = np.array(config.sliding_windows or [0] * config.num_layers, np.int32)
    is_local = (sliding_window > 0) & (config.rope_local is not None)
    return layer, sliding_window, is_local.astype(np.int32)
