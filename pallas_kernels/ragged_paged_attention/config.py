"""Block sizes of ragged paged attention, per backend. Knows shapes and devices, not arrays."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What block sizes depend on: the static facts of one call, as one device sees it.

    Attributes:
      num_tokens: T.
      num_rows: S.
      pages_per_row: J.
      page_size: p.
      num_kv_heads: K, padding heads included.
      group: G, query heads per KV head.
      pool_rows: R of the pool's `[L, P, p, R, W]`.
      width: W.
      q_dtype: name of the queries' dtype.
      kv_dtype: name of the pool's.
    """

    num_tokens: int
    num_rows: int
    pages_per_row: int
    page_size: int
    num_kv_heads: int
    group: int
    pool_rows: int
    width: int
    q_dtype: str
    kv_dtype: str

    @property
    def q_bytes(self) -> int:
        return jnp.dtype(self.q_dtype).itemsize

    @property
    def kv_bytes(self) -> int:
        return jnp.dtype(self.kv_dtype).itemsize


@dataclass(frozen=True, slots=True)
class XlaConfig:
    """Block sizes of the XLA backend, in tokens unless said otherwise.

    Attributes:
      decode_items: blocks of up to 16 KV tokens met in one iteration of the decode loop.
      prefill_tile: query tokens of one row in one tile of the prefill path.
      prefill_block: KV tokens met by a tile in one iteration.
    """

    decode_items: int
    prefill_tile: int
    prefill_block: int


@dataclass(frozen=True, slots=True)
class TpuConfig:
    """Block sizes of the TPU kernel.

    Attributes:
      decode_rows: rows of one token met by one grid step.
      decode_pages: KV pages of a row fetched at once in decode.
      prefill_tokens: query tokens of one row in one tile.
      prefill_pages: KV pages fetched at once in prefill.
    """

    decode_rows: int
    decode_pages: int
    prefill_tokens: int
    prefill_pages: int


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """Block sizes of the GPU kernels.

    Attributes:
      decode_splits: parts that a row's context is cut into, met by one thread block each.
      decode_stages: KV blocks of 64 tokens in flight in decode.
      prefill_stages: KV blocks in flight in prefill.
      prefill_block: KV tokens met at once in prefill.
    """

    decode_splits: int
    decode_stages: int
    prefill_stages: int
    prefill_block: int


Config = XlaConfig | TpuConfig | GpuConfig


def xla_config(shape: AttentionShape) -> XlaConfig:
    """Returns block sizes measured to be good on a CPU."""
    return XlaConfig(
        decode_items=min(128, max(16, 4 * shape.num_rows)),
        prefill_tile=min(128, -(-shape.num_tokens // 8) * 8),
        prefill_block=max(128, shape.page_size),
    )
