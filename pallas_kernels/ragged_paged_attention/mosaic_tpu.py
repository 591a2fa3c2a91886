"""Ragged paged attention on a TPU in Pallas: one kernel, called for decode rows and for prefill
chunks. Knows arrays only.

A call first writes its rows' new keys and values into their pages, waits, and then only reads. It
walks over tiles: several rows of one token in decode, several tokens of one row in prefill. A tile
meets its context block by block, each a few pages fetched by one copy per page into one half of a
buffer while the other half is computed on; the first block of the next tile is fetched during the
last of this one. Softmax is accumulated in float32 (arXiv 2205.14135).

Only token and page axes, which are not tiled, are indexed by run-time numbers in HBM, so a copy may
start at any token. All loops are inside the kernel: there is no grid, no metadata made by XLA, and
neither padding rows nor padding tokens cost anything.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_layout import PoolLayout
from pallas_kernels.ragged_paged_attention import mosaic_tpu_block as block
from pallas_kernels.ragged_paged_attention import mosaic_tpu_copies as copies
from pallas_kernels.ragged_paged_attention.config import AttentionShape, TpuConfig, tpu_config
from pallas_kernels.ragged_paged_attention.mosaic_tpu_copies import LANES, Refs, Static

_PAGE_SIZES = (8, 16, 32, 64, 128, 256)


def attend(
    q, rows, kv_pool, layer, kv_lens, page_indices, cu_q_lens, distribution, *,
    window, soft_cap, sinks, layout: PoolLayout, config: TpuConfig, decode_only: bool, interpret,
):  # fmt: skip
    """See `api._module_of`."""
    num_tokens, num_kv_heads, group, width = q.shape
    num_rows, pages_per_row = page_indices.shape
    shape = AttentionShape(
        num_tokens=num_tokens, num_rows=num_rows, pages_per_row=pages_per_row,
        page_size=kv_pool.shape[2], num_kv_heads=num_kv_heads, group=group,
        pool_rows=kv_pool.shape[3], width=width, q_dtype=q.dtype.name, kv_dtype=kv_pool.dtype.name,
    )  # fmt: skip
    _check(config, shape.page_size)
    scalars = [
        layer.reshape(1), window.reshape(1), distribution, kv_lens, cu_q_lens,
        page_indices.reshape(-1),
    ]  # fmt: skip
    if sinks is not None:
        scalars.append(sinks.reshape(-1))

    def call(queries, pool, **tiling):
        static = Static(
            shape=shape, side_by_side=layout.side_by_side, soft_cap=soft_cap,
            has_sinks=sinks is not None, decode_only=decode_only, **tiling,
        )  # fmt: skip
        return _call(static, scalars, queries, rows, pool, interpret)

    # Decode rows come first and have one token each: row s is token s.
    span = min(num_tokens, num_rows)
    tile = min(config.decode_rows, span)
    heads = q.reshape(num_tokens, -1, width)
    out, kv_pool = call(
        _pad(heads[:span], -span % tile), kv_pool,
        rows=tile, tokens=1, pages=config.decode_pages,
    )  # fmt: skip
    out = _pad(out[:span], num_tokens - span)
    token = jnp.arange(num_tokens)[:, None, None]
    if not decode_only:
        # Tiles start at any token and are stored whole: a tile's tail is overwritten by the next
        # row's tile, and the last tail needs room.
        prefilled, kv_pool = call(
            _pad(heads, config.prefill_tokens), kv_pool,
            rows=1, tokens=config.prefill_tokens, pages=config.prefill_pages,
        )  # fmt: skip
        out = jnp.where(token < distribution[0], out, prefilled[:num_tokens])
    return jnp.where(token < cu_q_lens[-1], out, 0).reshape(q.shape), kv_pool


def why_unsupported(shape: AttentionShape, device_kind: str) -> str | None:
    """See `api._module_of`."""
    reason = _why_unsupported(shape, device_kind)
    return reason and f"the mosaic_tpu backend: {reason}; or attention_backend=xla"


def _why_unsupported(shape: AttentionShape, device_kind: str) -> str | None:
    if shape.page_size not in _PAGE_SIZES:
        return f"page_size={shape.page_size}: use one of {_PAGE_SIZES}"
    if shape.width not in (128, 256):
        return f"pool rows of {shape.width} lanes: use models with a head_dim of up to 256"
    try:
        tpu_config(shape, device_kind)
    except ValueError as error:
        return str(error)
    return None


def _check(config: TpuConfig, page_size: int):
    for name in ("decode_pages", "prefill_pages"):
        if getattr(config, name) * page_size % LANES:
            raise ValueError(f"{config} with {page_size=}: {name} must make a multiple of 128 keys")
    if config.prefill_tokens % 16:
        raise ValueError(f"{config}: prefill_tokens must be a multiple of 16")


def _pad(x, count: int):
    """Adds `count` tokens of zeros at the end."""
    return jnp.pad(x, ((0, count), (0, 0), (0, 0)))


def _call(c: Static, scalars, q, rows, kv_pool, interpret):
    """Runs the kernel on the decode or the prefill rows of a step; returns (out as q, pool)."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)

    def kernel(*refs):
        prefetched, (q, new, _, *others) = refs[: len(scalars)], refs[len(scalars) :]
        no_sinks = () if c.has_sinks else (None,)
        _attend_tiles(c, Refs(*prefetched, *no_sinks, q, new, *others))

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[anywhere] * 3,
            out_specs=[anywhere] * 2,
            scratch_shapes=c.scratch(),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(kv_pool.shape, kv_pool.dtype),
        ],
        input_output_aliases={len(scalars) + 2: 1},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=c.vmem_bytes,
            # Page ids are checked on the host. Checked here again, a copy takes twice as long to
            # start.
            disable_bounds_checks=True,
        ),
        name="attend_decode" if c.is_decode else "attend_prefill",
        interpret=interpret,
    )(*scalars, q, rows, kv_pool)


