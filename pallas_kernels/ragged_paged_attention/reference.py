"""Ragged paged attention in plain XLA: the production path on CPU. Knows arrays only.

Softmax is accumulated in float32 from block to block (arXiv 2205.14135); no array has the size of
a context. Decode rows and prefill rows have a loop each, and either costs nothing without rows.
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.kv_layout import PoolLayout
from pallas_kernels.ragged_paged_attention.config import AttentionShape, XlaConfig
from pallas_kernels.ragged_paged_attention.kv_write import scatter
from pallas_kernels.ragged_paged_attention.xla_decode import decode
from pallas_kernels.ragged_paged_attention.xla_prefill import prefill


def attend(
    q, rows, kv_pool, layer, kv_lens, page_indices, cu_q_lens, distribution, *,
    window, soft_cap, sinks, layout: PoolLayout, config: XlaConfig, decode_only: bool, interpret,
):  # fmt: skip
    """See `api._module_of`."""
    num_tokens, num_rows = q.shape[0], kv_lens.shape[0]
    if num_rows == 1:
        # XLA:CPU takes the loops of a single row for small ones, compiles each into one scalar
        # kernel, and copies the whole pool to call it. A padding row and token prevent all that.
        grow = lambda x: jnp.pad(x, ((0, 1), *((0, 0),) * (x.ndim - 1)))  # noqa: E731
        out, kv_pool = attend(
            grow(q), grow(rows), kv_pool, layer, grow(kv_lens), grow(page_indices),
            jnp.append(cu_q_lens, cu_q_lens[-1]), distribution, window=window, soft_cap=soft_cap,
            sinks=sinks, layout=layout, config=config, decode_only=decode_only, interpret=interpret,
        )  # fmt: skip
        return out[:num_tokens], kv_pool
    kv_pool = scatter(rows, kv_pool, layer, kv_lens, page_indices, cu_q_lens)
    common = dict(window=window, soft_cap=soft_cap, sinks=sinks)
    shape, q = q.shape, q.reshape(num_tokens, -1, q.shape[3])

    # Decode rows come first and have one token each: row s is token s.
    is_decode = jnp.diff(cu_q_lens) > 0
    if not decode_only:
        is_decode &= jnp.arange(num_rows) < distribution[0]
    span = min(num_rows, num_tokens)
    out = decode(
        q[:span], kv_pool, layer, jnp.where(is_decode, kv_lens, 0)[:span], page_indices[:span],
        num_items=config.decode_items, aligned=config.aligned, **common,
    ).astype(q.dtype)  # fmt: skip
    if decode_only:
        return out.reshape(shape), kv_pool
    out = jnp.pad(out, ((0, num_tokens - span), (0, 0), (0, 0)))
    out = prefill(
        q, out, kv_pool, layer, kv_lens, page_indices, cu_q_lens, distribution,
        tile=config.prefill_tile, block=config.prefill_block, **common,
    )  # fmt: skip
    return out.reshape(shape), kv_pool


def why_unsupported(shape: AttentionShape, device_kind: str) -> str | None:
    """See `api._module_of`: XLA does all that any backend does, everywhere."""
    del shape, device_kind
    return None
