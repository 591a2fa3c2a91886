"""What the TPU attention kernel holds and moves: its memory, its walk over tiles, and every copy
between HBM and VMEM. Knows rows, pages and semaphores; computes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.config import (
    AttentionShape,
    tpu_decode_bytes,
    tpu_prefill_bytes,
)

LANES = 128
_RUN = 16  # new tokens written by one copy where they lie in one page


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """What is known of a call when it is compiled. A tile is `rows` rows of `tokens` tokens."""

    shape: AttentionShape
    rows: int
    tokens: int
    pages: int  # of a row in one block
    side_by_side: bool
    soft_cap: float | None
    has_sinks: bool
    decode_only: bool

    @property
    def is_decode(self) -> bool:
        return self.tokens == 1

    @property
    def keys(self) -> int:
        """Keys of a row in one block."""
        return self.pages * self.shape.page_size

    @property
    def num_heads(self) -> int:
        return self.shape.num_kv_heads * self.shape.group

    @property
    def queries(self) -> tuple[int, int]:
        """(A, M): sets of queries that meet the same keys, and queries of one set.

        In decode a row's heads are one set. In prefill the queries of a KV head are one, and lie
        head by head, each with all tokens of the tile.
        """
        if self.is_decode:
            return self.rows, self.num_heads
        return self.shape.num_kv_heads, self.shape.group * self.tokens

    @property
    def vmem_bytes(self) -> int:
        if self.is_decode:
            return tpu_decode_bytes(self.shape, self.rows, self.pages)
        return tpu_prefill_bytes(self.shape, self.tokens, self.pages)

    def scratch(self) -> list[Any]:
        """The buffers and semaphores of Refs, from `q_buffer` on."""
        shape, f32 = self.shape, jnp.float32
        tile = (self.rows * self.tokens, self.num_heads, shape.width)
        by_head = pltpu.VMEM((shape.pool_rows, self.keys, shape.width), shape.q_dtype)
        numbers = pltpu.VMEM((self.num_heads, self.keys * shape.num_kv_heads), jnp.int32)
        return [
            pltpu.VMEM(tile, shape.q_dtype),
            pltpu.VMEM(tile, shape.q_dtype),
            pltpu.VMEM((2, self.rows, self.keys, shape.pool_rows, shape.width), shape.kv_dtype),
            pltpu.VMEM((*self.queries, shape.width), shape.q_dtype),
            pltpu.VMEM((*self.queries, LANES), f32),
            pltpu.VMEM((*self.queries, LANES), f32),
            pltpu.VMEM((*self.queries, shape.width), f32),
            numbers if self.is_decode else by_head,
            *[pltpu.SemaphoreType.DMA] * 3,
            pltpu.SemaphoreType.DMA((2,)),
        ]


class Refs(NamedTuple):
    """The kernel's memory: scalars in SMEM, arrays in HBM, buffers in VMEM."""

    layer: Any  # i32[1]
    window: Any  # i32[1]
    distribution: Any  # i32[3]
    kv_lens: Any  # i32[S]
    cu_q_lens: Any  # i32[S+1]
    page_table: Any  # i32[S*J]
    sinks: Any  # f32[N], or None
    q: Any  # [T, N, W]
    new: Any  # [T, R, W]
    out: Any  # [T, N, W]
    pool: Any  # [L, P, p, R, W], read and written through the output
    q_buffer: Any  # [rows * tokens, N, W]
    out_buffer: Any  # [rows * tokens, N, W]
    kv_buffer: Any  # [2, rows, keys, R, W]
    queries: Any  # [A, M, W]
    best: Any  # f32[A, M, 128], the same in all lanes
    total: Any  # f32[A, M, 128], to be summed over the lanes: once, as that is slow
    acc: Any  # f32[A, M, W]
    block: Any  # decode: i32[N, keys * K], see number_keys; prefill: [R, keys, W] as q
    new_done: Any  # semaphores
    q_done: Any
    out_done: Any
    kv_done: Any  # [2]


class Tile(NamedTuple):
    row: Any  # the first one
    token: Any  # the first one


class Context(NamedTuple):
    """What the queries of one row of a tile see."""

    row: Any
    position: Any  # of the first query
    first_page: Any  # of the row, holds the first key in sight
    end: Any  # position after the last key; 0 where the tile has fewer rows


def rows_of_call(c: Static, refs: Refs):
    """The rows that this call is for, [begin, end)."""
    if c.decode_only:
        return jnp.int32(0), refs.cu_q_lens[c.shape.num_rows]
    if c.is_decode:
        return jnp.int32(0), refs.distribution[0]
    return refs.distribution[0], refs.distribution[2]


def tile_after(c: Static, refs: Refs, tile: Tile, end) -> Tile:
    """The tile that follows; its row is not below `end` where there is none."""
    if c.is_decode:
        return Tile(tile.row + c.rows, tile.token + c.rows)
    token = jnp.minimum(tile.token + c.tokens, refs.cu_q_lens[tile.row + 1])
    return tile_from(c, refs, tile.row, token, end)


