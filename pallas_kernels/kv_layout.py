"""The axes of the KV pool, how heads lie in it and what a page weighs. Knows shapes, not values.

One array holds the KV pages of all layers: `[L, P, p, R, W]`, R rows of W lanes for each token.
Plainly the rows are the heads `K0 V0 K1 V1 ...`: R = 2K, W = H. One token's write is then one
contiguous run, and splitting R over devices keeps a head's key and value together. Kernels want
some shapes padded, and the TPU's wants short heads side by side: `pool_layout` says so, and is the
one place that does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Backend

NULL_PAGE = 0  # padding tokens are written here; no live row's page_indices may hold it


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """How one device's heads of one token lie in a pool. Made by `pool_layout`.

    Attributes:
      num_kv_heads: K, those that hold something.
      head_dim: H, the lanes of a head that hold something.
      padded_kv_heads: K with heads of zeros added.
      padded_head_dim: H with zeros added.
      side_by_side: row h is [K_h | V_h]; else rows 2h and 2h + 1 are K_h and V_h.
    """

    num_kv_heads: int
    head_dim: int
    padded_kv_heads: int
    padded_head_dim: int
    side_by_side: bool = False

    @property
    def num_rows(self) -> int:
        """R: rows of a token."""
        return self.padded_kv_heads if self.side_by_side else 2 * self.padded_kv_heads

    @property
    def width(self) -> int:
        """W: lanes of a row."""
        return 2 * self.padded_head_dim if self.side_by_side else self.padded_head_dim

    def rows(self, k: jax.Array, v: jax.Array) -> jax.Array:
        """Lays keys and values `[T, K, H]` out as pool rows `[T, R, W]`."""
        padding = (
            (0, 0),
            (0, self.padded_kv_heads - self.num_kv_heads),
            (0, self.padded_head_dim - self.head_dim),
        )
        pair = jnp.stack([jnp.pad(k, padding), jnp.pad(v, padding)], axis=2)  # [T, K, 2, H]
        return pair.reshape(k.shape[0], self.num_rows, self.width)

    def queries(self, q: jax.Array) -> jax.Array:
        """Lays queries `[T, N, H]` out as `[T, padded K, G, W]`, zero wherever a row has no key."""
        num_tokens, num_heads, head_dim = q.shape
        q = q.reshape(num_tokens, self.num_kv_heads, num_heads // self.num_kv_heads, head_dim)
        more_heads = self.padded_kv_heads - self.num_kv_heads
        return jnp.pad(q, ((0, 0), (0, more_heads), (0, 0), (0, self.width - head_dim)))

    def outputs(self, out: jax.Array) -> jax.Array:
        """Takes the real heads `[T, N, H]` out of attention's `[T, padded K, G, W]`."""
        start = self.padded_head_dim if self.side_by_side else 0
        out = out[:, : self.num_kv_heads, :, start : start + self.head_dim]
        return out.reshape(out.shape[0], -1, self.head_dim)


def pool_layout(backend: Backend, num_kv_heads: int, head_dim: int, dtype: DTypeLike) -> PoolLayout:
    """Returns how `backend` wants one device's K heads of H lanes laid out.

    XLA takes them as they are. Mosaic on GPUs wants H in multiples of 64, for wgmma's operands. On
    TPUs a row must fill 128 lanes, so heads of up to 64 lie side by side and others are padded; and
    R must fill whole tiles, or XLA chooses another layout and copies the pool at every call.
    """
    if backend is Backend.XLA:
        return PoolLayout(num_kv_heads, head_dim, num_kv_heads, head_dim)
    if backend is Backend.MOSAIC_GPU:
        return PoolLayout(num_kv_heads, head_dim, num_kv_heads, _up(head_dim, 64))
    side_by_side = head_dim <= 64
    lanes = 64 if side_by_side else _up(head_dim, 128)
    per_head = 1 if side_by_side else 2
    rows = _tpu_rows(per_head * num_kv_heads, np.dtype(dtype).itemsize)
    return PoolLayout(num_kv_heads, head_dim, rows // per_head, lanes, side_by_side)


def _tpu_rows(rows: int, itemsize: int) -> int:
    """The least count of rows that is a power of two from a packed word's up to 8, or above that a
    multiple of 8."""
    if rows > 8:
        return _up(rows, 8)
    return max(4 // itemsize, 1 << (rows - 1).bit_length())


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def pool_shape(
    num_layers: int, num_pages: int, page_size: int, layout: PoolLayout, num_devices: int = 1
) -> tuple[int, int, int, int, int]:
    """Returns the pool's shape `(L, P, p, R, W)`, the rows of all devices together; page 0 of the
    P is the null page."""
    return (num_layers, num_pages, page_size, num_devices * layout.num_rows, layout.width)


def bytes_per_page(num_layers: int, page_size: int, layout: PoolLayout, dtype: DTypeLike) -> int:
    """Returns the bytes that one page takes on one device, in all layers together."""
    return math.prod(pool_shape(num_layers, 1, page_size, layout)) * np.dtype(dtype).itemsize
