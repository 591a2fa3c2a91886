"""Decode attention on a Hopper GPU in Pallas: one query per row over its pages. Knows arrays only.

A row's context is cut into blocks of 64 tokens. The blocks of all rows are dealt out in parts of
about equal length, at least one to a row, so that a long row neither waits for its turn nor works
alone (Flash-Decoding). One warpgroup takes one part for one KV head: it streams pages into shared
memory by TMA and keeps a running softmax (arXiv 2205.14135). A second kernel joins a row's parts.

The few queries of a KV head would leave most rows of a tensor-core tile empty, so keys and values
take the tile's 64 rows and queries its columns: scores are K Q^T, and outputs V^T P^T.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention.config import GpuConfig

BLOCK = 64  # KV tokens met at once: the rows of a wgmma tile
_MIN_BLOCKS = 2  # of a part: below that, joining costs more than it saves
_LANES = 64  # of a block converted at once, to spare registers
_MASKED = -1e30  # finite: it must not make inf - inf
_LOG2E = math.log2(math.e)  # the hardware's exponential is of base 2


def decode(
    q, kv_pool, layer, kv_lens, page_indices, *, window, soft_cap, sinks, config: GpuConfig,
    interpret,
):  # fmt: skip
    """Attends one query per row. q `[S, K, G, W]` -> `[S, K, G, W]`; rows of kv_len 0 give zero.

    kv_pool `[L, P, p, 2K, W]`, as wide as q or of 8 bits; layer and window i32[], window 0 for all;
    kv_lens i32[S]; page_indices i32[S, J]; sinks f32[K, G] or None.
    """
    _, num_kv_heads, group, _ = q.shape
    no_heads = -group % 8  # a wgmma tile has columns in eights
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, no_heads), (0, 0)))
    if sinks is None:
        sinks = jnp.full((num_kv_heads, group), _MASKED)
    sinks = jnp.pad(sinks * _LOG2E, ((0, 0), (0, no_heads)))
    parts, ends = _parts_of(kv_lens, window, config.decode_splits)
    return _attend(
        padded.astype(_operand_dtype(kv_pool.dtype)), kv_pool, layer[None], window[None],
        page_indices, parts, ends, sinks, out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        num_stages=config.decode_stages, soft_cap=soft_cap, interpret=interpret,
    )  # fmt: skip


def _operand_dtype(kv_dtype):
    """The tensor cores' dtype for a pool: the cheapest that holds each of its numbers."""
    return jnp.float16 if kv_dtype == jnp.float8_e4m3fn else jnp.bfloat16


def _window_start(kv_len, window):
    return jnp.where(window > 0, jnp.maximum(kv_len - window, 0), 0)