def tile_from(c: Static, refs: Refs, row, token, end) -> Tile:
    """The tile at `token`, of the first row from `row` on that has tokens left."""

    def stop_of(row):
        return refs.cu_q_lens[jnp.minimum(row + 1, c.shape.num_rows)]

    row, _ = lax.while_loop(
        lambda state: (state[0] < end) & (state[1] <= token),
        lambda state: (state[0] + 1, stop_of(state[0] + 1)),
        (row, stop_of(row)),
    )
    return Tile(row, token)


def low_of(refs: Refs, position):
    """The first position that a query at `position` sees; may be below 0."""
    window = refs.window[0]
    return position + 1 - jnp.where(window > 0, window, jnp.iinfo(jnp.int32).max // 2)


def contexts_of(c: Static, refs: Refs, tile: Tile, end) -> list[Context]:
    """The context of each row of a tile."""

    def context(r: int) -> Context:
        row = jnp.minimum(tile.row + r, c.shape.num_rows - 1)
        kv_len, is_row = refs.kv_lens[row], tile.row + r < end
        position = kv_len - refs.cu_q_lens[row + 1] + tile.token + r
        low = jnp.where(is_row, jnp.maximum(low_of(refs, position), 0), 0)
        keys_end = jnp.where(is_row, jnp.minimum(position + c.tokens, kv_len), 0)
        return Context(row, position, lax.div(low, c.shape.page_size), keys_end)

    return [context(r) for r in range(c.rows)]


def num_blocks(c: Static, refs: Refs, tile: Tile, end):
    """Blocks until every row of the tile has met all its keys; at least one."""
    blocks = jnp.int32(1)
    for context in contexts_of(c, refs, tile, end):
        pages = pl.cdiv(context.end, c.shape.page_size) - context.first_page
        blocks = jnp.maximum(blocks, pl.cdiv(pages, c.pages))
    return blocks


def start_block(c: Static, refs: Refs, tile: Tile, end, b, slot):
    """Starts to fetch block b of every row of the tile into half `slot` of the buffer."""
    _each_page(c, refs, tile, end, b, slot, lambda copy: copy.start())


def await_block(c: Static, refs: Refs, tile: Tile, end, b, slot):
    _each_page(c, refs, tile, end, b, slot, lambda copy: copy.wait())


def _each_page(c: Static, refs: Refs, tile: Tile, end, b, slot, do):
    page_size = c.shape.page_size
    for r, context in enumerate(contexts_of(c, refs, tile, end)):
        first = context.first_page + b * c.pages
        count = jnp.clip(pl.cdiv(context.end, page_size) - first, 0, c.pages)
        table = context.row * c.shape.pages_per_row + first

        def one_page(j, _, r=r, table=table):
            page = refs.pool.at[refs.layer[0], refs.page_table[table + j]]
            here = refs.kv_buffer.at[slot, r, pl.ds(j * page_size, page_size)]
            do(pltpu.make_async_copy(page, here, refs.kv_done.at[slot]))

        lax.fori_loop(0, count, one_page, None)


def start_new_rows(c: Static, refs: Refs, begin, end):
    """Starts to write the keys and values of rows [begin, end) into their pages."""
    _each_run(c, refs, begin, end, lambda copy: copy.start())


def await_new_rows(c: Static, refs: Refs, begin, end):
    _each_run(c, refs, begin, end, lambda copy: copy.wait())


def _each_run(c: Static, refs: Refs, begin, end, do):
    """Where a row's tokens fill _RUN slots of a page, one copy takes them all:
    page_size 16, positions 14 to 33 -> copies of 1, 1, 16, 1 and 1 tokens
    """
    page_size = c.shape.page_size
    run = 1 if c.is_decode else min(_RUN, page_size, c.shape.num_tokens)

    def one_row(row, _):
        stop = refs.cu_q_lens[row + 1]
        table, offset = row * c.shape.pages_per_row, refs.kv_lens[row] - stop

        def copy(token, count):
            position = token + offset
            page = refs.page_table[table + lax.div(position, page_size)]
            slots = pl.ds(lax.rem(position, page_size), count)
            there = refs.pool.at[refs.layer[0], page, slots]
            do(pltpu.make_async_copy(refs.new.at[pl.ds(token, count)], there, refs.new_done))
            return token + count

        def one_run(token):
            if run == 1:
                return copy(token, 1)
            room = jnp.minimum(stop - token, page_size - lax.rem(token + offset, page_size))
            return lax.cond(room >= run, lambda: copy(token, run), lambda: copy(token, 1))

        lax.while_loop(lambda token: token < stop, one_run, refs.cu_q_lens[row])

    lax.fori_loop(begin, end, one_row, None)


def of_queries(c: Static, refs: Refs, tile: Tile):
    """The copy of a tile's queries into their buffer."""
    there = refs.q.at[pl.ds(tile.token, c.rows * c.tokens)]
    return pltpu.make_async_copy(there, refs.q_buffer, refs.q_done)


def of_outputs(c: Static, refs: Refs, tile: Tile):
    """The copy of a tile's outputs out of their buffer."""
    there = refs.out.at[pl.ds(tile.token, c.rows * c.tokens)]
    return pltpu.make_async_copy(refs.out_buffer, there, refs.out_done)
