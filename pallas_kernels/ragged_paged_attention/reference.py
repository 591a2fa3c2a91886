"""Ragged paged attention in plain XLA: the production path on CPU. Knows arrays only.

Softmax is accumulated in float32 from block to block (arXiv 2205.14135); no array has the size of
a context. Decode rows and prefill rows have a loop each, and either costs nothing without rows.
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.kv_layout import NULL_PAGE
from pallas_kernels.ragged_paged_attention.config import XlaConfig
from pallas_kernels.ragged_paged_attention.xla_decode import decode
from pallas_kernels.ragged_paged_attention.xla_prefill import prefill


def ragged_paged_attention(
    q, kv, kv_pool, layer, kv_lens, page_indices, cu_q_lens, distribution, *,
    scale, sliding_window, soft_cap, config: XlaConfig, decode_only: bool,
):  # fmt: skip
    """See `api.ragged_paged_attention`."""
    num_tokens, num_rows = q.shape[0], kv_lens.shape[0]
    if num_rows == 1:
        # XLA:CPU takes the loops of a single row for small ones, compiles each into one scalar
        # kernel, and copies the whole pool to call it. A padding row and token prevent all that.
        grow = lambda x: jnp.pad(x, ((0, 1), *((0, 0),) * (x.ndim - 1)))  # noqa: E731
        out, kv_pool = ragged_paged_attention(
            grow(q), grow(kv), kv_pool, layer, grow(kv_lens), grow(page_indices),
            jnp.append(cu_q_lens, cu_q_lens[-1]), distribution, scale=scale,
            sliding_window=sliding_window, soft_cap=soft_cap, config=config,
            decode_only=decode_only,
        )  # fmt: skip
        return out[:num_tokens], kv_pool
    kv_pool = write_kv(kv, kv_pool, layer, kv_lens, page_indices, cu_q_lens)
    common = dict(scale=scale, window=jnp.asarray(sliding_window, jnp.int32), soft_cap=soft_cap)

    # Decode rows come first and have one token each: row s is token s.
    is_decode = jnp.diff(cu_q_lens) > 0
    if not decode_only:
        is_decode &= jnp.arange(num_rows) < distribution[0]
    span = min(num_rows, num_tokens)
    out = decode(
        q[:span], kv_pool, layer, jnp.where(is_decode, kv_lens, 0)[:span], page_indices[:span],
        num_items=config.decode_items, **common,
    ).astype(q.dtype)  # fmt: skip
    if decode_only:
        return out, kv_pool
    out = jnp.pad(out, ((0, num_tokens - span), (0, 0), (0, 0)))
    out = prefill(
        q, out, kv_pool, layer, kv_lens, page_indices, cu_q_lens, distribution,
        tile=config.prefill_tile, block=config.prefill_block, **common,
    )  # fmt: skip
    return out, kv_pool


def write_kv(kv, kv_pool, layer, kv_lens, page_indices, cu_q_lens):
    """Scatters new rows `[T, 2K, H]` into their pages; padding tokens go to the null page."""
    page_size = kv_pool.shape[2]
    token = jnp.arange(kv.shape[0])
    row = jnp.sum(token[:, None] >= cu_q_lens[None, 1:], axis=1)  # == S for padding tokens
    real = row < kv_lens.shape[0]
    row = jnp.where(real, row, 0)
    position = jnp.where(real, kv_lens[row] - cu_q_lens[row + 1] + token, 0)
    page = jnp.where(real, page_indices[row, position // page_size], NULL_PAGE)
    return kv_pool.at[layer, page, position % page_size].set(kv)
