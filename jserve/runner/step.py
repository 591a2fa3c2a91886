"""The pure step, in two programs: forward (one packed batch in, hidden states out, KV pages
written on the way) and choose (hidden states of the rows in, a token for each out). Between the two
the host may still say which tokens are allowed. Two more look at all tokens of a step: score rates
those of prompts, and row_sums adds up their hidden states for embeddings.

Knows arrays and their layout; no requests, no clock, no compilation.
"""

from __future__ import annotations

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
from jserve.models.layers import Attend
from jserve.runner.kv_cache import layout_of
from jserve.runner.mesh import MODEL_AXIS, pool_sharding
from jserve.runner.sampling import (
    Edits,
    Logprobs,
    Sampled,
    count_tokens,
    logprobs_of,
    sample,
)
from pallas_kernels.dispatch import Backend
from pallas_kernels.ragged_paged_attention import api
from pallas_kernels.ragged_paged_attention.config import AttentionShape, aligned_config
from scheduler.bucket import Bucket
from scheduler.packer import FROM_DEVICE, Fields, batch_fields, sampling_fields

SCORED_TOKENS = 64  # of a call of score: what its logits take is what 64 rows of a step take


class SamplerState(NamedTuple):
    """What the sampler keeps of each slot; the last entry is the null slot's."""

    last_tokens: Int[Array, " slots+1"]
    counts: Int[Array, "slots+1 V"]  # int16, see sampling.py


class StepState(NamedTuple):
    """What stays on the device between steps; donated to the program that writes it."""

    kv_pool: Float[Array, "L P p R W"]
    sampler: SamplerState


class Hidden(NamedTuple):
    """A step's states after the final norm."""

    rows: Float[Array, "D S"]  # of each row's last token
    # Of all tokens, for `score` and `row_sums`; None when decoding.
    tokens: Float[Array, "D max_tokens"] | None


def make_sampler_state(num_slots: int, vocab_size: int, sharding: Any = None) -> SamplerState:
    return SamplerState(
        jnp.zeros(num_slots + 1, jnp.int32, device=sharding),
        jnp.zeros((num_slots + 1, vocab_size), jnp.int16, device=sharding),
    )


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
    max_tokens: int  # of the largest bucket
    dtype: jnp.dtype  # of activations
    processed_logprobs: bool = False
    invariant: bool = False  # a token's bits depend on its own sequence only


def why_unsupported(
    options: StepOptions,
    heads: HeadLayout,
    bucket: Bucket,
    page_size: int,
    kv_dtype: jnp.dtype,
) -> str | None:
    """Returns what the backend's attention cannot do of a bucket's steps on one device of the mesh,
    with the remedy; None if it can do them. `kv_dtype` is that of the pool."""
    layout = layout_of(options.backend, options.model, heads, kv_dtype)
    shape = AttentionShape(
        num_tokens=bucket.num_tokens,
        num_rows=bucket.num_rows,
        pages_per_row=options.max_pages_per_seq,
        page_size=page_size,
        num_kv_heads=layout.padded_kv_heads,
        group=heads.group_size,
        pool_rows=layout.num_rows,
        width=layout.width,
        q_dtype=options.dtype.name,
        kv_dtype=kv_dtype.name,
    )
    return api.why_unsupported(options.backend, shape, options.mesh.devices.flat[0].device_kind)


def unpack(buffer: Int[Array, " words"], fields: Fields) -> dict[str, Array]:
    """Returns the arrays of a packed buffer, by the table that packed them."""
    arrays = {}
    for name, (offset, end, shape, dtype) in fields.items():
        words = buffer[offset:end].reshape(shape)
        is_int = dtype is buffer.dtype.type
        arrays[name] = words if is_int else jax.lax.bitcast_convert_type(words, dtype)
    return arrays


def make_forward(options: StepOptions, bucket: Bucket) -> Callable[..., tuple[Array, Hidden]]:
    """Returns forward(params, kv_pool, last_tokens, buffer i32[words]) -> (kv_pool, hidden).

    Beside the model's own, `params` has "kv_scales" where the pool's numbers need them.
    """

    def forward(params, kv_pool, last_tokens, buffer) -> tuple[Array, Hidden]:
        batch = unpack(buffer, batch_fields(bucket, options.max_pages_per_seq))
        tokens = StepTokens(_token_ids(batch, last_tokens), batch["positions"])
        attend = make_attend(options, bucket, batch, params.get("kv_scales"))
        hidden, kv_pool = decoder_apply(
            params, options.model, tokens, kv_pool, attend, options.loop, options.dtype
        )
        if bucket.decode_only:  # token t is row t
            return kv_pool, Hidden(hidden, None)
        last = jnp.maximum(batch["cu_q_lens"][1:] - 1, 0)
        rows = jnp.take(hidden, last, axis=1, mode="clip")
        padding = options.max_tokens - bucket.num_tokens  # so that one program can score them
        return kv_pool, Hidden(rows, jnp.pad(hidden, ((0, 0), (0, padding))))

    return forward


def _mesh_of_logits(options: StepOptions) -> Mesh | None:
    """Returns the devices over which the logits are split, if they are: see models/params.py."""
    mesh = options.mesh
    return mesh if mesh.size > 1 and options.model.vocab_size % mesh.size == 0 else None


