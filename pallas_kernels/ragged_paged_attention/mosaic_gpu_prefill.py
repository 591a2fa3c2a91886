"""Prefill attention on a Hopper GPU in Pallas: tiles of a chunk's queries over its row's pages.
Knows arrays only.

The G query heads of a KV head are packed with the tokens: a chunk has G rows of queries for each
token, so that short chunks fill tiles and any G does. A thread block meets 128 such rows: two
warpgroups compute 64 each, and a third streams pages for both into shared memory by TMA; a fourth
widens pages of 8 bits. The thread blocks, one for each multiprocessor, take the tiles in turn: a
tile that is not there costs nothing. Softmax, and the turns that the two take at the tensor cores,
are FlashAttention-3's (arXiv 2407.08608).
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention.config import GpuConfig

ROWS = 64  # packed rows of a warpgroup: the rows of a wgmma tile
_TILE = 2 * ROWS
_LANES = 64  # converted or cleaned at once, to spare registers
_MASKED = -1e30  # finite: a block that a query does not see must not make inf - inf
_ALL = 2**30  # a window that nothing is outside of
_LOG2E = math.log2(math.e)  # the hardware's exponential is of base 2
_TILED = plgpu.Layout.WGMMA
_PER_ROW = _TILED.reduce(1)


class _Tile(NamedTuple):
    """Up to 128 packed rows of one chunk. Fields of arrays i32[tiles], or of scalars."""

    row: Any
    start: Any  # the first packed row
    head: Any  # its query head in the group
    position: Any  # its token's
    length: Any  # in packed rows
    kv_len: Any
    low: Any  # the first KV block
    high: Any  # the end of its KV blocks


def prefill(
    q, out, kv_pool, layer, kv_lens, page_indices, cu_q_lens, distribution, *,
    window, soft_cap, sinks, config: GpuConfig, interpret,
):  # fmt: skip
    """Attends rows decode_end to num_seqs and puts their tokens into `out`; returns it.

    q and out `[T, K, G, W]`; kv_pool `[L, P, p, 2K, W]`, as wide as q or of 8 bits; layer and
    window i32[], window 0 for all; kv_lens i32[S]; page_indices i32[S, J]; cu_q_lens i32[S+1];
    distribution i32[3]; sinks f32[K, G] or None.

    Raises:
      ValueError: the KV blocks of `config` are no multiple of 64 tokens, or fewer than 2 in flight.
    """
    if config.prefill_block % ROWS or config.prefill_stages < 2:
        raise ValueError(
            f"{config.prefill_block=} must be a multiple of {ROWS}, and {config.prefill_stages=} 2 "
            "or more: one warpgroup is up to a KV block ahead of the other"
        )
    num_tokens, num_kv_heads, group, width = q.shape
    window = jnp.where(window > 0, window, _ALL)
    tiles, num_tiles = _tiles(
        kv_lens, cu_q_lens, distribution, window, num_tokens, group, config.prefill_block
    )
    # XLA fuses these with what makes q, and those below with what takes the output.
    packed = q.swapaxes(0, 1).reshape(num_kv_heads, -1, width).astype(_operand_dtype(kv_pool.dtype))
    packed = jnp.pad(packed, ((0, 0), (0, _TILE), (0, 0)))  # a tile may begin at the last row
    if sinks is None:
        sinks = jnp.full((num_kv_heads, group), _MASKED)
    repeats = -(-(ROWS + group - 1) // group)  # a warpgroup's rows begin at any head of the group
    sinks = jnp.tile(jnp.maximum(sinks * _LOG2E, _MASKED), (1, repeats))
    new = _attend(
        packed, kv_pool, page_indices, tiles, jnp.stack([layer, num_tiles, window]), sinks,
        out_dtype=out.dtype, group=group, soft_cap=soft_cap, config=config, interpret=interpret,
    )  # fmt: skip
    new = new[:, : num_tokens * group].reshape(num_kv_heads, num_tokens, group, width)
    token = jnp.arange(num_tokens)
    mine = (token >= cu_q_lens[distribution[0]]) & (token < cu_q_lens[distribution[2]])
    return jnp.where(mine[:, None, None, None], new.swapaxes(0, 1), out)


def _operand_dtype(kv_dtype):
    """The tensor cores' dtype for a pool: the cheapest that holds each of its numbers."""
    return jnp.float16 if kv_dtype == jnp.float8_e4m3fn else jnp.bfloat16


