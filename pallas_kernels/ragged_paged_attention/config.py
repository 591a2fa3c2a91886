"""Block sizes of ragged paged attention, per backend. Knows shapes and devices, not arrays."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.devices import device_spec


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
      decode_splits: parts that the contexts of all rows are cut into, besides one for each row; a
        thread block meets one.
      decode_stages: KV blocks of 64 tokens in flight in decode.
      prefill_stages: KV blocks in flight in prefill.
      prefill_block: KV tokens met at once in prefill.
      prefill_programs: thread blocks that share prefill's tiles; one fills a multiprocessor.
    """

    decode_splits: int
    decode_stages: int
    prefill_stages: int
    prefill_block: int
    prefill_programs: int = 132


Config = XlaConfig | TpuConfig | GpuConfig


def xla_config(shape: AttentionShape) -> XlaConfig:
    """Returns block sizes measured to be good on a CPU."""
    return XlaConfig(
        decode_items=min(128, max(16, 4 * shape.num_rows)),
        prefill_tile=min(128, -(-shape.num_tokens // 8) * 8),
        prefill_block=max(128, shape.page_size),
    )


def gpu_config(shape: AttentionShape, device_kind: str) -> GpuConfig:
    """Returns block sizes for the GPU kernels, by budgets and not measured.

    Decode: as many parts as there are places for thread blocks, three in a multiprocessor or fewer
    where two of their KV blocks of 64 tokens would not fit; as many KV blocks in flight as do fit.

    Raises:
      ValueError: `device_kind` is unknown, or two KV blocks fit in no thread block.
    """
    spec = device_spec(device_kind)
    # A multiprocessor has 1 KiB more than one thread block can have, and keeps 1 KiB for each.
    fitting = (
        (sharing, stages)
        for sharing in (3, 2, 1)
        for stages in (4, 3, 2)
        if gpu_decode_bytes(shape, stages) <= (spec.on_chip_bytes + 1024) // sharing - 1024
    )
    sharing, stages = next(fitting, (0, 2))
    if not sharing:
        raise ValueError(
            f"decode takes {gpu_decode_bytes(shape, stages)} bytes of shared memory, more than the "
            f"{spec.on_chip_bytes} of {device_kind}; use attention_backend=xla"
        )
    places = -(-sharing * spec.num_cores // shape.num_kv_heads)
    most_splits = shape.num_rows * shape.pages_per_row * shape.page_size // 128
    return GpuConfig(
        decode_splits=max(1, min(places, most_splits)),
        decode_stages=stages,
        prefill_stages=2,
        prefill_block=128 if shape.width <= 128 else 64,
    )


def gpu_decode_bytes(shape: AttentionShape, stages: int) -> int:
    """Returns the shared memory that a thread block of the decode kernel takes."""
    block, group = 64, -(-shape.group // 8) * 8
    pages = stages * 2 * block * shape.width * shape.kv_bytes
    widened = block * shape.width * 2 if shape.kv_bytes == 1 else 0
    queries, weights = group * shape.width * 2, group * block * 2
    barriers, reduction = 8 * (1 + 2 * stages), 2048
    return queries + weights + pages + widened + barriers + reduction
