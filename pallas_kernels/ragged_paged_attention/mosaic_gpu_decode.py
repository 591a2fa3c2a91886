"""Decode attention on a Hopper GPU in Pallas: one query per row over its pages. Knows arrays only.

A row's context is cut into blocks of 64 tokens, and its blocks into up to `decode_splits` parts.
One warpgroup takes one part for one KV head: it streams pages into shared memory by TMA and keeps a
running softmax (arXiv 2205.14135); XLA then joins the parts (Flash-Decoding). The few queries of a
head would leave most rows of a tensor-core tile empty, so keys and values take the tile's 64 rows
and the queries its columns: scores are K Q^T, and outputs V^T P^T.
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
_LANES = 64  # of a page's row converted at once, to spare registers
_MASKED = -1e30  # finite: it must not make inf - inf
_LOG2E = math.log2(math.e)  # the hardware's exponential is of base 2
_GRID = ("split", "row", "head")  # heads run fastest: their keys are neighbours in memory


def decode(
    q, kv_pool, layer, kv_lens, page_indices, *, window, soft_cap, sinks, config: GpuConfig,
    interpret,
):  # fmt: skip
    """Attends one query per row. q `[S, K, G, W]` -> `[S, K, G, W]`; rows of kv_len 0 give zero.

    kv_pool `[L, P, p, 2K, W]`, as wide as q or of 8 bits; layer and window i32[], window 0 for all;
    kv_lens i32[S]; page_indices i32[S, J]; sinks f32[K, G] or None.
    """
    group = q.shape[2]
    no_heads = -group % 8  # a wgmma tile has columns in eights
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, no_heads), (0, 0)))
    acc, best, total = _parts(
        padded.astype(_operand_dtype(kv_pool.dtype)), kv_pool, jnp.stack([layer, window]), kv_lens,
        page_indices, num_splits=config.decode_splits, num_stages=config.decode_stages,
        soft_cap=soft_cap, interpret=interpret,
    )  # fmt: skip
    split = jnp.arange(config.decode_splits)[:, None]
    begin, end = _blocks_of(kv_lens, window, split, config.decode_splits)
    live = (begin < end)[:, :, None, None]  # a part without blocks has written nothing
    best = jnp.where(live, best, _MASKED)
    highest = best.max(0)
    if sinks is not None:
        sinks = jnp.pad(sinks * _LOG2E, ((0, 0), (0, no_heads)))
        highest = jnp.maximum(highest, sinks)
    weight = jnp.exp2(best - highest)
    total = jnp.where(live, weight * total, 0).sum(0)
    if sinks is not None:
        total = total + jnp.exp2(sinks - highest)
    weight = (weight / jnp.where(total == 0, 1, total))[..., None, :]
    out = jnp.where(live[..., None], weight * acc, 0).sum(0)
    return out[..., :group].swapaxes(2, 3).astype(q.dtype)


def _operand_dtype(kv_dtype):
    """The tensor cores' dtype for a pool: the cheapest that holds each of its numbers."""
    return jnp.float16 if kv_dtype == jnp.float8_e4m3fn else jnp.bfloat16


def _window_start(kv_len, window):
    return jnp.where(window > 0, jnp.maximum(kv_len - window, 0), 0)