def _tiles(kv_lens, cu_q_lens, distribution, window, num_tokens, group, block):
    """Returns i32[most tiles, fields of _Tile] and how many tiles there are.

    A chunk's last tile, which sees the most, comes first: so the thread blocks end together.
    """
    num_rows = kv_lens.shape[0]
    index = jnp.arange(num_rows)
    here = (index >= distribution[0]) & (index < distribution[2])
    lengths = jnp.where(here, jnp.diff(cu_q_lens), 0) * group
    counts = -(-lengths // _TILE)
    ends = jnp.cumsum(counts)
    most = num_tokens * group // _TILE + min(num_rows, num_tokens)
    number = jnp.maximum(ends[-1] - 1 - jnp.arange(most), 0)
    row = jnp.minimum(jnp.sum(number[:, None] >= ends, axis=1), num_rows - 1)
    offset = (number - ends[row] + counts[row]) * _TILE
    position = kv_lens[row] + (offset - lengths[row]) // group
    length = jnp.minimum(lengths[row] - offset, _TILE)
    first = jnp.maximum(position - window + 1, 0)
    last = position + (offset % group + length - 1) // group
    tile = _Tile(
        row=row, start=cu_q_lens[row] * group + offset, head=offset % group, position=position,
        length=length, kv_len=kv_lens[row], low=first // block, high=last // block + 1,
    )  # fmt: skip
    return jnp.stack(tile, axis=1), ends[-1]


@functools.partial(
    jax.jit, static_argnames=("out_dtype", "group", "soft_cap", "config", "interpret")
)  # so that an unrolled layer loop holds the kernel once
def _attend(
    q, kv_pool, pages, tiles, scalars, sinks, *, out_dtype, group, soft_cap, config, interpret
):
    """Runs the kernel. q `[K, packed rows, W]` -> the same; rows of no tile are left unset.

    tiles as from `_tiles`; scalars i32[3] = (layer, number of tiles, window); sinks f32[K, *] of
    base 2, repeating with the group's heads, _MASKED for none.
    """
    num_kv_heads, _, width = q.shape
    block, stages = config.prefill_block, config.prefill_stages
    pieces = block // math.gcd(block, kv_pool.shape[2])
    blocks = plgpu.SMEM((stages, block, width), q.dtype)
    filled = functools.partial(plgpu.Barrier, num_barriers=stages)
    scratch = dict(
        q_smem=plgpu.SMEM((2, ROWS, width), q.dtype),
        out_smem=plgpu.SMEM((2, ROWS, _lanes(width)[0].size), out_dtype),
        kv_smem=(blocks, blocks),
        kv_ready=(filled(num_arrivals=pieces), filled(num_arrivals=pieces)),
        kv_free=(filled(num_arrivals=2), filled(num_arrivals=2)),
        turn=plgpu.Barrier(num_arrivals=2),
    )
    if kv_pool.dtype != q.dtype:
        raw = plgpu.SMEM((stages, block, width), kv_pool.dtype)
        scratch |= dict(
            raw_smem=(raw, raw),
            raw_ready=scratch["kv_ready"],
            raw_free=(filled(), filled()),
            kv_ready=(filled(), filled()),
        )
    if interpret:
        scratch["p_smem"] = plgpu.SMEM((2, ROWS, block), q.dtype)
    programs = min(config.prefill_programs, tiles.shape[0] * num_kv_heads)
    return plgpu.kernel(
        functools.partial(_kernel, programs=programs, group=group, soft_cap=soft_cap),
        out_type=jax.ShapeDtypeStruct(q.shape, out_dtype),
        grid=(programs,),
        grid_names=("program",),
        num_threads=4 if "raw_smem" in scratch else 3,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(q, kv_pool, pages, tiles, scalars, sinks)


def _kernel(
    q_ref, pool_ref, pages_ref, tiles_ref, scalars_ref, sinks_ref, out_ref, *,
    q_smem, out_smem, kv_smem, kv_ready, kv_free, turn, programs, group, soft_cap,
    raw_smem=None, raw_ready=None, raw_free=None, p_smem=None,
):  # fmt: skip
    program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
    num_kv_heads, _, width = q_ref.shape
    stages, block, _ = kv_smem[0].shape
    page_size = pool_ref.shape[2]

    def for_my_tiles(one):
        """Runs one(tile, head, met) on each; `met` counts the KV blocks of those before. Returns
        the count of all."""

        def step(i, met):
            item = program + i * programs
            line, head = lax.div(item, num_kv_heads), lax.rem(item, num_kv_heads)
            tile = _Tile(*(tiles_ref[line, field] for field in range(len(_Tile._fields))))
            one(tile, head, met)
            return met + tile.high - tile.low

        num_tiles = scalars_ref[1]
        mine = lax.div(num_tiles * num_kv_heads - program + programs - 1, programs)
        return lax.fori_loop(0, mine, step, jnp.int32(0))

    def fetch(tile, head, met):
        """Streams a tile's KV blocks; past the row's last page, that page again."""
        smem, ready, free = (
            (kv_smem, kv_ready, kv_free) if raw_smem is None else (raw_smem, raw_ready, raw_free)
        )
        layer = scalars_ref[0]
        last_page = lax.div(tile.kv_len - 1, page_size)
        piece = math.gcd(block, page_size)

        @pl.loop(tile.low, tile.high)
        def _(number):
            count = met + number - tile.low
            slot = _slot(count, stages)
            tokens = [number * block + first for first in range(0, block, piece)]
            pages = [
                _page(pages_ref, tile.row, lax.min(lax.div(token, page_size), last_page))
                for token in tokens
            ]
            for kv in range(2):
                _wait_if(count >= stages, free[kv].at[slot])
                for i, (token, page) in enumerate(zip(tokens, pages, strict=True)):
                    offset = pl.multiple_of(lax.rem(token, page_size), piece)
                    plgpu.copy_gmem_to_smem(
                        pool_ref.at[layer, page, pl.ds(offset, piece), 2 * head + kv],
                        smem[kv].at[slot, pl.ds(i * piece, piece)],
                        ready[kv].at[slot],
                    )

    def widen(tile, head, met):
        """Converts a tile's KV blocks to the queries' dtype."""
        del head

        @pl.loop(met, met + tile.high - tile.low)
        def _(count):
            slot = _slot(count, stages)
            for kv in range(2):
                _wait(raw_ready[kv].at[slot])
                _wait_if(count >= stages, kv_free[kv].at[slot])
                _widen(raw_smem[kv].at[slot], kv_smem[kv].at[slot])
                plgpu.barrier_arrive(raw_free[kv].at[slot])
                plgpu.barrier_arrive(kv_ready[kv].at[slot])

    def attend(tile, head, met):
        window, mine = scalars_ref[2], warpgroup * ROWS
        start, phase = tile.start + mine, tile.head + mine
        _load(q_ref.at[head], start, q_smem.at[warpgroup])
        index = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=_PER_ROW)
        positions = tile.position + lax.div(phase + index, jnp.full_like(index, group))
        most = _TILE // group + 1  # tokens after the first that have rows in this tile
        plus_product = _plus_product
        if p_smem is not None:
            plus_product = functools.partial(_plus_product_through, p_smem.at[warpgroup])

        def take_turns():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def step(number, carry):
            acc, best, total = carry
            slot = _slot(met + number - tile.low, stages)
            base = number * block
            keys, values = kv_smem[0].at[slot].transpose((1, 0)), kv_smem[1].at[slot]
            begin, end = tile.position - window + 1 - base, tile.kv_len - base
            # Warpgroup 0 is half a step ahead: its turn ends before the other meets the values.
            dirty = (warpgroup == 0) & ((begin > 0) | (end < block))

            @pl.when(dirty)
            def _():
                _wait(kv_ready[1].at[slot])
                _clean(values, begin, end)

            _wait(kv_ready[0].at[slot])
            s = _product(q_smem.at[warpgroup], keys, (ROWS, block), take_turns)
            plgpu.barrier_arrive(kv_free[0].at[slot])
            s = (s if soft_cap is None else _capped(s, soft_cap)) * _LOG2E
            all_seen = (base + block - 1 <= tile.position) & (base > tile.position + most - window)
            s = lax.cond(all_seen, lambda s: s, lambda s: _seen(s, positions - base, window), s)
            new_best = jnp.maximum(best, s.max(axis=1))
            keep = jnp.exp2(best - new_best)
            p = jnp.exp2(s - lax.broadcast_in_dim(new_best, s.shape, [0]))
            total = total * keep + p.sum(axis=1)
            acc = acc * lax.broadcast_in_dim(keep, acc.shape, [0])
            p = p.astype(q_smem.dtype)
            pl.when(~dirty)(lambda: _wait(kv_ready[1].at[slot]))
            take_turns()
            acc = plus_product(acc, p, values)
            plgpu.barrier_arrive(kv_free[1].at[slot])
            return acc, new_best, total

        best = plgpu.load(
            sinks_ref.at[head, pl.ds(lax.rem(phase, group), ROWS)],
            layout=_PER_ROW, optimized=False,
        )  # fmt: skip
        total = jnp.where(best > _MASKED, 1.0, jnp.zeros_like(best))
        acc = plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), _TILED)
        pl.when(warpgroup == 1)(take_turns)
        acc, _, total = lax.fori_loop(tile.low, tile.high, step, (acc, best, total))
        pl.when(warpgroup == 0)(take_turns)
        out = acc * lax.broadcast_in_dim(1 / total, acc.shape, [0])
        length = lax.clamp(0, tile.length - mine, ROWS)
        _store(out, out_smem.at[warpgroup], out_ref.at[head], start, length)

    def role(one, registers, change, free=()):
        """Runs a warpgroup's part; whoever waits for free buffers waits for all in the end, as
        barriers must outlive their use."""
        plgpu.set_max_registers(registers, action=change)
        met = for_my_tiles(one)
        plgpu.wait_smem_to_gmem(0)
        for barriers in free:

            @pl.loop(0, lax.min(met, stages))
            def _(slot, barriers=barriers):
                plgpu.barrier_wait(barriers.at[slot])

    # Registers of a thread: 504 in all of three warpgroups, 512 of four. No spills, as compiled.
    if raw_smem is None:
        mine, fetchers = (216, 72) if width == 64 else (232, 40)
        pl.when(warpgroup < 2)(lambda: role(attend, mine, "increase"))
        pl.when(warpgroup == 2)(lambda: role(fetch, fetchers, "decrease", kv_free))
    else:
        pl.when(warpgroup < 2)(lambda: role(attend, 200, "increase"))
        pl.when(warpgroup == 2)(lambda: role(fetch, 56, "decrease", raw_free))
        pl.when(warpgroup == 3)(lambda: role(widen, 56, "decrease", kv_free))


