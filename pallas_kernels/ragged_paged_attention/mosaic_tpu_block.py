"""What the TPU attention kernel computes: queries against one block of keys and values, and what
is around that in a tile. Knows VMEM buffers; starts and awaits no copy."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.mosaic_tpu_copies import (
    LANES,
    Context,
    Refs,
    Static,
    low_of,
)

_MASKED = -1e30  # finite: a block that a query does not see must not make inf - inf
_NO_KEY = 2**30  # after every key
_CLEARED = 16  # keys cleared at once
_REGISTER_ROWS = 512  # pool rows that stay in registers while they change places


def open_tile(c: Static, refs: Refs):
    """Takes the tile's queries out of their buffer, which may then be filled anew."""
    q = refs.q_buffer[...]
    if not c.is_decode:  # [tokens, N, W] -> [K, G * tokens, W]
        q = jnp.swapaxes(q, 0, 1).reshape(refs.queries.shape)
    refs.queries[...] = q
    refs.acc[...] = jnp.zeros_like(refs.acc)
    if not c.has_sinks:
        refs.best[...] = jnp.full_like(refs.best, _MASKED)
        refs.total[...] = jnp.zeros_like(refs.total)
        return
    refs.total[...] = jnp.full_like(refs.total, 1 / LANES)
    for head in range(c.num_heads):
        sink, (k, g) = refs.sinks[head], divmod(head, c.shape.group)
        if c.is_decode:
            refs.best[:, pl.ds(head, 1)] = jnp.full((c.rows, 1, LANES), sink)
        else:
            refs.best[k, pl.ds(g * c.tokens, c.tokens)] = jnp.full((c.tokens, LANES), sink)


def close_tile(c: Static, refs: Refs):
    """Puts the tile's outputs into their buffer."""
    total = jnp.sum(refs.total[...], axis=2, keepdims=True)
    out = (refs.acc[...] / total).astype(refs.out.dtype)
    if not c.is_decode:
        out = jnp.swapaxes(out.reshape(c.num_heads, c.tokens, -1), 0, 1)
    refs.out_buffer[...] = out


def meet(c: Static, refs: Refs, contexts: list[Context], b, slot):
    """Attends the tile's queries to block b of their contexts, which lies in the buffer."""
    starts = [(context.first_page + b * c.pages) * c.shape.page_size for context in contexts]
    for r, (context, start) in enumerate(zip(contexts, starts, strict=True)):
        _clear_tail(c, refs, r, context.end - start, slot)
    # The rows of a decode tile follow each other without a branch: each hides another's latency.
    for r, (context, start) in enumerate(zip(contexts, starts, strict=True)):
        if c.is_decode:
            _meet_in_decode(c, refs, r, context, start, slot)
        else:
            _meet_in_prefill(c, refs, context, start, slot)


