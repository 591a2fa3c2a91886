"""Ragged paged attention in plain XLA: the production path on CPU. Knows arrays only.

Work follows each row's live context: loops have dynamic trip counts over (row, block of pages)
items, and softmax is accumulated in float32 from block to block (arXiv 2205.14135).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kv_layout import NULL_PAGE
from pallas_kernels.ragged_paged_attention.config import XlaConfig
from pallas_kernels.ragged_paged_attention.xla_decode import decode

_MASKED = -1e30  # finite: a fully masked block must not make inf - inf


def ragged_paged_attention(
    q, kv, kv_pool, layer, kv_lens, page_indices, cu_q_lens, distribution, *,
    scale, sliding_window, soft_cap, config: XlaConfig, decode_only: bool,
):  # fmt: skip
    """See `api.ragged_paged_attention`."""
    kv_pool = write_kv(kv, kv_pool, layer, kv_lens, page_indices, cu_q_lens)
    common = dict(scale=scale, window=jnp.asarray(sliding_window, jnp.int32), soft_cap=soft_cap)
    num_rows = kv_lens.shape[0]
    is_decode = jnp.arange(num_rows) < distribution[0]
    q_of_row = q if decode_only else q[jnp.minimum(jnp.arange(num_rows), q.shape[0] - 1)]
    decode_lens = jnp.where(is_decode, kv_lens, 0)
    if decode_only:
        decode_lens = jnp.where(jnp.diff(cu_q_lens) > 0, kv_lens, 0)
    rows = decode(
        q_of_row, kv_pool, layer, decode_lens, page_indices, num_items=config.decode_items, **common
    ).astype(q.dtype)
    if decode_only:
        return rows, kv_pool
    out = jnp.zeros_like(q)
    span = min(num_rows, q.shape[0])
    out = out.at[:span].set(jnp.where(is_decode[:span, None, None], rows[:span], 0))
    out = _prefill(
        q, out, kv_pool, layer, kv_lens, page_indices, cu_q_lens, distribution,
        config=config, **common,
    )  # fmt: skip
    return out, kv_pool


def write_kv(kv, kv_pool, layer, kv_lens, page_indices, cu_q_lens):
    """Scatters new rows `[T, 2K, H]` into their pages; padding tokens go to the null page."""
    page_size = kv_pool.shape[2]
    token = jnp.arange(kv.shape[0])
    row = jnp.sum(token[:, None] >= cu_q_lens[None, 1:], axis=1)  # == S for padding tokens
    real = row < kv_lens.shape[0]
    row = jnp.where(real, row, 0)
    position = kv_lens[row] - cu_q_lens[row + 1] + token
    position = jnp.where(real, position, 0)
    page = jnp.where(real, page_indices[row, position // page_size], NULL_PAGE)
    return kv_pool.at[layer, page, position % page_size].set(kv)


def _scores(q, k, scale, soft_cap):
    """q `[..., M, H]` and k `[..., B, H]` -> f32 scores `[..., M, B]`."""
    s = jnp.einsum("...mh,...bh->...mb", q, k, preferred_element_type=jnp.float32) * scale
    return s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)


def _prefill(
    q, out, kv_pool, layer, kv_lens, page_indices, cu_q_lens, distribution, *,
    scale, window, soft_cap, config,
):  # fmt: skip
    """Rows from decode_end on, tile of queries by tile; writes their part of `out` `[T, N, H]`."""
    num_tokens, num_heads, head_dim = q.shape
    num_rows, page_size, num_kv_heads = kv_lens.shape[0], kv_pool.shape[2], kv_pool.shape[3] // 2
    group = num_heads // num_kv_heads
    tile = config.prefill_tile
    pages = config.prefill_block // page_size
    block = pages * page_size
    q_lens = jnp.diff(cu_q_lens)
    index = jnp.arange(num_rows)
    q_lens = jnp.where((index >= distribution[0]) & (index < distribution[2]), q_lens, 0)
    ends = jnp.cumsum(-(-q_lens // tile))
    q = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))
    out = jnp.pad(out, ((0, tile), (0, 0), (0, 0)))

    def one_tile(state):
        i, out = state
        row = jnp.sum(i >= ends)
        offset = (i - (ends[row] - -(-q_lens[row] // tile))) * tile  # of the tile in its row
        start = cu_q_lens[row] + offset
        queries = jax.lax.dynamic_slice_in_dim(q, start, tile)
        queries = queries.reshape(tile, num_kv_heads, group, head_dim).transpose(1, 2, 0, 3)
        q_pos = kv_lens[row] - q_lens[row] + offset + jnp.arange(tile)
        real = jnp.arange(tile) < q_lens[row] - offset
        low = jnp.where(window > 0, jnp.maximum(q_pos - window + 1, 0), 0)
        last = jnp.minimum(q_pos[-1] + 1, kv_lens[row])

        def one_block(state):
            b, m, l, acc = state
            position = b * block + jnp.arange(block)
            page_number = b * pages + jnp.arange(pages)
            page = page_indices[row, jnp.minimum(page_number, page_indices.shape[1] - 1)]
            page = jnp.where(page_number * page_size < last, page, NULL_PAGE)
            tokens = kv_pool[layer, page].reshape(block, num_kv_heads, 2, head_dim)
            k = tokens[:, :, 0].swapaxes(0, 1)[:, None]
            v = tokens[:, :, 1].swapaxes(0, 1)
            v = jnp.where((position < last)[None, :, None], v, 0)
            seen = (position[None] <= q_pos[:, None]) & (position[None] >= low[:, None])
            s = jnp.where(seen[None, None], _scores(queries, k, scale, soft_cap), _MASKED)
            m_new = jnp.maximum(m, s.max(-1))
            p = jnp.where(seen[None, None], jnp.exp(s - m_new[..., None]), 0)
            keep = jnp.exp(m - m_new)
            l = l * keep + p.sum(-1)
            acc = acc * keep[..., None] + jnp.einsum(
                "kgtb,kbh->kgth", p.astype(v.dtype), v, preferred_element_type=jnp.float32
            )
            return b + 1, m_new, l, acc

        shape = (num_kv_heads, group, tile)
        init = (
            low[0] // block,
            jnp.full(shape, _MASKED),
            jnp.zeros(shape),
            jnp.zeros((*shape, head_dim)),
        )
        _, _, l, acc = jax.lax.while_loop(lambda s: s[0] * block < last, one_block, init)
        o = acc / jnp.where(l > 0, l, 1)[..., None]
        o = o.transpose(2, 0, 1, 3).reshape(tile, num_heads, head_dim).astype(out.dtype)
        old = jax.lax.dynamic_slice_in_dim(out, start, tile)
        o = jnp.where(real[:, None, None], o, old)
        return i + 1, jax.lax.dynamic_update_slice_in_dim(out, o, start, 0)

    _, out = jax.lax.while_loop(lambda s: s[0] < ends[-1], one_tile, (0, out))
    return out[:num_tokens]
