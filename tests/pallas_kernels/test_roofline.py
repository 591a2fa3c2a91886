"""The roofline counts what attention must move and compute, no more."""

from __future__ import annotations

import dataclasses

import pytest

from pallas_kernels.devices import device_spec
from pallas_kernels.ragged_paged_attention.config import AttentionShape
from pallas_kernels.roofline import Work, attention_work

SHAPE = AttentionShape(
    num_tokens=4,
    num_rows=2,
    pages_per_row=8,
    page_size=16,
    num_kv_heads=2,
    group=4,
    pool_rows=4,
    width=64,
    q_dtype="bfloat16",
    kv_dtype="bfloat16",
)
KV_ROW, Q_ROW, FLOPS = 4 * 64 * 2, 2 * 4 * 64 * 2, 4 * 2 * 4 * 64


def test_the_slower_of_memory_and_arithmetic_sets_the_time():
    spec = device_spec("NVIDIA H200")
    assert Work(hbm_bytes=48 * 10**8, flops=1).seconds(spec) == pytest.approx(1e-3)
    assert Work(hbm_bytes=1, flops=989 * 10**9).seconds(spec) == pytest.approx(1e-3)


def test_decode_reads_each_key_and_value_once_and_writes_its_own():
    work = attention_work(SHAPE, [(100, 1), (30, 1)])
    assert work == Work((130 + 2) * KV_ROW + 2 * 2 * Q_ROW, 130 * FLOPS)


def test_a_chunk_counts_the_causal_half_of_its_own_square():
    work = attention_work(SHAPE, [(13, 3)])
    assert work == Work((13 + 3) * KV_ROW + 2 * 3 * Q_ROW, (11 + 12 + 13) * FLOPS)


@pytest.mark.parametrize(
    ("row", "kv_tokens", "pairs"), [((100, 1), 10, 10), ((5, 1), 5, 5), ((12, 4), 12, 39)]
)
def test_a_window_bounds_what_is_read_and_computed(row, kv_tokens, pairs):
    work = attention_work(SHAPE, [row], window=10)
    assert work == Work((kv_tokens + row[1]) * KV_ROW + 2 * row[1] * Q_ROW, pairs * FLOPS)


def test_a_quantised_pool_moves_fewer_bytes():
    half = dataclasses.replace(SHAPE, kv_dtype="int8")
    whole, less = (attention_work(shape, [(1000, 1)]).hbm_bytes for shape in (SHAPE, half))
    assert less < 0.51 * whole
