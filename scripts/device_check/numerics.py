"""Part 1: every kernel on the device against the float64 oracle of tests/rpa_cases.py."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels.dispatch import Backend, backend_for
from pallas_kernels.kv_layout import PoolLayout, pool_layout
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.api import attention_shape, why_unsupported
from scripts.device_check.record import Record
from scripts.device_check.sizes import Sizes
from tests.rpa_cases import (
    TOLERANCE,
    Case,
    Step,
    assert_close,
    build,
    laid_out,
    oracle,
    plain,
    written_pool,
)

COMPILE_THREADS = 8
# Numbers of a quantised pool may round the other way at a tie: the device divides, numpy too.
MOST_QUANTISED_MISMATCHES = 1e-3

DECODE = ((1, 1), (63, 1), (64, 1), (65, 1), (300, 1), (777, 1), (2048, 1), (5, 1))
PREFILL = ((150, 150), (700, 90), (33, 5))
MIXED = (*DECODE[1:6], (400, 180), (20, 20), (1, 1))


def cases(is_small: bool) -> Iterator[tuple[str, Case]]:
    """Yields phases x dtypes x head sizes, padded to few shapes, then what else kernels have."""
    base = Case(rows=(), num_heads=8, dtype="bfloat16")
    kinds = {"decode": DECODE, "prefill": PREFILL, "mixed": MIXED}
    for kv_dtype in ("bfloat16", "int8", "float8_e4m3fn"):
        for head_dim, page_size in ((64, 16), (128, 64), (256, 32)):
            for kind, rows in kinds.items():
                case = replace(
                    base, head_dim=head_dim, page_size=page_size, kv_dtype=kv_dtype, rows=rows
                )
                if not is_small or (head_dim == 64 and kind == "mixed"):
                    yield f"{kind}_{kv_dtype}_{head_dim}", _padded(case)
    if is_small:
        return
    wide = replace(base, head_dim=128, page_size=64, rows=MIXED)
    features: dict[str, dict[str, Any]] = {
        "window": {"sliding_window": 100},
        "window_of_one": {"sliding_window": 1},
        "soft_cap": {"soft_cap": 2.0},
        "sinks": {"sinks": True},
        "group_1": {"num_heads": 2},
        "group_3": {"num_heads": 6},
        "group_16": {"num_heads": 32},
        "page_8": {"page_size": 8},
        "page_256": {"page_size": 256},
        "head_dim_80": {"head_dim": 80},
        "empty_rows": {"rows": ((37, 1), (0, 0), (50, 20), (44, 0), (9, 1), (3, 3))},
    }
    for name, settings in features.items():
        yield f"mixed_{name}", _padded(replace(wide, **settings))
    many = tuple((1 + 37 * i % 600, 1) for i in range(128))
    alike = {"padding_rows": 1, "padding_tokens": 1}  # a decode step has a token for each row
    yield "decode_128_rows", replace(wide, rows=many, **alike)
    yield "decode_8k", replace(wide, rows=((8192, 1), (8191, 1), (1, 1)), **alike)
    yield "prefill_8k", replace(wide, rows=((8192, 70),), num_heads=2, num_kv_heads=1)


def _padded(case: Case) -> Case:
    """All cases of one head size and dtype in one shape: 320 tokens, 10 rows, or as many of both
    where all rows are decode rows."""
    num_tokens, pages = sum(q_len for _, q_len in case.rows), case.pages_of_rows
    rows = max(10, len(case.rows))
    is_decode = all(q_len == 1 for _, q_len in case.rows)
    most = -(-2048 // case.page_size)
    return replace(
        case,
        padding_rows=rows - len(case.rows),
        padding_tokens=(rows if is_decode else 320) - num_tokens,
        spare_pages=2 * most - sum(pages),
        spare_columns=most - max(pages),
    )


def run(record: Record, sizes: Sizes, is_small: bool, out: Path) -> None:
    """See `__main__`: records a line for each case."""
    del sizes, out
    device = jax.devices()[0]
    native = backend_for(device.platform)
    wanted = [(native, *case) for case in cases(is_small)]
    if native is not Backend.XLA:
        names = ("decode_bfloat16_128", "prefill_bfloat16_128", "mixed_bfloat16_128")
        wanted += [(Backend.XLA, name, case) for _, name, case in wanted if name in names]
    programs: dict[Any, Any] = {}  # per static settings and shapes, a program being compiled
    with ThreadPoolExecutor(COMPILE_THREADS) as threads:
        started = []
        for backend, name, case in wanted:
            step, layout = build(case), _layout(backend, case)
            arguments = _arguments(case, step, layout)
            reason = why_unsupported(backend, _shape(arguments, layout), device.device_kind)
            if reason is not None:
                record.skip(f"{backend.value} {name}", reason)
                continue
            is_decode = name.startswith("decode")
            shapes = tuple((a.shape, str(a.dtype)) for a in jax.tree.leaves(arguments))
            key = (backend, is_decode, case.soft_cap, case.sinks, shapes)
            if key not in programs:
                programs[key] = threads.submit(_compile, backend, is_decode, case, arguments)
            started.append((backend, name, case, step, arguments, programs[key]))
        for backend, name, case, step, arguments, program in started:
            with record.guard(f"{backend.value} {name}"):
                out, pool = program.result()(*arguments)
                record.add(
                    f"{backend.value} {name}",
                    **_judged(
                        case, step, np.asarray(out), np.asarray(pool), _layout(backend, case)
                    ),
                )


def _layout(backend: Backend, case: Case) -> PoolLayout:
    return pool_layout(backend, case.num_kv_heads, case.head_dim, case.pool_dtype)


def _shape(arguments, layout: PoolLayout):
    return attention_shape(arguments[0], arguments[3], arguments[6], layout)


def _arguments(case: Case, step: Step, layout: PoolLayout) -> tuple:
    pool = laid_out(step.kv_pool, layout)
    sinks = step.sinks if step.sinks is not None else np.full(case.num_heads, -np.inf, np.float32)
    scalars = (np.float32(case.scale), np.int32(case.sliding_window), sinks, *case.kv_scales)
    return (step.q, step.k, step.v, pool, np.int32(case.layer), *step.arrays, *scalars)


def _compile(backend: Backend, decode_only: bool, case: Case, arguments: tuple):
    def call(q, k, v, pool, layer, kv_lens, pages, cu_q_lens, distribution, scale, window, sinks,
             k_scale, v_scale):  # fmt: skip
        return ragged_paged_attention(
            q, k, v, pool, layer, kv_lens, pages, cu_q_lens, distribution, scale=scale,
            sliding_window=window, soft_cap=case.soft_cap, sinks=sinks if case.sinks else None,
            k_scale=k_scale, v_scale=v_scale, backend=backend, decode_only=decode_only,
        )  # fmt: skip

    return jax.jit(call, donate_argnums=3).lower(*arguments).compile()


def _judged(case: Case, step: Step, out: np.ndarray, pool: np.ndarray, layout: PoolLayout) -> dict:
    """Returns the largest error, as a part of the largest number in its head's output, and the
    share of numbers in the pool that are not those that were written; page 0 holds padding."""
    wanted = oracle(case, step)
    error = np.abs(out.astype(np.float64) - wanted)
    largest = np.abs(wanted).max(axis=-1, keepdims=True)
    mismatches = float(np.mean(plain(pool, layout)[:, 1:] != written_pool(case, step)[:, 1:]))
    is_quantised = case.pool_dtype in ("int8", "float8_e4m3fn")
    figures = {
        "max_error": float((error / np.where(largest == 0, 1, largest)).max()),
        "tolerance": TOLERANCE[case.dtype],
        "pool_mismatches": mismatches,
        "ok": mismatches <= (MOST_QUANTISED_MISMATCHES if is_quantised else 0),
    }
    try:
        assert_close(case, out, wanted)
    except AssertionError as wrong:
        figures |= {"ok": False, "why": str(wrong)}
    return figures