def _parts_of(kv_lens, window, num_splits):
    """Deals out the blocks that rows see.

    Returns i32[S + num_splits, 4], a part's row, its first block, the end of its blocks (there are
    none in parts that are left over) and kv_len; and i32[S], the end of each row's parts.
    """
    num_rows = kv_lens.shape[0]
    first = _window_start(kv_lens, window) // BLOCK
    last = (kv_lens + BLOCK - 1) // BLOCK
    blocks = last - first
    longest = jnp.maximum(-(-blocks.sum() // num_splits), _MIN_BLOCKS)
    counts = -(-blocks // longest)  # at most S + num_splits in all
    length = -(-blocks // jnp.maximum(counts, 1))  # blocks 7, longest 6 -> 4 and 3, not 6 and 1
    ends = jnp.cumsum(counts)
    part = jnp.arange(num_rows + num_splits)
    row = jnp.minimum(jnp.sum(part[:, None] >= ends, axis=1), num_rows - 1)
    begin = first[row] + (part - ends[row] + counts[row]) * length[row]
    end = jnp.minimum(begin + length[row], last[row])
    return jnp.stack([row, begin, end, kv_lens[row]], axis=1), ends


# Jitted, so that an unrolled layer loop holds the kernels once.
@functools.partial(jax.jit, static_argnames=("out_type", "num_stages", "soft_cap", "interpret"))
def _attend(
    q, kv_pool, layer, window, page_indices, parts, ends, sinks, *,
    out_type, num_stages, soft_cap, interpret,
):  # fmt: skip
    """Runs both kernels. q `[S, K, G, W]` and sinks f32[K, G] of base 2, G in eights; layer and
    window i32[1]. Returns an array of `out_type` `[S, K, real G, W]`."""
    _, num_kv_heads, group, width = q.shape
    copies = BLOCK // min(kv_pool.shape[2], BLOCK)
    pages = plgpu.SMEM((num_stages, BLOCK, width), kv_pool.dtype)
    arrived = plgpu.Barrier(num_arrivals=copies, num_barriers=num_stages)
    scratch = dict(
        q_smem=plgpu.SMEM((group, width), q.dtype),
        q_arrived=plgpu.Barrier(),
        k_smem=pages,
        k_arrived=arrived,
        v_smem=pages,
        v_arrived=arrived,
        p_smem=plgpu.SMEM((group, BLOCK), q.dtype),
    )
    if kv_pool.dtype != q.dtype:
        scratch["wide_smem"] = plgpu.SMEM((BLOCK, width), q.dtype)
    # Heads run fastest: their keys are neighbours in memory.
    grid = (parts.shape[0], num_kv_heads)
    per_head = jax.ShapeDtypeStruct((*grid, group), jnp.float32)
    partial = plgpu.kernel(
        functools.partial(_attend_kernel, soft_cap=soft_cap),
        out_type=(jax.ShapeDtypeStruct((*grid, width, group), jnp.float32), per_head, per_head),
        grid=grid,
        grid_names=("part", "head"),
        scratch_types=scratch,
        interpret=interpret,
        kernel_name="decode_attention",
    )(q, kv_pool, layer, window, page_indices, parts)
    return plgpu.kernel(
        _join_kernel,
        out_type=out_type,
        grid=out_type.shape[:2],
        grid_names=("row", "head"),
        scratch_types=dict(out_smem=plgpu.SMEM((group, width), out_type.dtype)),
        interpret=interpret,
        kernel_name="decode_attention_join",
    )(*partial, ends, sinks)


def _attend_kernel(
    q_ref, pool_ref, layer_ref, window_ref, pages_ref, parts_ref, acc_ref, best_ref, total_ref,
    *, q_smem, q_arrived, k_smem, k_arrived, v_smem, v_arrived, p_smem, wide_smem=None, soft_cap,
):  # fmt: skip
    """Leaves f32 acc `[W, G]` and, of base 2, best and total `[G]` of its part and head: the
    softmax over the part is acc / total, and weighs exp2(best) * total. Nothing without blocks."""
    part, head = lax.axis_index("part"), lax.axis_index("head")
    row, begin, end, kv_len = (parts_ref[part, i] for i in range(4))
    layer, low = layer_ref[0], _window_start(kv_len, window_ref[0])
    num_stages, _, width = k_smem.shape
    group, page_size = q_smem.shape[0], pool_ref.shape[2]
    keys, values = (k_smem, k_arrived, 2 * head), (v_smem, v_arrived, 2 * head + 1)

    def fetch(what, block):
        """Starts the copies of a block, if it is one of ours. Pages that hold nothing seen are not
        read: the nearest that does comes in their place."""
        smem, arrived, pool_row = what
        piece = min(page_size, BLOCK)
        lowest, last = low - lax.rem(low, piece), kv_len - 1 - lax.rem(kv_len - 1, piece)

        @pl.when(block < end)
        def _():
            slot = _slot(block - begin, num_stages)
            starts = range(0, BLOCK, piece)
            tokens = [jnp.clip(block * BLOCK + start, lowest, last) for start in starts]
            # All ids are asked for before any is waited for.
            pages = [_page(pages_ref, row, lax.div(token, page_size)) for token in tokens]
            for start, token, page in zip(starts, tokens, pages, strict=True):
                offset = pl.multiple_of(lax.rem(token, page_size), piece)
                plgpu.copy_gmem_to_smem(
                    pool_ref.at[layer, page, pl.ds(offset, piece), pool_row],
                    smem.at[slot, pl.ds(start, piece)],
                    arrived.at[slot],
                )

    def is_seen(block, shape, layout):
        token = block * BLOCK + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
        return (token >= low) & (token < kv_len)

    def widened(smem, block, mask):
        """Converts a block to the queries' dtype through registers, unseen tokens to zero."""
        layout = plgpu.Layout.WGMMA_UPCAST_4X
        for lane in range(0, width, _LANES):
            lanes = pl.ds(lane, _LANES)
            x = plgpu.load(smem.at[:, lanes], layout=layout).astype(wide_smem.dtype)
            if mask:
                x = jnp.where(is_seen(block, x.shape, layout), x, jnp.zeros_like(x))
            wide_smem.at[:, lanes][...] = x
        return wide_smem

    def matmul(a, b, shape):
        def run(acc):
            _before_matmul(a, b)
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))

    def step(block, carry):
        best, total, acc = carry
        slot = _slot(block - begin, num_stages)
        _wait(k_arrived.at[slot])
        k = k_smem.at[slot]
        if wide_smem is not None:
            k = widened(k, block, False)
            plgpu.commit_smem()
        s = matmul(k, q_smem.transpose((1, 0)), (BLOCK, group))
        if soft_cap is not None:
            s = soft_cap * jnp.tanh(s / soft_cap)
        s = jnp.where(is_seen(block, s.shape, plgpu.Layout.WGMMA), s * _LOG2E, _MASKED)
        new_best = jnp.maximum(best, s.max(axis=0))
        fetch(keys, block + num_stages)
        keep = jnp.exp2(best - new_best)
        p = jnp.exp2(s - _across(new_best, s))
        total = total * _across(keep, s) + p
        p_smem.transpose((1, 0))[...] = p.astype(p_smem.dtype)
        _wait(v_arrived.at[slot])
        v = v_smem.at[slot]
        if wide_smem is not None:
            v = widened(v, block, True)
        else:
            # 0 * NaN is NaN: what lies beside the context must not meet even a weight of zero.
            @pl.when((block * BLOCK < low) | ((block + 1) * BLOCK > kv_len))
            def _():
                for lane in range(0, width, _LANES):
                    part = v.at[:, pl.ds(lane, _LANES)]
                    x = part[...]
                    seen = is_seen(block, x.shape, plgpu.Layout.WGMMA)
                    part[...] = jnp.where(seen, x, jnp.zeros_like(x))

        plgpu.commit_smem()
        o = matmul(v.transpose((1, 0)), p_smem.transpose((1, 0)), acc.shape)
        fetch(values, block + num_stages)
        return new_best, total, acc * _across(keep, acc) + o

    @pl.when(begin < end)
    def _():
        plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_smem, q_arrived)
        for stage in range(num_stages):
            fetch(keys, begin + stage)
            fetch(values, begin + stage)
        _wait(q_arrived)
        best = _filled(_MASKED, (group,))
        # Summed over tokens at the end only: a sum across warps costs more than the registers.
        total = _filled(0, (BLOCK, group))
        acc = _filled(0, (width, group))
        best, total, acc = lax.fori_loop(begin, end, step, (best, total, acc))
        acc_ref[part, head] = acc
        best_ref[part, head] = best
        total_ref[part, head] = total.sum(axis=0)


def _join_kernel(acc_ref, best_ref, total_ref, ends_ref, sinks_ref, out_ref, *, out_smem):
    """Joins the parts of a row for one head. A sink is one part more, of weight 1 and value 0."""
    row, head = lax.axis_index("row"), lax.axis_index("head")
    _, _, width, group = acc_ref.shape
    columns = plgpu.Layout.WGMMA.reduce(0)

    def load(ref, layout=columns):
        return plgpu.load(ref, layout=layout, optimized=False)

    def step(part, carry):
        best, total, acc = carry
        part_best = load(best_ref.at[part, head])
        new_best = jnp.maximum(best, part_best)
        keep, weight = jnp.exp2(best - new_best), jnp.exp2(part_best - new_best)
        total = total * keep + load(total_ref.at[part, head]) * weight
        part_acc = load(acc_ref.at[part, head], plgpu.Layout.WGMMA)
        return new_best, total, acc * _across(keep, acc) + part_acc * _across(weight, acc)

    begin = jnp.where(row > 0, ends_ref[jnp.maximum(row - 1, 0)], 0)
    carry = load(sinks_ref.at[head]), _filled(1, (group,)), _filled(0, (width, group))
    _, total, acc = lax.fori_loop(begin, ends_ref[row], step, carry)
    out_smem.transpose((1, 0))[...] = (acc / _across(total, acc)).astype(out_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, out_ref.shape[2])], out_ref.at[row, head])
    plgpu.wait_smem_to_gmem(0)


def _filled(value, shape):
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(0)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _across(per_query, like):
    """Repeats f32[G] along the first axis of `like` `[., G]`."""
    return lax.broadcast_in_dim(per_query, like.shape, [1])


# Steps that tests replace, to see that they would notice.


def _page(pages_ref, row, number):
    return pages_ref[row, number]


def _slot(number, num_stages):
    return lax.rem(number, num_stages)


def _wait(barrier):
    plgpu.barrier_wait(barrier)


def _before_matmul(*operands):
    """Nothing. The interpreter does not see that wgmma reads its operands: tests read them here."""