def _attend_tiles(c: Static, refs: Refs):
    """The kernel: writes new rows, then walks over all tiles and their blocks."""
    begin, end = copies.rows_of_call(c, refs)
    if c.is_decode:
        block.number_keys(c, refs)
    copies.start_new_rows(c, refs, begin, end)
    copies.await_new_rows(c, refs, begin, end)
    first = copies.tile_from(c, refs, begin, refs.cu_q_lens[begin], end)

    @pl.when(first.row < end)
    def _():
        copies.of_queries(c, refs, first).start()
        copies.start_block(c, refs, first, end, 0, 0)

    def one_tile(state):
        tile, slot, count = state
        following = copies.tile_after(c, refs, tile, end)
        copies.of_queries(c, refs, tile).wait()
        block.open_tile(c, refs)

        @pl.when(following.row < end)
        def _():
            copies.of_queries(c, refs, following).start()

        num_blocks = copies.num_blocks(c, refs, tile, end)

        def one_block(b, slot):
            @pl.when(b + 1 < num_blocks)
            def _():
                copies.start_block(c, refs, tile, end, b + 1, 1 - slot)

            @pl.when((b + 1 == num_blocks) & (following.row < end))
            def _():
                copies.start_block(c, refs, following, end, 0, 1 - slot)

            copies.await_block(c, refs, tile, end, b, slot)
            block.meet(c, refs, copies.contexts_of(c, refs, tile, end), b, slot)
            return 1 - slot

        slot = lax.fori_loop(0, num_blocks, one_block, slot)

        @pl.when(count > 0)
        def _():  # stores may overlap, so they are done one after another
            copies.of_outputs(c, refs, tile).wait()

        block.close_tile(c, refs)
        copies.of_outputs(c, refs, tile).start()
        return following, slot, count + 1

    start = (first, jnp.int32(0), jnp.int32(0))
    count = lax.while_loop(lambda state: state[0].row < end, one_tile, start)[2]

    @pl.when(count > 0)
    def _():
        copies.of_outputs(c, refs, first).wait()
