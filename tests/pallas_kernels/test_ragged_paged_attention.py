"""The XLA backend of ragged paged attention against the float64 oracle and its own properties."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.dispatch import Backend
from pallas_kernels.kv_layout import pool_layout
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from tests.rpa_cases import (
    CASES,
    TINY_CASES,
    Case,
    Step,
    assert_close,
    bucketed,
    build,
    laid_out,
    oracle,
    plain,
    written_pool,
)
from tests.rpa_properties import AttentionProperties, in_chunks

MIXED = Case(rows=((40, 1), (9, 1), (200, 64), (30, 30)))


@functools.cache
def compiled(soft_cap: float | None, decode_only: bool, config=None):
    call = functools.partial(
        ragged_paged_attention,
        soft_cap=soft_cap,
        backend=Backend.XLA,
        decode_only=decode_only,
        config=config,
    )
    return jax.jit(call, donate_argnums=3)


def layout_of(case: Case):
    return pool_layout(Backend.XLA, case.num_kv_heads, case.head_dim, case.pool_dtype)


def pool_of(case: Case, step: Step):
    return jnp.array(laid_out(step.kv_pool, layout_of(case)))


def run(case: Case, step: Step, *, decode_only=False, config=None, kv_scales=None):
    """Returns numpy (out, pool); a window and a layer are traced, as in a scanned model."""
    call = compiled(case.soft_cap, decode_only, config)
    k_scale, v_scale = case.kv_scales if kv_scales is None else kv_scales
    out, pool = call(
        step.q, step.k, step.v, pool_of(case, step), np.int32(case.layer), *step.arrays,
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


EXACT_SHAPES = (
    "decode_full_pool",
    "prefill_full_pool",
    "prefill_no_padding",
    "mixed_more_rows_than_tokens",
)


@pytest.mark.parametrize("name", CASES)
def test_output_and_pool_match_the_oracle(name):
    check(CASES[name] if name in EXACT_SHAPES else bucketed(CASES[name]))


@pytest.mark.parametrize("name", TINY_CASES)
def test_tiny_steps_match_the_oracle(name):
    check(bucketed(TINY_CASES[name]))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("decode")])
def test_decode_only_program_matches_the_oracle(name):
    case = bucketed(CASES[name])
    check(dataclasses.replace(case, padding_tokens=case.padding_rows), decode_only=True)


@pytest.mark.parametrize("group", [1, 2, 3, 8, 16])
def test_every_group_size_matches_the_oracle(group):
    check(dataclasses.replace(MIXED, num_kv_heads=2, num_heads=2 * group))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_dim_matches_the_oracle(head_dim):
    check(dataclasses.replace(MIXED, head_dim=head_dim))


@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128, 256])
def test_every_page_size_matches_the_oracle(page_size):
    edges = ((page_size, 1), (page_size + 1, 1), (2 * page_size + 3, page_size), (20, 20))
    check(dataclasses.replace(MIXED, rows=edges, page_size=page_size))


rows_of_any_length = st.tuples(st.integers(0, 70), st.integers(0, 40)).map(
    lambda row: (row[0] + row[1], row[1])
)


@settings(max_examples=30)
@given(
    decode=st.lists(st.integers(1, 110), max_size=5),
    others=st.lists(rows_of_any_length, max_size=3),
    num_prefill=st.integers(0, 3),
    window=st.sampled_from([0, 1, 17, 200]),
    seed=st.integers(0, 99),
)
def test_random_ragged_steps_match_the_oracle(decode, others, num_prefill, window, seed):
    rows = (*((n, 1) for n in decode), *others)
    end = len(decode)
    case = Case(
        rows=rows,
        distribution=(end, min(end + num_prefill, len(rows))),
        head_dim=16,
        page_size=8,
        sliding_window=window,
        sinks=True,
        seed=seed,
        # one shape for all
        padding_rows=9 - len(rows),
        padding_tokens=130 - sum(q_len for _, q_len in rows),
    )
    pages = case.pages_of_rows
    spare = dict(spare_pages=120 - sum(pages), spare_columns=16 - max(pages, default=0))
    check(dataclasses.replace(case, **spare))


class TestProperties(AttentionProperties):
    run = staticmethod(run)
    case = MIXED
    poisoned = tuple(
        {"sliding_window": window, "kv_dtype": kv_dtype}
        for window in (0, 24)
        for kv_dtype in ("float32", "float8_e4m3fn")
    )


@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_splitting_a_prompt_into_chunks_changes_nothing_o104(chunk, window):
    case = Case(rows=((75, 75),), padding_tokens=0, sliding_window=window)
    out, pool = in_chunks(run, case, chunk, num_tokens=chunk)
    whole, whole_pool = run(case, build(case))
    assert_close(case, out, whole)
    np.testing.assert_array_equal(pool[:, 1:], whole_pool[:, 1:])


@pytest.mark.parametrize("decode_end", [0, 2])
def test_rows_alone_equal_rows_together_o105(decode_end):
    lengths = (37, 5, 130, 64, 17)
    rows = tuple((n, 1 if s < decode_end else min(n, 20)) for s, n in enumerate(lengths))
    case = Case(rows=rows)
    step = build(case)
    together, _ = run(case, step)
    for s, row in enumerate(rows):
        tokens = slice(step.cu_q_lens[s], step.cu_q_lens[s + 1])
        alone = build(dataclasses.replace(case, rows=(row,), padding_tokens=20 - row[1]))
        for name in "qkv":
            getattr(alone, name)[: row[1]] = getattr(step, name)[tokens]
        alone.kv_pool = step.kv_pool
        alone.page_indices = step.page_indices[[s, -1]]
        out, _ = run(case, alone)
        assert_close(case, out[: row[1]], together[tokens])


def test_padding_tokens_give_zero():
    step = build(MIXED)
    out, _ = run(MIXED, step)
    assert not out[step.num_real_tokens :].any()


@pytest.mark.parametrize(
    ("rows", "kv_dtype"),
    [
        (((40, 1),), "float32"),
        (((40, 1), (9, 1)), "float32"),
        (MIXED.rows, "float32"),
        (MIXED.rows, "int8"),
    ],
)
def test_donated_pool_is_written_in_place_inside_a_layer_loop(rows, kv_dtype):
    decode_only = all(q_len == 1 for _, q_len in rows)
    empty = dict(padding_rows=0, padding_tokens=0, spare_pages=400, num_layers=8)
    case = dataclasses.replace(MIXED, rows=rows, kv_dtype=kv_dtype, **empty)
    step = build(case)

    @functools.partial(jax.jit, donate_argnums=1)
    def layers(q, pool):
        def one(layer, carry):
            out, pool = ragged_paged_attention(
                carry[0], step.k, step.v, carry[1], layer, *step.arrays,
                scale=case.scale, sliding_window=0, backend=Backend.XLA, decode_only=decode_only,
            )  # fmt: skip
            return out, pool

        return jax.lax.fori_loop(0, case.num_layers, one, (q, pool))

    pool = pool_of(case, step)
    program = layers.lower(step.q, pool).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes / 8
    shape = ",".join(map(str, pool.shape))
    assert not re.findall(rf"\[{shape}\]\S* (copy|convert)\(", program.as_text())
    assert "xla_cpu_small_call" not in program.as_text()  # a scalar kernel; see reference.py
    address = pool.unsafe_buffer_pointer()
    _, pool = program(step.q, pool)
    assert pool.unsafe_buffer_pointer() == address


def test_temporary_memory_does_not_follow_max_model_len():
    def temp_bytes(columns: int) -> int:
        case = dataclasses.replace(MIXED, spare_columns=columns)
        step = build(case)
        args = (step.q, step.k, step.v, pool_of(case, step), np.int32(0), *step.arrays)
        scalars = dict(scale=np.float32(1), sliding_window=np.int32(0))
        program = compiled(None, False).lower(*args, **scalars).compile()
        return program.memory_analysis().temp_size_in_bytes

    short, long = temp_bytes(0), temp_bytes(4096)
    assert abs(long - short) < 4096


def test_scales_of_a_float_pool_change_its_numbers_and_not_the_output():
    case = dataclasses.replace(MIXED, rows=((30, 30), (9, 9)))  # no history in the pool
    step = build(case)
    clean, clean_pool = run(case, step)
    powers = np.asarray([[2, 4], [0.5, 8]], np.float32)  # [2, K]
    of_lanes = powers[..., None] * np.tile(np.float32([1, 0.25]), case.head_dim // 2)
    new = (clean_pool != step.kv_pool).any(axis=(-3, -2, -1))
    assert new.sum() == step.num_real_tokens + 1  # and one in the null page
    for scales in (powers, of_lanes):
        out, pool = run(case, step, kv_scales=scales)
        np.testing.assert_array_equal(out, clean)
        pool_scales = scales.reshape(2, 2, -1).swapaxes(0, 1)  # [K, 2, H or 1]
        np.testing.assert_array_equal(pool[new] * pool_scales, clean_pool[new])


def test_an_int8_pool_may_have_a_scale_for_every_lane():
    case = dataclasses.replace(MIXED, rows=((30, 30), (9, 9)), kv_dtype="int8")
    step = build(case)
    scales = np.random.default_rng(7).uniform(0.01, 0.05, (2, 2, case.head_dim)).astype(np.float32)
    kv, steps = np.stack([step.k, step.v], axis=2), scales.swapaxes(0, 1)  # [T, K, 2, H]
    stands_for = np.clip(np.rint(kv / steps), -127, 127) * steps.astype(np.float64)
    step.dense[:] = np.split(stands_for[: step.num_real_tokens], [30])
    out, _ = run(case, step, kv_scales=scales)
    assert_close(case, out, oracle(case, step))


BAD_CALLS = {
    "keys disagree with queries": (dict(k=np.zeros((5, 2, 64), np.float32)), "must agree"),
    "a pool of 64-bit integers": (dict(kv_pool=np.zeros((2, 3, 16, 4, 64), int)), "int8"),
    "pages of 24 tokens": (
        dict(kv_pool=np.zeros((2, 3, 24, 4, 64), np.float32)),
        "page_size=24 must be a power of two",
    ),
    "a pool of other heads": (dict(kv_pool=np.zeros((2, 3, 16, 2, 64))), "pool_shape"),
    "too many heads in a group": (dict(q=np.zeros((6, 34, 64), np.float32)), "17 query heads"),
    "heads do not divide": (dict(q=np.zeros((6, 3, 64), np.float32)), "use a multiple of it"),
    "flat page_indices": (dict(page_indices=np.zeros(8, np.int32)), "page_indices"),
    "64-bit kv_lens": (dict(kv_lens=np.zeros(2, np.int16)), "use int32"),
    "short cu_q_lens": (dict(cu_q_lens=np.zeros(2, np.int32)), "cu_q_lens"),
    "decode_only with a prompt": (dict(decode_only=True), "decode_only"),
    "negative soft cap": (dict(soft_cap=-1.0), "soft_cap"),
    "two-dimensional q": (dict(q=np.zeros((6, 64), np.float32)), "use \\[T, N, H\\]"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_contradicting_arguments_are_refused_with_the_remedy(name):
    case = Case(rows=((5, 1), (6, 5)), padding_tokens=0, padding_rows=0)
    step = build(case)
    call = dict(
        q=step.q, k=step.k, v=step.v, kv_pool=pool_of(case, step), layer=0, kv_lens=step.kv_lens,
        page_indices=step.page_indices, cu_q_lens=step.cu_q_lens, distribution=step.distribution,
        scale=1.0, sliding_window=0, backend=Backend.XLA,
    )  # fmt: skip
    change, message = BAD_CALLS[name]
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(**{**call, **change})