def _clear_tail(c: Static, refs: Refs, r: int, count, slot):
    """Zeroes a block after its first `count` keys: no NaN may meet a weight of zero."""
    # Two blocks after a row's end, both halves of the buffer are clean and stay so.
    count = jnp.where(count <= -2 * c.keys, c.keys, jnp.clip(count, 0, c.keys))
    units = pl.cdiv(count, _CLEARED)

    def clear(start, size):
        zeros = jnp.zeros((size, *refs.kv_buffer.shape[3:]), refs.kv_buffer.dtype)
        refs.kv_buffer[slot, r, pl.ds(start, size)] = zeros

    lax.fori_loop(count, units * _CLEARED, lambda i, _: clear(i, 1), None)
    lax.fori_loop(units, c.keys // _CLEARED, lambda i, _: clear(i * _CLEARED, _CLEARED), None)


def number_keys(c: Static, refs: Refs):
    """Decode: notes which key of a block each pair of a query head and a key of any head is about.

    All heads of a row meet all its keys `[keys * K, W]` in one product, as they lie. Most pairs are
    of a query with another head's key, and _NO_KEY here. That takes fewer cycles than sorting the
    keys by head, as long as a device has up to about a hundred query heads.
    """
    shape, num_kv_heads = refs.block.shape, c.shape.num_kv_heads
    head = lax.div(lax.broadcasted_iota(jnp.int32, shape, 0), c.shape.group)
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    is_mine = lax.rem(column, num_kv_heads) == head
    refs.block[...] = jnp.where(is_mine, lax.div(column, num_kv_heads), _NO_KEY)


def _meet_in_decode(c: Static, refs: Refs, r: int, context: Context, start, slot):
    """Attends the one query of row r, in all heads, to a block that begins at `start`."""
    k, v = _keys_and_values(c, refs, r, slot)
    number = refs.block[...]
    seen = (number < context.end - start) & (number >= low_of(refs, context.position) - start)
    _meet(c, refs, r, k, v, seen)


def _keys_and_values(c: Static, refs: Refs, r: int, slot):
    """Returns a block's keys and its values, `[keys * K, W]` each, in the order of the pool."""
    dtype, width = refs.queries.dtype, c.shape.width
    if c.side_by_side:
        kv = refs.kv_buffer[slot, r].astype(dtype).reshape(-1, width)
        return kv, kv
    if refs.kv_buffer.dtype == jnp.float32:
        every_other = (pl.ds(first, c.shape.num_kv_heads, stride=2) for first in (0, 1))
        k, v = (refs.kv_buffer.at[slot, r][:, rows] for rows in every_other)
    else:
        # A word holds a key's number, and its value's in the upper half. Either is half a float32.
        kv = refs.kv_buffer[slot, r].astype(jnp.bfloat16).reshape(-1, width)
        words = pltpu.bitcast(kv, jnp.uint32)
        k = lax.bitcast_convert_type(words << 16, jnp.float32)
        v = lax.bitcast_convert_type(words & jnp.uint32(0xFFFF0000), jnp.float32)
    return k.astype(dtype).reshape(-1, width), v.astype(dtype).reshape(-1, width)


def _meet_in_prefill(c: Static, refs: Refs, context: Context, start, slot):
    """Attends the queries of a tile, head by head, to a block that begins at `start`."""
    _sort_by_head(c, refs, slot)
    shape = (c.queries[1], c.keys)

    def all_heads(seen):
        def one_head(h, _):
            k, v = (h, h) if c.side_by_side else (2 * h, 2 * h + 1)
            _meet(c, refs, h, refs.block[k], refs.block[v], seen)

        lax.fori_loop(0, c.shape.num_kv_heads, one_head, None)

    def some_keys():
        query = lax.rem(lax.broadcasted_iota(jnp.int32, shape, 0), c.tokens)
        position = context.position + query
        key = start + lax.broadcasted_iota(jnp.int32, shape, 1)
        all_heads((key <= position) & (key >= low_of(refs, position)))

    # Every query sees all of most blocks.
    is_whole = start + c.keys <= context.position + 1
    is_whole &= start >= low_of(refs, context.position + c.tokens - 1)
    lax.cond(is_whole, lambda: all_heads(None), some_keys)


def _sort_by_head(c: Static, refs: Refs, slot):
    """Turns a block from token by token to head by head, as many tokens at once as registers
    hold."""
    size = max(16, 1 << (_REGISTER_ROWS // c.shape.pool_rows).bit_length() - 1)
    size = math.gcd(c.keys, size)

    def some(i, _):
        tokens = pl.ds(pl.multiple_of(i * size, size), size)
        kv = refs.kv_buffer[slot, 0, tokens].astype(refs.block.dtype)
        refs.block[:, tokens] = jnp.swapaxes(kv, 0, 1)

    lax.fori_loop(0, c.keys // size, some, None)


def _meet(c: Static, refs: Refs, a, k, v, seen):
    """One step of the online softmax: query set a `[M, W]` against k and v `[n, W]`.

    seen bool[M, n], None where all are.
    """
    dot = functools.partial(
        lax.dot_general,
        precision=lax.Precision.HIGHEST if k.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    s = dot(refs.queries[a], k, (((1,), (1,)), ((), ())))
    if c.soft_cap is not None:
        s = c.soft_cap * jnp.tanh(s / c.soft_cap)
    if seen is not None:
        s = jnp.where(seen, s, _MASKED)
    best = refs.best[a]
    new_best = jnp.maximum(best, jnp.max(s, axis=1, keepdims=True))
    # A query that has seen nothing yet adds up rubbish; `keep` becomes 0 once it sees a key.
    p = jnp.exp(s - _across(new_best, s.shape[1]))
    keep = jnp.exp(best - new_best)
    refs.best[a] = new_best
    mass = sum(p[:, i : i + LANES] for i in range(0, p.shape[1], LANES))
    refs.total[a] = refs.total[a] * keep + mass
    o = dot(p.astype(v.dtype), v, (((1,), (0,)), ((), ())))
    refs.acc[a] = refs.acc[a] * _across(keep, o.shape[1]) + o


def _across(x, width: int):
    """Widens `[M, 128]`, the same in all lanes, to `[M, width]`."""
    return jnp.concatenate([x] * (width // LANES), axis=1)
