"""Every backend of ragged paged attention against the float64 oracle and its own properties."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Backend
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from tests.rpa_cases import CASES, TOLERANCE, Case, Step, build, oracle, written_pool

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
    return jax.jit(call, donate_argnums=2)


def run(case: Case, step: Step, *, decode_only=False, config=None):
    """Returns numpy (out, pool); a window and a layer are traced, as in a scanned model."""
    call = compiled(case.soft_cap, decode_only, config)
    out, pool = call(
        step.q, step.kv, jnp.array(step.kv_pool), np.int32(case.layer), *step.arrays,
        scale=np.float32(case.scale), sliding_window=np.int32(case.sliding_window),
    )  # fmt: skip
    return np.asarray(out).astype(np.float32), np.asarray(pool)


def assert_close(case: Case, got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE[case.dtype])


def check(case: Case, **settings):
    step = build(case)
    out, pool = run(case, step, **settings)
    assert out.shape == step.q.shape
    assert_close(case, out, oracle(case, step))
    np.testing.assert_array_equal(pool[:, 1:], written_pool(case, step)[:, 1:])


@pytest.mark.parametrize("name", CASES)
def test_output_and_pool_match_the_oracle(name):
    check(CASES[name])


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("decode")])
def test_decode_only_program_matches_the_oracle(name):
    case = CASES[name]
    check(dataclasses.replace(case, padding_tokens=case.padding_rows), decode_only=True)
