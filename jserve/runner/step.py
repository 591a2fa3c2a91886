"""The pure step: one packed batch in, one token per row out, KV pages written on the way.

Knows arrays and their layout; no requests, no clock, no compilation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jserve.models.config import ModelConfig
from jserve.models.decoder import LayerLoop, decoder_apply, logits
from jserve.models.head_layout import HeadLayout
from jserve.runner.kv_cache import layout_of
from jserve.runner.mesh import MODEL_AXIS, pool_sharding
from jserve.runner.sampling import Sampled, sample
from pallas_kernels.dispatch import Backend
from pallas_kernels.ragged_paged_attention import api
from pallas_kernels.ragged_paged_attention.config import AttentionShape
from scheduler.bucket import Bucket
from scheduler.packer import FROM_DEVICE, batch_fields


class StepState(NamedTuple):
    """What stays on the device between steps; donated to each."""

    kv_pool: Float[Array, "L P p R W"]
    last_tokens: Int[Array, " slots+1"]  # the last entry is the null slot's


@dataclass(frozen=True)
class StepTokens:
    """What the decoder reads of a batch."""

    token_ids: Int[Array, " T"]
    positions: Int[Array, " T"]


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What is fixed for all of an engine's buckets."""

    model: ModelConfig
    mesh: Mesh
    backend: Backend
    loop: LayerLoop
    max_pages_per_seq: int  # J


def why_unsupported(
    options: StepOptions,
    heads: HeadLayout,
    bucket: Bucket,
    page_size: int,
    dtype: jnp.dtype,
) -> str | None:
    """Returns what the backend's attention cannot do of a bucket's steps on one device of the mesh,
    with the remedy; None if it can do them. `dtype` is that of queries and pool."""
    layout = layout_of(options.backend, options.model, heads, dtype)
    shape = AttentionShape(
        num_tokens=bucket.num_tokens,
        num_rows=bucket.num_rows,
        pages_per_row=options.max_pages_per_seq,
        page_size=page_size,
        num_kv_heads=layout.padded_kv_heads,
        group=heads.group_size,
        pool_rows=layout.num_rows,
        width=layout.width,
        q_dtype=dtype.name,
        kv_dtype=dtype.name,
    )
    return api.why_unsupported(options.backend, shape, options.mesh.devices.flat[0].device_kind)


def unpack(buffer: Int[Array, " words"], bucket: Bucket, J: int) -> dict[str, Array]:
    """Returns the arrays of a packed batch, by the table that packed them."""
    arrays = {}
    for name, (offset, shape, dtype) in batch_fields(bucket, J).items():
        words = buffer[offset : offset + math.prod(shape)].reshape(shape)
        is_int = dtype is buffer.dtype.type
        arrays[name] = words if is_int else jax.lax.bitcast_convert_type(words, dtype)
    return arrays


def make_step(
    options: StepOptions, bucket: Bucket
) -> Callable[[Any, StepState, Array], tuple[StepState, Sampled]]:
    """Returns step(params, state, buffer i32[words]) -> (state, sampled) for one bucket."""

    def step(params, state: StepState, buffer) -> tuple[StepState, Sampled]:
        batch = unpack(buffer, bucket, options.max_pages_per_seq)
        tokens = StepTokens(_token_ids(batch, state.last_tokens), batch["positions"])
        attend = _make_attend(options, bucket, batch)
        hidden, kv_pool = decoder_apply(
            params, options.model, tokens, state.kv_pool, attend, options.loop
        )
        if not bucket.decode_only:  # else token t is row t
            last = jnp.maximum(batch["cu_q_lens"][1:] - 1, 0)
            hidden = jnp.take(hidden, last, axis=1, mode="clip")
        sampled = sample(logits(params, options.model, hidden), batch)
        last_tokens = state.last_tokens.at[batch["slots"]].set(sampled.token_ids)
        return StepState(kv_pool, last_tokens), sampled

    return step


def _token_ids(batch: Mapping[str, Array], last_tokens: Int[Array, " slots+1"]) -> Array:
    """Fills in the ids that only the device knows. Such rows come first: token t is row t."""
    token_ids, slots = batch["token_ids"], batch["slots"]
    count = min(token_ids.shape[0], slots.shape[0])
    head = token_ids[:count]
    known = jnp.where(head == FROM_DEVICE, last_tokens[slots[:count]], head)
    return jnp.concatenate([known, token_ids[count:]])


def _make_attend(options: StepOptions, bucket: Bucket, batch: Mapping[str, Array]):
    """Returns the attention of one layer over this batch; with several devices, each does the
    heads that it holds."""
    model, mesh = options.model, options.mesh
    rows = [batch[n] for n in ("kv_lens", "page_indices", "cu_q_lens", "distribution")]

    def attention(q, k, v, kv_pool, layer, sliding_window, *rows):
        return api.ragged_paged_attention(
            q,
            k,
            v,
            kv_pool,
            layer,
            *rows,
            scale=model.query_scale,
            sliding_window=sliding_window,
            soft_cap=model.attn_soft_cap,
            backend=options.backend,
            device_kind=mesh.devices.flat[0].device_kind,
            decode_only=bucket.decode_only,
        )

    if mesh.size > 1:
        heads = PartitionSpec(None, MODEL_AXIS, None)
        pool = pool_sharding(mesh).spec
        whole = PartitionSpec()
        attention = jax.shard_map(
            attention,
            mesh=mesh,
            in_specs=(heads, heads, heads, pool, *[whole] * (2 + len(rows))),
            out_specs=(heads, pool),
            check_vma=False,
        )

    def attend(q, k, v, kv_pool, layer, sliding_window):
        return attention(q, k, v, kv_pool, layer, sliding_window, *rows)

    return attend
