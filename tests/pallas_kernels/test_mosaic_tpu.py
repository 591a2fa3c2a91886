"""The TPU kernel in Pallas' interpreters: numbers against the float64 oracle, its own properties,
and races. What a real compiler says of it is checked by scripts/check_accelerators.py."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import Backend
from pallas_kernels.kv_layout import pool_layout
from pallas_kernels.ragged_paged_attention import mosaic_tpu_copies as copies
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.config import TpuConfig
from tests.rpa_cases import (
    CASES,
    Case,
    Step,
    assert_close,
    build,
    laid_out,
    oracle,
    plain,
    written_pool,
)
from tests.rpa_properties import AttentionProperties, in_chunks


def widened(case: Case, num_tokens: int = 400) -> Case:
    """`case` in a step so large that one program serves all cases of the same heads and dtypes."""
    return dataclasses.replace(
        case,
        padding_tokens=num_tokens - sum(q_len for _, q_len in case.rows),
        padding_rows=70 - len(case.rows),
        spare_pages=400 - sum(case.pages_of_rows),
        spare_columns=130 - max(case.pages_of_rows),
    )


MIXED = widened(Case(rows=((140, 1), (9, 1), (300, 20), (30, 30))))


def blocks(page_size: int, keys: int = 128) -> TpuConfig:
    """The smallest blocks, so that small cases have many: two rows, or 16 tokens, 128 keys."""
    pages = max(1, keys // page_size)
    return TpuConfig(
        decode_rows=2, decode_pages=pages, prefill_tokens=16, prefill_pages=pages
    )  # fmt: skip


def layout_of(case: Case):
    return pool_layout(Backend.MOSAIC_TPU, case.num_kv_heads, case.head_dim, case.pool_dtype)


def call_of(case: Case, decode_only: bool, config: TpuConfig, interpret):
    call = functools.partial(
        ragged_paged_attention,
        soft_cap=case.soft_cap,
        backend=Backend.MOSAIC_TPU,
        decode_only=decode_only,
        config=config,
        interpret=interpret,
    )
    return jax.jit(call, donate_argnums=3)


@functools.cache
def _shared_call(soft_cap: float | None, decode_only: bool, config: TpuConfig):
    return call_of(Case(rows=(), soft_cap=soft_cap), decode_only, config, True)


def run(case: Case, step: Step, *, decode_only=False, config=None, interpret: object = True):
    """Returns numpy (out, pool); a window and a layer are traced, as in a scanned model."""
    config = config or blocks(case.page_size)
    if interpret is True:
        call = _shared_call(case.soft_cap, decode_only, config)
    else:
        call = call_of(case, decode_only, config, interpret)
    k_scale, v_scale = case.kv_scales
    out, pool = call(
        step.q, step.k, step.v, jnp.array(laid_out(step.kv_pool, layout_of(case))),
        np.int32(case.layer), *step.arrays,
        scale=np.float32(case.scale), sliding_window=np.int32(case.sliding_window),
        sinks=step.sinks, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    return np.asarray(out).astype(np.float32), plain(np.asarray(pool), layout_of(case))


def check(case: Case, **settings):
    step = build(case)
    out, pool = run(case, step, **settings)
    assert out.shape == step.q.shape
    assert_close(case, out, oracle(case, step))
    np.testing.assert_array_equal(pool[:, 1:], written_pool(case, step)[:, 1:])


OWN_SHAPES = {
    "decode_full_pool",
    "prefill_no_padding",
    "mixed_more_rows_than_tokens",
    "decode_128_rows",
}


# Each takes programs of its own, and a mixed case of the same kind runs both paths.
LEFT_OUT = ("decode_sinks", "decode_soft_cap", "prefill_soft_cap", "decode_int8", "decode_float8")


@pytest.mark.parametrize("name", [name for name in CASES if name not in LEFT_OUT])
def test_output_and_pool_match_the_oracle(name):
    check(CASES[name] if name in OWN_SHAPES else widened(CASES[name]))


@pytest.mark.parametrize("name", ["decode_ragged", "decode_window_shorter", "decode_64_rows"])
def test_decode_only_program_matches_the_oracle(name):
    check(widened(CASES[name], num_tokens=70), decode_only=True)


# dtype of queries, of the pool, head_dim, KV heads, group, page_size, window, sinks: each value
# occurs, not each pair of values.
KINDS = (
    ("bfloat16", "bfloat16", 128, 2, 4, 32, 0, False),
    ("bfloat16", "bfloat16", 80, 8, 2, 128, 0, True),
    ("bfloat16", "bfloat16", 256, 1, 1, 64, 40, False),
    ("bfloat16", "int8", 128, 1, 16, 16, 33, False),
    ("bfloat16", "float8_e4m3fn", 128, 4, 3, 8, 0, True),
    ("bfloat16", "float32", 96, 2, 1, 256, 0, False),
    ("float32", "float32", 128, 1, 5, 8, 100, False),
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_every_kind_of_pool_and_heads_matches_the_oracle(kind):
    dtype, kv_dtype, head_dim, num_kv_heads, group, page_size, window, sinks = kind
    edge = page_size
    check(
        Case(
            rows=((edge, 1), (edge + 1, 1), (150, 1), (2 * edge + 3, min(edge, 40)), (20, 20)),
            dtype=dtype,
            kv_dtype=kv_dtype,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            num_heads=num_kv_heads * group,
            page_size=page_size,
            sliding_window=window,
            sinks=sinks,
        )
    )


class TestProperties(AttentionProperties):
    run = staticmethod(run)
    case = MIXED
    poisoned = ({}, {"sliding_window": 24})


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_splitting_a_prompt_into_chunks_changes_nothing_o104(chunk):
    case = Case(rows=((75, 75),), padding_tokens=0, sliding_window=30)
    out, pool = in_chunks(run, case, chunk, num_tokens=75)
    wanted, wanted_pool = run(case, build(case))
    assert_close(case, out, wanted)
    np.testing.assert_array_equal(pool[:, 1:], wanted_pool[:, 1:])


def test_block_sizes_that_cut_a_block_of_128_keys_are_refused():
    step = build(MIXED)
    with pytest.raises(ValueError, match="prefill_pages must make a multiple of 128 keys"):
        run(MIXED, step, config=TpuConfig(1, 8, 16, 7))
    with pytest.raises(ValueError, match="prefill_tokens must be a multiple of 16"):
        run(MIXED, step, config=TpuConfig(1, 8, 24, 8))


# One key past a block, a last page of one key, a tile that another row's tile overlaps.
TINY = Case(
    rows=((129, 1), (32, 1), (16, 1), (130, 20), (4, 4)),
    num_heads=2, num_kv_heads=1, num_layers=1, layer=0, spare_pages=1, padding_tokens=1,
)  # fmt: skip
TINY_CASES = {
    "decode": dataclasses.replace(TINY, rows=TINY.rows[:3], sinks=True),
    "mixed": dataclasses.replace(TINY, rows=TINY.rows[1:], head_dim=128, dtype="bfloat16"),
    "window": dataclasses.replace(TINY, rows=TINY.rows[2:4], sliding_window=20, kv_dtype="int8"),
}


def run_watched(case: Case, step: Step, mode: str, capfd):
    """Runs with races, reads of what was never written and reads out of bounds detected."""
    params = pltpu.InterpretParams(
        detect_races=True, dma_execution_mode=mode, uninitialized_memory="nan"
    )
    try:
        out, pool = run(case, step, interpret=params)
        if "RACE DETECTED" in "".join(capfd.readouterr()):  # jax 0.11 prints where 0.12 raises
            raise RuntimeError("RACE DETECTED")
        return out, pool
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
@pytest.mark.parametrize("name", TINY_CASES)
def test_no_copy_races_and_nothing_is_read_before_it_is_written(name, mode, capfd):
    case = TINY_CASES[name]
    step = build(case)
    out, pool = run_watched(case, step, mode, capfd)
    assert_close(case, out, oracle(case, step))
    np.testing.assert_array_equal(pool[:, 1:], written_pool(case, step)[:, 1:])


@pytest.mark.parametrize("step_left_out", ["await_block", "await_new_rows"])
def test_a_copy_that_is_not_awaited_is_caught(step_left_out, monkeypatch, capfd):
    monkeypatch.setattr(copies, step_left_out, lambda *args: None)
    with pytest.raises(Exception, match="RACE DETECTED"):
        run_watched(TINY_CASES["decode"], build(TINY_CASES["decode"]), "eager", capfd)


def test_new_rows_awaited_after_they_are_read_are_caught(monkeypatch, capfd):
    def wait_too_late(c, refs, tile, end, b, slot):
        await_block(c, refs, tile, end, b, slot)
        begin, end = copies.rows_of_call(c, refs)
        jax.lax.cond(
            tile.row + c.rows >= end,
            lambda: await_new_rows(c, refs, begin, end),
            lambda: None,
        )

    await_block, await_new_rows = copies.await_block, copies.await_new_rows
    monkeypatch.setattr(copies, "await_block", wait_too_late)
    monkeypatch.setattr(copies, "await_new_rows", lambda *args: None)
    case = dataclasses.replace(TINY, rows=TINY.rows[1:2])
    with pytest.raises(Exception, match="RACE DETECTED"):
        run_watched(case, build(case), "eager", capfd)


def test_a_page_id_out_of_bounds_is_caught(capfd):
    case = TINY_CASES["decode"]
    step = build(case)
    step.page_indices[1, 0] = step.kv_pool.shape[1]
    with pytest.raises(Exception, match="Out-of-bounds"):
        run_watched(case, step, "eager", capfd)
