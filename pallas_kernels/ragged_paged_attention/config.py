"""Block sizes of ragged paged attention, per backend. Knows shapes and devices, not arrays."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.devices import MIB, device_spec

TPU_SMEM_RESERVE = 16 * 2**10  # the compiler's own


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
      aligned: no iteration of the decode loop has blocks of two rows, so that a row's sums are
        grouped by its own length alone: the same bits, whatever else is in the call.
    """

    decode_items: int
    prefill_tile: int
    prefill_block: int
    aligned: bool = False


@dataclass(frozen=True, slots=True)
class TpuConfig:
    """Block sizes of the TPU kernel. A block is whole pages and a multiple of 128 keys.

    Attributes:
      decode_rows: rows of one token in one tile.
      decode_pages: KV pages of a row fetched at once in decode.
      prefill_tokens: query tokens of one row in one tile, a multiple of 16.
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


def aligned_config() -> XlaConfig:
    """Returns the block sizes of decode rows whose bits depend on no other row."""
    return XlaConfig(decode_items=16, prefill_tile=8, prefill_block=128, aligned=True)


def gpu_config(shape: AttentionShape, device_kind: str) -> GpuConfig:
    """Returns block sizes for the GPU kernels, by budgets and not measured.

    Decode: as many parts as there are places for thread blocks, three in a multiprocessor or fewer
    where two of their KV blocks of 64 tokens would not fit; as many KV blocks in flight as do fit.
    Prefill: a thread block for each multiprocessor, with the largest KV blocks that fit.

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
    prefill_block, prefill_stages = next(
        (
            (block, stages)
            for block in (128, 64)
            for stages in (4, 3, 2)
            if gpu_prefill_bytes(shape, block, stages) <= spec.on_chip_bytes
        ),
        (64, 2),  # refused by `mosaic_gpu.why_unsupported`: 8-bit pages of 256 lanes
    )
    places = -(-sharing * spec.num_cores // shape.num_kv_heads)
    most_splits = shape.num_rows * shape.pages_per_row * shape.page_size // 128
    return GpuConfig(
        decode_splits=max(1, min(places, most_splits)),
        decode_stages=stages,
        prefill_stages=prefill_stages,
        prefill_block=prefill_block,
        prefill_programs=spec.num_cores,
    )


def gpu_decode_bytes(shape: AttentionShape, stages: int) -> int:
    """Returns the shared memory that a thread block of the decode kernel takes."""
    block, group = 64, -(-shape.group // 8) * 8
    pages = stages * 2 * block * shape.width * shape.kv_bytes
    widened = block * shape.width * 2 if shape.kv_bytes == 1 else 0
    queries, weights = group * shape.width * 2, group * block * 2
    barriers, reduction = 8 * (1 + 2 * stages), 2048
    return queries + weights + pages + widened + barriers + reduction


def gpu_prefill_bytes(shape: AttentionShape, block: int, stages: int) -> int:
    """Returns the shared memory that a thread block of the prefill kernel takes."""
    rows = 128  # of queries: two warpgroups' wgmma tiles
    outputs = rows * (shape.width if shape.width <= 128 else 64) * 2
    widened = 2 if shape.kv_bytes == 1 else 0
    blocks = stages * 2 * block * shape.width * (shape.kv_bytes + widened)
    barriers, reduction = 8 * (1 + 8 * stages), 2048
    return rows * shape.width * 2 + outputs + blocks + barriers + reduction


def tpu_config(shape: AttentionShape, device_kind: str) -> TpuConfig:
    """Returns block sizes for the TPU kernel, by budgets and compiled schedules, not measured.

    Decode fetches for 1.5 us at a time, longer than a copy takes to start, and from several rows
    where a row has few heads. Prefill gives each KV head 512 queries and 512 keys at a time, less
    where they do not fit.

    Raises:
      ValueError: the device is unknown, or a memory too small, with the remedy.
    """
    spec = device_spec(device_kind)
    if spec.platform != "tpu":
        raise ValueError(f"{device_kind} is no TPU; use another backend")
    smem_bytes = tpu_smem_bytes(shape)
    if smem_bytes > spec.scalar_bytes - TPU_SMEM_RESERVE:
        raise ValueError(
            f"page_indices of {shape.num_rows} rows x {shape.pages_per_row} pages and the like take"
            f" {smem_bytes} bytes of SMEM, of which {device_kind} has "
            f"{spec.scalar_bytes - TPU_SMEM_RESERVE}; use a larger page_size, fewer rows or a "
            "shorter max_model_len"
        )
    most_keys = max(128, _down_to_power(2 * shape.pages_per_row * shape.page_size - 1))

    def pages(keys: int) -> int:
        return max(1, min(keys, most_keys) // shape.page_size)

    token_bytes = shape.pool_rows * shape.width * shape.kv_bytes
    fetched = min(4 * MIB, int(1.5e-6 * spec.hbm_bytes_per_s))
    rows = min(8, shape.num_rows, max(1, fetched // (512 * token_bytes)))
    keys = min(512, max(128, _down_to_power(fetched // token_bytes)))
    tokens = min(256, max(16, 512 // shape.group), -(-shape.num_tokens // 16) * 16)
    decode = ((_down_to_power(rows), pages(max(128, keys >> less))) for less in range(3))
    prefill = (
        (_down_to_power(tokens) >> less_tokens, pages(512 >> less_keys))
        for less_keys, less_tokens in ((0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (2, 3), (2, 4))
        if _down_to_power(tokens) >> less_tokens >= 16
    )
    budget = min(32 * MIB, spec.on_chip_bytes * 7 // 8)
    for decode_rows, decode_pages in decode:
        if tpu_decode_bytes(shape, decode_rows, decode_pages) <= budget:
            break
    else:
        raise ValueError(_no_vmem("decode", shape, device_kind, budget))
    for prefill_tokens, prefill_pages in prefill:
        if tpu_prefill_bytes(shape, prefill_tokens, prefill_pages) <= budget:
            break
    else:
        raise ValueError(_no_vmem("prefill", shape, device_kind, budget))
    return TpuConfig(decode_rows, decode_pages, prefill_tokens, prefill_pages)


def _no_vmem(phase: str, shape: AttentionShape, device_kind: str, budget: int) -> str:
    return (
        f"{phase} attention with {shape.num_kv_heads} KV heads x {shape.group} of {shape.width} "
        f"lanes does not fit {budget >> 20} MiB of {device_kind}'s VMEM; use more tensor "
        "parallelism or a smaller page_size"
    )


def tpu_decode_bytes(shape: AttentionShape, rows: int, pages: int) -> int:
    """Returns the VMEM that the decode kernel takes: its buffers and the compiler's own."""
    keys, heads = pages * shape.page_size, _up(shape.num_kv_heads * shape.group, 8)
    queries = rows * heads * (shape.width * (3 * shape.q_bytes + 4) + 2 * 128 * 4)
    fetched = 2 * rows * keys * shape.pool_rows * shape.width * shape.kv_bytes
    pairs = heads * keys * shape.num_kv_heads * 4
    widened = 4 if shape.kv_bytes == 1 else 0  # to float32 on the way from 8 bits
    split = keys * shape.pool_rows * shape.width * (shape.q_bytes + widened)
    return queries + fetched + pairs + rows * (2 * pairs + split) + MIB


def tpu_prefill_bytes(shape: AttentionShape, tokens: int, pages: int) -> int:
    """Returns the VMEM that the prefill kernel takes: its buffers and the compiler's own."""
    keys, heads = pages * shape.page_size, shape.num_kv_heads * shape.group
    queries = tokens * heads * (shape.width * (5 * shape.q_bytes + 8) + 2 * 128 * 4)
    block = keys * shape.pool_rows * shape.width
    scores = tokens * shape.group * keys * 4
    buffers = queries + block * (2 * shape.kv_bytes + shape.q_bytes) + 4 * scores
    return buffers * 17 // 16 + 2 * MIB


def tpu_smem_bytes(shape: AttentionShape) -> int:
    """Returns the SMEM that a call's scalars take."""
    words = (1, 1, 3, shape.num_rows, shape.num_rows + 1, shape.num_rows * shape.pages_per_row)
    heads = shape.num_kv_heads * shape.group
    return sum(_up(4 * count, 512) for count in (*words, heads))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _down_to_power(value: int) -> int:
    return 1 << (value.bit_length() - 1)