def _wait_if(condition, barrier):
    pl.when(condition)(lambda: plgpu.barrier_wait(barrier))


def _lanes(width):
    """Returns slices of a row of W lanes: of more than 128 few at once, to spare registers."""
    step = width if width <= 128 else 64
    return [pl.ds(start, step) for start in range(0, width, step)]


def _parts(rows, width):
    """Yields slices of a block of KV, small enough to pass through registers."""
    for row, lane in itertools.product(range(0, rows, ROWS), range(0, width, _LANES)):
        yield pl.ds(row, ROWS), pl.ds(lane, _LANES)


def _widen(raw, wide):
    """Converts a block `[block, W]` to another dtype, through registers."""
    for rows, lanes in _parts(*raw.shape):
        part = plgpu.load(raw.at[rows, lanes], layout=plgpu.Layout.WGMMA_UPCAST_4X)
        wide.at[rows, lanes][...] = part.astype(wide.dtype)
    plgpu.commit_smem()


def _clean(values, begin, end):
    """Zeroes the tokens outside [begin, end) of a block `[block, W]`: what lies beside the context
    must not meet even a weight of zero, as 0 * NaN is NaN."""
    for rows, lanes in _parts(*values.shape):
        part = values.at[rows, lanes]
        x = part[...]
        token = rows.start + plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=_TILED)
        part[...] = jnp.where((token >= begin) & (token < end), x, jnp.zeros_like(x))
    plgpu.commit_smem()


