"""The axis order of the KV pool and what a page of it weighs. Knows shapes, not values.

One array holds the KV pages of all layers: `[L, P, p, 2K, H]`. A token's row of a page is the
2K heads `K0 V0 K1 V1 ...`, so one token's write is one contiguous run, and splitting the 2K axis
over devices keeps a head's key and value together.
"""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.typing import DTypeLike

NULL_PAGE = 0  # padding tokens are written here; no live row's page_indices may hold it


def pool_shape(
    num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int, int]:
    """Returns the pool's shape `(L, P, p, 2K, H)`; page 0 of the P is the null page."""
    return (num_layers, num_pages, page_size, 2 * num_kv_heads, head_dim)


def bytes_per_page(
    num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike
) -> int:
    """Returns the bytes that one page takes in all layers together."""
    one_page = pool_shape(num_layers, 1, page_size, num_kv_heads, head_dim)
    return math.prod(one_page) * np.dtype(dtype).itemsize


def interleave_kv(k: jax.Array, v: jax.Array) -> jax.Array:
    """Joins keys and values `[T, K, H]` each into pool rows `[T, 2K, H]`: K0 V0 K1 V1 ..."""
    num_tokens, num_kv_heads, head_dim = k.shape
    pair = jax.numpy.stack([k, v], axis=2)
    return pair.reshape(num_tokens, 2 * num_kv_heads, head_dim)
