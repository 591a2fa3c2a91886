"""Prefill attention in plain XLA: tiles of one row's queries over its pages. Knows arrays only.

Both loops have dynamic trip counts: over the tiles of all rows that are not decode rows, and for a
tile over the blocks of pages that some query of it can see.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.kv_layout import NULL_PAGE

_MASKED = -1e30  # finite: a block that a query does not see must not make inf - inf
_barrier = lax.optimization_barrier  # one masked copy of the scores, not one in each consumer


def prefill(
    q, out, kv_pool, layer, kv_lens, page_indices, cu_q_lens, distribution, *,
    window, soft_cap, sinks, tile, block,
):  # fmt: skip
    """Attends rows decode_end to num_seqs and puts their tokens into `out`; returns it.

    q and out `[T, N, H]`; sinks f32[K, G] or None; `tile` queries meet `block` keys at a time
    (block in whole pages).
    """
    num_tokens = q.shape[0]
    index = jnp.arange(kv_lens.shape[0])
    here = (index >= distribution[0]) & (index < distribution[2])
    q_lens = jnp.where(here, jnp.diff(cu_q_lens), 0)
    tile = min(tile, num_tokens)
    counts = -(-q_lens // tile)
    ends = jnp.cumsum(counts)

    def one_tile(state):
        i, out = state
        row = jnp.sum(i >= ends)
        start = cu_q_lens[row] + (i - ends[row] + counts[row]) * tile
        # A tile never leaves the step: the last one starts earlier, over tokens already done.
        token = jnp.minimum(start, num_tokens - tile) + jnp.arange(tile)
        positions = kv_lens[row] - cu_q_lens[row + 1] + token
        o = _attend(
            lax.dynamic_slice_in_dim(q, token[0], tile), positions, row, kv_lens[row], kv_pool,
            layer, page_indices, window=window, soft_cap=soft_cap, sinks=sinks, block=block,
        )  # fmt: skip
        old = lax.dynamic_slice_in_dim(out, token[0], tile)
        mine = (token >= start) & (token < cu_q_lens[row + 1])
        o = jnp.where(mine[:, None, None], o.astype(out.dtype), old)
        return i + 1, lax.dynamic_update_slice_in_dim(out, o, token[0], 0)

    return lax.while_loop(lambda state: state[0] < ends[-1], one_tile, (0, out))[1]


def _attend(
    q, positions, row, kv_len, kv_pool, layer, page_indices, *, window, soft_cap, sinks, block
):  # fmt: skip
    """One tile of one row's queries: q `[t, N, H]` at `positions` i32[t] -> f32 `[t, N, H]`."""
    tile, num_heads, head_dim = q.shape
    page_size, num_kv_heads = kv_pool.shape[2], kv_pool.shape[3] // 2
    pages = block // page_size
    q = q.astype(jnp.float32).reshape(tile, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
    q = _barrier(q.reshape(num_kv_heads, -1, head_dim))  # [K, G*t, H]
    shape = (num_kv_heads, q.shape[1] // tile, tile)  # [K, G, t]
    low = jnp.where(window > 0, jnp.maximum(positions - window + 1, 0), 0)
    end = jnp.minimum(positions[-1] + 1, kv_len)

    def one_block(state):
        b, best, total, acc = state
        key = b * block + jnp.arange(block)
        number = b * pages + jnp.arange(pages)
        page = page_indices[row, jnp.minimum(number, page_indices.shape[1] - 1)]
        page = _barrier(jnp.where(number * page_size < end, page, NULL_PAGE))
        kv = kv_pool[layer, page].reshape(block, num_kv_heads, 2, head_dim).astype(jnp.float32)
        k = kv[:, :, 0].swapaxes(0, 1)
        v = jnp.where(((key >= low[0]) & (key < end))[None, :, None], kv[:, :, 1].swapaxes(0, 1), 0)
        s = jnp.einsum("kmh,kbh->kmb", q, k).reshape(*shape, block)
        if soft_cap is not None:
            s = soft_cap * jnp.tanh(s / soft_cap)
        seen = _barrier((key <= positions[:, None]) & (key >= low[:, None]))
        s = _barrier(jnp.where(seen, s, _MASKED))
        new_best = jnp.maximum(best, s.max(-1))
        # A query that has seen nothing yet adds up rubbish; `keep` becomes 0 once it sees a key.
        p = jnp.exp(s - new_best[..., None])
        keep = jnp.exp(best - new_best)
        o = jnp.einsum("kmb,kbh->kmh", p.reshape(num_kv_heads, -1, block), v)
        acc = acc * keep.reshape(num_kv_heads, -1, 1) + o
        return b + 1, new_best, total * keep + p.sum(-1), acc

    best, total = jnp.full(shape, _MASKED), jnp.zeros(shape, jnp.float32)
    if sinks is not None:  # a sink is a key seen already, whose value is zero
        best, total = jnp.maximum(best, sinks[..., None]), total + 1
    state = (low[0] // block, best, total, jnp.zeros(q.shape, jnp.float32))
    _, _, total, acc = lax.while_loop(lambda s: s[0] * block < end, one_block, state)
    out = acc / jnp.where(total == 0, 1, total).reshape(num_kv_heads, -1, 1)
    out = out.reshape(*shape, head_dim).transpose(2, 0, 1, 3)
    return out.reshape(tile, num_heads, head_dim)