def _seen(s, positions, window):
    """Masks the scores `[64, block]` of the tokens that a row's own, at `positions`, does not see:
    those after it, and those `window` or more before it."""
    token = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=_TILED)
    age = lax.broadcast_in_dim(positions, s.shape, [0]) - token
    return jnp.where(age.astype(jnp.uint32) < window.astype(jnp.uint32), s, _MASKED)


def _capped(s, cap):
    """cap * tanh(s / cap). The hardware's own tanh is good to 11 bits only, and its division takes
    many steps: 1 / x is rsqrt(x) squared."""
    root = lax.rsqrt(1 + jnp.exp2(s * (2 * _LOG2E / cap)))
    return cap - 2 * cap * root * root


def _product(a, b, shape, meanwhile=lambda: None):
    """Returns a @ b in f32, having called `meanwhile`."""

    def run(acc):
        _matmul(acc, a, b)
        meanwhile()
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def _plus_product(acc, p, values):
    """Returns acc + p @ values, p from registers."""
    return pl.run_state(lambda ref: _matmul(ref, p, values))(plgpu.ACC.init(acc))


def _plus_product_through(p_smem, acc, p, values):
    """The same, in the form that the interpreter runs."""
    p_smem[...] = p
    plgpu.commit_smem()
    return acc + _product(p_smem, values, acc.shape)


