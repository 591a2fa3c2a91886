"""The tiny reference models of tests/data/models, and a dense attention to run them with.

Made by scripts/make_reference_models.py: random weights, and logits from transformers in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jserve.checkpoint.mapping import load_params
from jserve.checkpoint.safetensors import open_safetensors
from jserve.models.config import ModelConfig
from jserve.models.decoder import decoder_apply, head_of, logits
from jserve.models.families import model_config_from_hf
from jserve.models.head_layout import HeadLayout, head_layout

FOLDER = Path(__file__).parent.parent / "data" / "models"
NAMES = tuple(sorted(path.name for path in FOLDER.iterdir() if path.is_dir()))


@dataclass(frozen=True)
class ReferenceSequence:
    """A prompt, the model's own greedy continuation, and the logits at every position."""

    ids: np.ndarray  # i32[n]
    num_prompt: int  # ids from here on are greedy choices
    logits: np.ndarray  # f32[n, V]


@dataclass(frozen=True)
class ReferenceModel:
    folder: Path
    config: ModelConfig
    sequences: tuple[ReferenceSequence, ...]

    def params(
        self, dtype: Any = jnp.float32, layout: HeadLayout | None = None, stacked: bool = False
    ) -> dict[str, Any]:
        layout = layout or head_layout(self.config)
        checkpoint = open_safetensors(self.folder)
        return load_params(checkpoint, self.config, layout, dtype, stacked=stacked)


def reference_model(name: str) -> ReferenceModel:
    """Opens tests/data/models/<name>."""
    folder = FOLDER / name
    arrays = np.load(folder / "reference.npz")
    count = sum(key.startswith("ids_") for key in arrays)
    return ReferenceModel(
        folder=folder,
        config=model_config_from_hf(open_safetensors(folder).config),
        sequences=tuple(
            ReferenceSequence(
                arrays[f"ids_{i}"], int(arrays[f"num_prompt_{i}"]), arrays[f"logits_{i}"]
            )
            for i in range(count)
        ),
    )


def embeddings_of_transformers(name: str, pooling: str) -> list[np.ndarray]:
    """Returns f64[D] of each sequence: that of the hidden states which its logits come from. The
    head has more rows than columns, and no soft cap, so that there is one such state."""
    model = reference_model(name)
    head = np.asarray(model.params()["lm_head"], np.float64)
    found = []
    for sequence in model.sequences:
        hidden = np.linalg.lstsq(head, sequence.logits.T.astype(np.float64))[0]
        vector = hidden[:, -1] if pooling == "last" else hidden.mean(axis=1)
        found.append(vector / np.linalg.norm(vector))
    return found


class Tokens(NamedTuple):
    """The part of a step's batch that the decoder reads."""

    token_ids: jax.Array  # i32[T]
    positions: jax.Array  # i32[T]


def dense_attend(config: ModelConfig, q, k, v, kv_pool, layer, sliding_window):
    """Causal attention of one sequence over itself, in float32; kv_pool [L, T, 2K, H] keeps K0 V0
    K1 V1 ..."""
    num_tokens, num_heads, _ = q.shape
    group = num_heads // k.shape[1]
    kv = jnp.stack([k, v], axis=2).reshape(num_tokens, -1, k.shape[2])
    k, v = (jnp.repeat(x.astype(jnp.float32), group, axis=1) for x in (k, v))
    scores = config.query_scale * jnp.einsum("tnh,snh->nts", q.astype(jnp.float32), k)
    if config.attn_soft_cap is not None:
        scores = config.attn_soft_cap * jnp.tanh(scores / config.attn_soft_cap)
    t = jnp.arange(num_tokens, dtype=jnp.int32)
    distance = t[:, None] - t[None, :]
    seen = (distance >= 0) & ((distance < sliding_window) | (sliding_window == 0))
    weights = jax.nn.softmax(jnp.where(seen[None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("nts,snh->tnh", weights, v).astype(q.dtype)
    return out, kv_pool.at[layer].set(kv)


def run_dense(
    params: dict[str, Any],
    config: ModelConfig,
    sequences: Sequence[np.ndarray],
    loop: str = "unrolled",
    attend: Callable = dense_attend,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Runs sequences of token ids, each in one step without pages.

    All are padded to one length, for one compilation: later tokens do not matter to earlier ones.
    Returns per sequence its logits f32[n, V] and its keys and values [L, n, 2K, H].
    """

    @jax.jit
    def step(params, tokens, kv_pool):
        hidden, kv_pool = decoder_apply(
            params, config, tokens, kv_pool, partial(attend, config), loop
        )
        return logits(head_of(params, config), config, hidden), kv_pool

    layers = params["layers"]
    qkv = (layers if isinstance(layers, dict) else layers[0])["qkv"]
    num_kv_heads = jax.tree.leaves(qkv)[0].shape[-4]
    num_tokens = max(len(ids) for ids in sequences)
    shape = (config.num_layers, num_tokens, 2 * num_kv_heads, config.head_dim)
    positions = jnp.arange(num_tokens, dtype=jnp.int32)
    results = []
    for ids in sequences:
        padded = np.pad(ids, (0, num_tokens - len(ids)))
        tokens = Tokens(jnp.asarray(padded), positions)
        dtype = jax.tree.leaves(params["embed"])[-1].dtype  # of weights in int8: that of the scales
        out, kv = step(params, tokens, jnp.zeros(shape, dtype))
        results.append((np.asarray(out)[: len(ids)], np.asarray(kv)[:, : len(ids)]))
    return results