def _blocks_of(kv_len, window, split, num_splits):
    """Returns which blocks of a row a split has: begin, end; none if begin >= end."""
    first = _window_start(kv_len, window) // BLOCK
    last = (kv_len + BLOCK - 1) // BLOCK
    count = jnp.maximum((last - first + num_splits - 1) // num_splits, _MIN_BLOCKS)
    begin = first + split * count
    return begin, jnp.minimum(begin + count, last)


@functools.partial(
    jax.jit, static_argnames=("num_splits", "num_stages", "soft_cap", "interpret")
)  # so that an unrolled layer loop holds the kernel once
def _parts(
    q, kv_pool, scalars, kv_lens, page_indices, *, num_splits, num_stages, soft_cap, interpret
):
    """Runs the kernel. q `[S, K, G, W]`, G in eights; scalars i32[2] = (layer, window).

    Returns f32 acc `[splits, S, K, W, G]` and, of base 2, best and total `[splits, S, K, G]`: the
    softmax of a part is acc / total, and weighs exp2(best) * total. Parts without blocks are unset.
    """
    num_rows, num_kv_heads, group, width = q.shape
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
    parts = (num_splits, num_rows, num_kv_heads)
    return plgpu.kernel(
        functools.partial(_kernel, num_splits=num_splits, soft_cap=soft_cap),
        out_type=(
            jax.ShapeDtypeStruct((*parts, width, group), jnp.float32),
            jax.ShapeDtypeStruct((*parts, group), jnp.float32),
            jax.ShapeDtypeStruct((*parts, group), jnp.float32),
        ),
        grid=parts,
        grid_names=_GRID,
        scratch_types=scratch,
        interpret=interpret,
    )(q, kv_pool, scalars, kv_lens, page_indices)


def _kernel(
    q_ref, pool_ref, scalars_ref, lens_ref, pages_ref, acc_ref, best_ref, total_ref, *,
    q_smem, q_arrived, k_smem, k_arrived, v_smem, v_arrived, p_smem, wide_smem=None,
    num_splits, soft_cap,
):  # fmt: skip
    split, row, head = (lax.axis_index(name) for name in _GRID)
    layer, window, kv_len = scalars_ref[0], scalars_ref[1], lens_ref[row]
    begin, end = _blocks_of(kv_len, window, split, num_splits)
    low = _window_start(kv_len, window)
    num_stages, _, width = k_smem.shape
    group, page_size = q_smem.shape[0], pool_ref.shape[2]
    keys, values = (k_smem, k_arrived, 2 * head), (v_smem, v_arrived, 2 * head + 1)

    def fetch(what, block):
        """Starts the copies of a block, if it is one of ours; past the last page, of that page."""
        smem, arrived, pool_row = what
        piece = min(page_size, BLOCK)
        last = kv_len - 1 - lax.rem(kv_len - 1, piece)

        @pl.when(block < end)
        def _():
            slot = _slot(block - begin, num_stages)
            for start in range(0, BLOCK, piece):
                token = jnp.minimum(block * BLOCK + start, last)
                page = _page(pages_ref, row, lax.div(token, page_size))
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
        p = jnp.exp2(s - lax.broadcast_in_dim(new_best, s.shape, [1]))
        total = total * lax.broadcast_in_dim(keep, s.shape, [1]) + p
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
        return new_best, total, acc * lax.broadcast_in_dim(keep, acc.shape, [1]) + o

    def filled(value, shape, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    @pl.when(begin < end)
    def _():
        plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_smem, q_arrived)
        for stage in range(num_stages):
            fetch(keys, begin + stage)
            fetch(values, begin + stage)
        _wait(q_arrived)
        layout = plgpu.Layout.WGMMA
        best = filled(_MASKED, (group,), layout.reduce(0))
        # Summed over tokens at the end only: a sum across warps costs more than the registers.
        total = filled(0, (BLOCK, group), layout)
        acc = filled(0, (width, group), layout)
        best, total, acc = lax.fori_loop(begin, end, step, (best, total, acc))
        acc_ref[split, row, head] = acc
        best_ref[split, row, head] = best
        total_ref[split, row, head] = total.sum(axis=0)


# Steps that tests replace, to see that they would notice.


def _page(pages_ref, row, number):
    return pages_ref[row, number]


def _slot(number, num_stages):
    return lax.rem(number, num_stages)


def _wait(barrier):
    plgpu.barrier_wait(barrier)


def _before_matmul(*operands):
    """Nothing. The interpreter does not see that wgmma reads its operands: tests read them here."""