def _load(ref, start, smem):
    """Copies 64 rows of `ref` `[packed rows, W]`, from any `start` on: TMA would want eights."""
    for lanes in _lanes(smem.shape[1]):
        rows = plgpu.load(ref.at[pl.ds(start, ROWS), lanes], layout=_TILED, optimized=False)
        smem.at[:, lanes][...] = rows
    plgpu.commit_smem()


def _store(out, smem, ref, start, length):
    """Copies the first `length` of 64 rows of `out` to `ref` `[packed rows, W]`, from `start` on.

    A copy's size is static: each bit of `length` has its own.
    """
    for lanes in _lanes(out.shape[1]):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem[...] = out[:, lanes.start : lanes.start + lanes.size].astype(smem.dtype)
        plgpu.commit_smem()
        for size in (64, 32, 16, 8, 4, 2, 1):
            done = lax.bitwise_and(length, -2 * size)

            @pl.when(lax.bitwise_and(length, size) != 0)
            def _(size=size, done=done, lanes=lanes):
                plgpu.copy_smem_to_gmem(
                    smem.at[pl.ds(done, size)],
                    ref.at[pl.ds(start + done, size), lanes],
                )


# Steps that tests replace, to see that they would notice.


def _page(pages_ref, row, number):
    return pages_ref[row, number]


def _slot(count, stages):
    return lax.rem(count, stages)


def _wait(barrier):
    """Waits for keys or values to be there."""
    plgpu.barrier_wait(barrier)


def _matmul(acc, a, b):
    """acc += a @ b. The interpreter does not see that wgmma reads a and b: tests read them here."""
    plgpu.wgmma(acc, a, b)