def make_choose(options: StepOptions, num_rows: int) -> Callable[..., tuple[SamplerState, Sampled]]:
    """Returns choose(head, state, rows [D, S], buffer i32[words], bias, allowed u32[S, W]) ->
    (state, sampled)."""

    def choose(head, state: SamplerState, rows, buffer, bias, allowed):
        batch = unpack(buffer, sampling_fields(num_rows))
        sampled = sample(
            logits(head, options.model, rows),
            batch,
            Edits(state.counts, bias[0], bias[1], allowed),
            processed_logprobs=options.processed_logprobs,
            mesh=_mesh_of_logits(options),
        )
        token_ids = jnp.maximum(sampled.token_ids, 0)  # of what has failed, any will do
        slots = batch["slots"]
        state = SamplerState(
            state.last_tokens.at[slots].set(token_ids),
            count_tokens(state.counts, slots, token_ids),
        )
        return state, sampled

    return choose


def make_score(options: StepOptions) -> Callable[..., Logprobs]:
    """Returns score(head, tokens [D, max_tokens], start, target_ids i32[SCORED_TOKENS]) ->
    log-probabilities of target_ids[i] after token start + i."""

    def score(head, tokens, start, target_ids) -> Logprobs:
        # Indices and not a slice, whose start would be moved where it reaches beyond the end.
        index = start + jnp.arange(SCORED_TOKENS)
        hidden = jnp.take(tokens, index, axis=1, mode="clip")
        found = logits(head, options.model, hidden)
        return logprobs_of(found, target_ids, _mesh_of_logits(options))

    return score


def make_row_sums(num_rows: int) -> Callable[..., Float[Array, "S D"]]:
    """Returns row_sums(tokens [D, max_tokens], rows i32[max_tokens]) -> f32[S, D]: for each row the
    sum of the states of its tokens, NaN where one of them is no number; -1 is no row's."""

    def row_sums(tokens, rows) -> Float[Array, "S D"]:
        is_of_row = (rows[:, None] == jnp.arange(num_rows)).astype(tokens.dtype)
        # A product is quicker than sums by index, but 0 times NaN would reach the other rows.
        is_number = jnp.isfinite(tokens)
        sums = jnp.einsum(
            "dt,ts->sd",
            jnp.where(is_number, tokens, 0),
            is_of_row,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        num_bad = (~is_number.all(axis=0)).astype(tokens.dtype) @ is_of_row
        return jnp.where(num_bad[:, None] > 0, jnp.nan, sums)

    return row_sums


def remember(counts: Array, slot: Array, row: Int[Array, " V"]) -> Array:
    """Returns the counts, to be donated, with those of one slot replaced."""
    return counts.at[slot].set(row)


def _token_ids(batch: Mapping[str, Array], last_tokens: Int[Array, " slots+1"]) -> Array:
    """Fills in the ids that only the device knows. Such rows come first: token t is row t."""
    token_ids, slots = batch["token_ids"], batch["slots"]
    count = min(token_ids.shape[0], slots.shape[0])
    head = token_ids[:count]
    known = jnp.where(head == FROM_DEVICE, last_tokens[slots[:count]], head)
    return jnp.concatenate([known, token_ids[count:]])


def _token_rows(batch: Mapping[str, Array]) -> list[Array]:
    """Makes a row of one token of each token of a batch: however its prompt is cut into chunks, a
    token then is computed in the same way."""
    token = jnp.arange(batch["positions"].shape[0])
    num_tokens = batch["cu_q_lens"][-1]
    is_real = token < num_tokens
    row = jnp.sum(token[:, None] >= batch["cu_q_lens"][1:], axis=1)
    row = jnp.minimum(row, batch["kv_lens"].shape[0] - 1)
    return [
        jnp.where(is_real, batch["positions"] + 1, 0),
        batch["page_indices"][row],
        jnp.minimum(jnp.arange(len(token) + 1, dtype=jnp.int32), num_tokens),
        jnp.broadcast_to(num_tokens, 3),
    ]


def make_attend(
    options: StepOptions,
    bucket: Bucket,
    batch: Mapping[str, Array],
    kv_scales: Float[Array, "L 2 K H"] | None = None,
) -> Attend:
    """Returns the attention of one layer over this batch; with several devices, each does the
    heads that it holds."""
    model, mesh = options.model, options.mesh
    rows = [batch[n] for n in ("kv_lens", "page_indices", "cu_q_lens", "distribution")]
    if options.invariant:
        rows = _token_rows(batch)

    def attention(q, k, v, kv_pool, layer, sliding_window, kv_scales, *rows):
        k_scale, v_scale = (1.0, 1.0) if kv_scales is None else kv_scales[layer]
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
            k_scale=k_scale,
            v_scale=v_scale,
            backend=options.backend,
            device_kind=mesh.devices.flat[0].device_kind,
            decode_only=bucket.decode_only or options.invariant,
            config=aligned_config() if options.invariant else None,
        )

    if mesh.size > 1:
        heads = PartitionSpec(None, MODEL_AXIS, None)
        pool = pool_sharding(mesh).spec
        whole, scales = PartitionSpec(), PartitionSpec(None, None, MODEL_AXIS, None)
        attention = jax.shard_map(
            attention,
            mesh=mesh,
            in_specs=(heads, heads, heads, pool, whole, whole, scales, *[whole] * len(rows)),
            out_specs=(heads, pool),
            check_vma=False,
        )

    def attend(q, k, v, kv_pool, layer, sliding_window):
        return attention(q, k, v, kv_pool, layer, sliding_window, kv_scales, *rows)

    return attend
