"""Decode attention in plain XLA: one query per row over its pages. Knows arrays only.

A row's context is cut into blocks of at most 16 tokens, and the blocks of all rows form one list
of work items. Each iteration of a loop with a dynamic trip count takes the next `decode_items` of
them, whatever rows they belong to, so the cost follows the sum of the rows' live contexts.

The forms below were chosen on XLA:CPU, where keys and values are read from DRAM once and are never
copied: a gather whose result is used once fuses into the multiplication that uses it, so each query
head of a group has its own gather (`G` in its batch dimensions), and each token of a block too.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

_MASKED = -1e30  # finite: a row that has met no token yet must not make inf - inf
_EXACT = lax.Precision.HIGHEST
_barrier = lax.optimization_barrier  # keeps small index or mask work out of the large fusions


def decode(
    q, kv_pool, layer, kv_lens, page_indices, *,
    window, soft_cap, sinks, num_items, aligned=False,
):  # fmt: skip
    """Attends one query per row. q `[S, N, H]` -> f32 `[S, N, H]`; rows with kv_len 0 give zero.

    kv_lens i32[S]; page_indices i32[S, J]; `window` i32 scalar, 0 for all; sinks f32[K, G] or None;
    `num_items` is W, the static number of work items in one iteration; where `aligned`, each row
    has a multiple of W, some of them beyond its blocks.
    """
    num_rows, num_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads = kv_pool.shape[1], kv_pool.shape[2], kv_pool.shape[3] // 2
    group = num_heads // num_kv_heads
    block = min(page_size, 16)
    blocks_per_page = page_size // block
    blocks = kv_pool.reshape(-1, block, num_kv_heads, 2 * head_dim)  # [L*P*p/block, b, K, 2H]
    # Heads are in (g, k) order in here: all K of a block are then read in one sweep.
    queries = q.astype(jnp.float32).reshape(num_rows, num_kv_heads, group, head_dim).swapaxes(1, 2)

    first, ends, offsets = _work_items(kv_lens, window, block, num_items if aligned else 1)

    def body(state):
        item, best, total, acc = state
        items = item + jnp.arange(num_items)
        row = _barrier(jnp.sum(items[:, None] >= ends, axis=1))  # == S past the last item
        owner = row[:, None] == jnp.arange(num_rows)
        live = row < num_rows
        row = jnp.minimum(row, num_rows - 1)
        number = items + offsets[row]
        page = page_indices[row, jnp.clip(number // blocks_per_page, 0, page_indices.shape[1] - 1)]
        index = (layer * num_pages + page) * blocks_per_page + number % blocks_per_page
        index = jnp.where(live, index, 0)
        low = first[row] - number * block
        high = jnp.where(live, kv_lens[row] - number * block, 0)
        index, low, high, row = _barrier((index, low, high, row))
        token = jnp.arange(block)
        valid = (token >= low[:, None]) & (token < high[:, None])  # [W, b]

        s = _scores(_barrier(queries[row]), blocks, index)
        if soft_cap is not None:
            s = soft_cap * jnp.tanh(s / soft_cap)
        s = _barrier(jnp.where(valid[:, None, None], s.swapaxes(2, 3), _MASKED))
        s = s.reshape(num_items, num_heads, block)
        highest = jnp.where(owner[:, :, None], s.max(-1)[:, None], _MASKED).max(0)
        new_best = jnp.maximum(best, highest)
        s = _barrier(s - _barrier(new_best[row])[:, :, None])
        # Flat: XLA:CPU does not vectorise an exponential whose minor dimension is short.
        p = _barrier(jnp.exp(s.reshape(-1))).reshape(num_items, group, num_kv_heads, block)
        o = _weighted_values(p, blocks, index, valid).reshape(num_items, -1)
        # 0 * NaN is NaN: a row that went wrong must spoil only itself, through its `total`.
        o = jnp.where(jnp.isfinite(o), o, 0)
        mass = p.sum(-1).reshape(num_items, 1, num_heads)
        keep = jnp.exp(best - new_best)
        total = total * keep + jnp.where(owner[:, :, None], mass, 0).sum(0)
        added = jnp.dot(owner.astype(jnp.float32).T, o, precision=_EXACT)
        acc = acc * keep[..., None] + added.reshape(acc.shape)
        return item + num_items, new_best, total, acc

    shape = (num_rows, num_heads)
    best, total = jnp.full(shape, _MASKED), jnp.zeros(shape, jnp.float32)
    if sinks is not None:  # a sink is a token met already, whose value is zero
        best, total = jnp.maximum(best, sinks.T.reshape(-1)), total + 1
    state = (0, best, total, jnp.zeros((*shape, head_dim), jnp.float32))
    _, _, total, acc = lax.while_loop(lambda state: state[0] < ends[-1], body, state)
    out = acc / jnp.where(total == 0, 1, total)[..., None]
    return out.reshape(num_rows, group, num_kv_heads, head_dim).swapaxes(1, 2).reshape(q.shape)


def _work_items(kv_lens, window, block, multiple):
    """Returns i32[S] each: a row's first token in the window; where its items end, item i being of
    the first row whose end lies above i; and what makes an item the number of a block in its row.
    """
    first = jnp.where(window > 0, jnp.maximum(kv_lens - window, 0), 0)
    counts = -(-kv_lens // block) - first // block
    counts = -(-counts // multiple) * multiple
    ends = jnp.cumsum(counts)
    return first, ends, first // block - (ends - counts)


def _lanes(head_dim: int) -> int:
    """The shortest divisor of head_dim that still fills vector registers."""
    return min(n for n in range(1, head_dim + 1) if head_dim % n == 0 and n >= min(32, head_dim))


def _scores(queries, blocks, index):
    """queries f32 `[W, G, K, H]`, blocks[index] -> f32 `[W, G, b, K]`.

    Products are summed elementwise down to a few lanes; a matrix-vector product sums those. A dot
    over G query heads would copy and repack the keys, which costs more than it computes.
    """
    num_items, group, num_kv_heads, head_dim = queries.shape
    block, lanes = blocks.shape[1], _lanes(head_dim)
    page = jnp.broadcast_to(index[:, None], (num_items, group))

    def keys(lane):
        start = jnp.stack([page, jnp.full_like(page, lane)], axis=-1)
        dims = lax.GatherDimensionNumbers(
            offset_dims=(2, 3, 4), collapsed_slice_dims=(0,), start_index_map=(0, 3)
        )
        sizes = (1, block, num_kv_heads, lanes)
        return lax.gather(blocks, start, dims, sizes, mode="promise_in_bounds")

    products = sum(
        keys(lane).astype(jnp.float32) * queries[:, :, None, :, lane : lane + lanes]
        for lane in range(0, head_dim, lanes)
    )
    ones = jnp.ones((lanes, 1), jnp.float32)
    sums = jnp.dot(_barrier(products).reshape(-1, lanes), ones, precision=_EXACT)
    return sums.reshape(num_items, group, block, num_kv_heads)


def _weighted_values(p, blocks, index, valid):
    """p f32 `[W, G, K, b]`, blocks[index] -> f32 `[W, G, K, H]`, of valid tokens."""
    num_items, group, num_kv_heads, block = p.shape
    head_dim = blocks.shape[3] // 2
    page = jnp.broadcast_to(index[:, None], (num_items, group))

    def values(token):
        start = [page, jnp.full_like(page, token), jnp.full_like(page, head_dim)]
        dims = lax.GatherDimensionNumbers(
            offset_dims=(2, 3), collapsed_slice_dims=(0, 1), start_index_map=(0, 1, 3)
        )
        sizes = (1, 1, num_kv_heads, head_dim)
        v = lax.gather(blocks, jnp.stack(start, -1), dims, sizes, mode="promise_in_bounds")
        return jnp.where(valid[:, token, None, None, None], v.astype(jnp.float32), 0)

    return _barrier(sum(values(b) * p[:, :, :, b, None] for b in range(block)))
