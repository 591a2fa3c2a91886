"""Block sizes of the TPU kernel against the memories of every generation."""

from __future__ import annotations

import dataclasses

import pytest

from pallas_kernels.devices import DEVICES, MIB
from pallas_kernels.dispatch import Backend
from pallas_kernels.ragged_paged_attention.api import why_unsupported
from pallas_kernels.ragged_paged_attention.config import (
    AttentionShape,
    tpu_config,
    tpu_decode_bytes,
    tpu_prefill_bytes,
    tpu_smem_bytes,
)

TPUS = [kind for kind, spec in DEVICES.items() if spec.platform == "tpu"]
LLAMA_8B = AttentionShape(
    num_tokens=2048, num_rows=64, pages_per_row=512, page_size=16, num_kv_heads=8, group=4,
    pool_rows=16, width=128, q_dtype="bfloat16", kv_dtype="bfloat16",
)  # fmt: skip
SHAPES = {
    "llama 8B": {},
    "llama 8B over 8 devices": dict(num_kv_heads=1, pool_rows=2),
    "qwen 32B": dict(group=8),
    "gemma 27B": dict(num_kv_heads=16, group=2, pool_rows=32),
    "gemma 270M": dict(num_kv_heads=1, pool_rows=2, width=256),
    "smollm 1.7B": dict(num_kv_heads=32, group=1, pool_rows=32),
    "int8 pool": dict(kv_dtype="int8"),
    "float32": dict(num_kv_heads=4, pool_rows=8, q_dtype="float32", kv_dtype="float32"),
    "large pages": dict(page_size=256, pages_per_row=32),
    "one small row": dict(num_tokens=1, num_rows=1, pages_per_row=1, page_size=8),
}


def shape_of(**changes) -> AttentionShape:
    return dataclasses.replace(LLAMA_8B, **changes)


def refusal(kind: str = "TPU v5 lite", **changes) -> str | None:
    return why_unsupported(Backend.MOSAIC_TPU, shape_of(**changes), kind)


@pytest.mark.parametrize("kind", TPUS)
@pytest.mark.parametrize("name", SHAPES)
def test_chosen_blocks_are_legal_and_fit_the_device(name, kind):
    shape = shape_of(**SHAPES[name])
    config = tpu_config(shape, kind)
    assert config.decode_pages * shape.page_size % 128 == 0
    assert config.prefill_pages * shape.page_size % 128 == 0
    assert config.prefill_tokens % 16 == 0
    assert 1 <= config.decode_rows <= shape.num_rows
    room = min(32 * MIB, DEVICES[kind].on_chip_bytes)
    assert tpu_decode_bytes(shape, config.decode_rows, config.decode_pages) < room
    assert tpu_prefill_bytes(shape, config.prefill_tokens, config.prefill_pages) < room


def test_a_faster_memory_gets_larger_decode_blocks():
    sizes = [
        config.decode_rows * config.decode_pages
        for config in (tpu_config(LLAMA_8B, kind) for kind in ("TPU v4", "TPU v6 lite", "TPU7x"))
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_rows_of_few_heads_are_fetched_together():
    assert tpu_config(shape_of(num_kv_heads=1, pool_rows=2), "TPU v6 lite").decode_rows > 1


def test_smem_counts_the_page_table_and_what_goes_with_it():
    table = 4 * LLAMA_8B.num_rows * LLAMA_8B.pages_per_row
    assert table < tpu_smem_bytes(LLAMA_8B) < table + 8192


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_rows=256, pages_per_row=1024), "larger page_size, fewer rows"),
        (dict(page_size=24), "page_size=24"),
        (dict(width=512), "512 lanes"),
        (dict(num_kv_heads=128, pool_rows=256, group=4), "more tensor parallelism"),
        # Blocks of fewer than 128 keys would fit, which the kernel does not take.
        (
            dict(num_kv_heads=64, pool_rows=128, group=2, page_size=8, kv_dtype="float32"),
            "32 MiB of TPU v5 lite",
        ),
        (dict(kind="TPU v9"), "'TPU v9' is unknown"),
        (dict(kind="TPU v4", num_kv_heads=64, pool_rows=128, group=1), "14 MiB of TPU v4"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused_with_the_remedy(changes, message):
    assert message in (refusal(**changes) or "")


def test_a_gpu_is_no_place_for_the_tpu_kernel():
    assert "NVIDIA H200 is no TPU; use another backend" in (refusal("NVIDIA H200") or "")


def test_what_the_kernel_can_do_is_not_refused():
    assert refusal() is None
