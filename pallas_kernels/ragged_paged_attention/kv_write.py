"""Puts new keys and values into their pages: quantisation, and the scatter. Knows arrays only."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.kv_layout import NULL_PAGE

_LIMIT = {"int8": 127.0, "float8_e4m3fn": 448.0}  # the largest value that a quantised pool holds


def quantised(x, scale, dtype):
    """Returns x / scale in `dtype`, clipped to its range; int8 is rounded to the nearest.

    `x` `[T, K, H]`; `scale` f32[K, H].
    """
    scaled = x.astype(jnp.float32) / scale
    if limit := _LIMIT.get(jnp.dtype(dtype).name):
        scaled = jnp.clip(scaled, -limit, limit)
    return (jnp.round(scaled) if dtype == jnp.int8 else scaled).astype(dtype)


def scatter(rows, kv_pool, layer, kv_lens, page_indices, cu_q_lens):
    """Writes rows `[T, R, W]` into their pages; padding tokens go to the null page."""
    page_size = kv_pool.shape[2]
    token = jnp.arange(rows.shape[0])
    row = jnp.sum(token[:, None] >= cu_q_lens[None, 1:], axis=1)  # == S for padding tokens
    real = row < kv_lens.shape[0]
    row = jnp.where(real, row, 0)
    position = jnp.where(real, kv_lens[row] - cu_q_lens[row + 1] + token, 0)
    page = jnp.where(real, page_indices[row, position // page_size], NULL_PAGE)
    return kv_pool.at[layer, page, position % page_size].set(rows)
