"""Logits that are no numbers, and settings that leave nothing: such a row gives BAD_TOKEN, whatever
it asks for, and no other row notices."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from jserve.runner.sampling import argmax, sample
from scheduler.packer import BAD_TOKEN
from tests.runner.sampling_reference import Row, pack

REAL_VOCAB = 49_152  # wide rows are reduced by other code than narrow ones
sample_jit = jax.jit(sample)
argmax_jit = jax.jit(argmax)
argmax_of_columns_jit = jax.jit(partial(argmax, axis=0))

SETTINGS = {
    "greedy": {},
    "random": {"temperature": 0.9},
    "cut": {"temperature": 1.3, "top_k": 40, "top_p": 0.9137, "min_p": 0.0213},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "output": (1, 2, 1)},
    "biased": {"bias": {0: -100.0, 3: 100.0, 8: 2.5}},
    "masked": {"allowed": tuple(range(7, 40))},
}


def logits_of(rng: np.random.Generator, V: int) -> np.ndarray:
    return rng.normal(0, 3, V).astype(np.float32)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf], ids=["nan", "-nan", "inf"])
@pytest.mark.parametrize("V", [5, 300, 1024, REAL_VOCAB])
def test_no_nan_and_no_infinity_is_overlooked_at_any_place(V, bad):
    """XLA's maximum of a wide row on a CPU drops a NaN."""
    rng = np.random.default_rng(V)
    num_rows = 64
    logits = np.stack([logits_of(rng, V) for _ in range(num_rows)])
    edges = [0, 1, V // 2, V - 2, V - 1, *(2**i for i in range(16)), *(2**i - 1 for i in range(16))]
    places = [p for p in edges if p < V] + rng.integers(0, V, 4 * num_rows).tolist()
    for begin in range(0, len(places) - num_rows, num_rows):
        x = logits.copy()
        x[np.arange(num_rows), places[begin : begin + num_rows]] = bad
        assert np.isnan(argmax_jit(x)[1]).all()
        x[::2] = logits[::2]
        found, best = argmax_jit(x)
        np.testing.assert_array_equal(found[::2], logits[::2].argmax(axis=1))
        np.testing.assert_array_equal(best[::2], logits[::2].max(axis=1))
        for array, of_columns in zip((found, best), argmax_of_columns_jit(x.T), strict=True):
            np.testing.assert_array_equal(array, of_columns)


@pytest.mark.parametrize("V", [300, REAL_VOCAB])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_bad_logit_ends_its_row_only_whatever_the_row_asks_for(settings, V):
    rng = np.random.default_rng(1)
    rows = [Row(logits_of(rng, V), seed=i, **s) for i, s in enumerate(SETTINGS.values())]
    rows.append(Row(logits_of(rng, V), **settings))
    healthy = np.asarray(sample_jit(*pack(rows)).token_ids)
    assert (healthy >= 0).all()
    assert (healthy < V).all()
    for bad in (np.nan, np.inf):
        for place in (0, 8, 255, 256, V - 1):  # allowed by the mask of "masked" and not
            logits = rows[-1].logits.copy()
            logits[place] = bad
            ids = np.asarray(
                sample_jit(*pack([*rows[:-1], replace(rows[-1], logits=logits)])).token_ids
            )
            assert ids[-1] == BAD_TOKEN
            np.testing.assert_array_equal(ids[:-1], healthy[:-1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "nothing",
    [{"logits": np.full(300, -np.inf, np.float32)}, {"allowed": ()}, {"allowed": (4, 299)}],
    ids=["impossible", "empty mask", "mask of impossible tokens"],
)
def test_a_row_in_which_nothing_may_come_gives_no_token(nothing, temperature):
    rng = np.random.default_rng(2)
    logits = logits_of(rng, 300)
    logits[[4, 299]] = -np.inf
    row = replace(Row(logits, temperature=temperature, seed=5), **nothing)
    other = Row(logits, temperature=temperature, seed=6)
    ids = np.asarray(sample_jit(*pack([other, row, other])).token_ids)
    assert ids[1] == BAD_TOKEN
    alone = sample_jit(*pack([other] * 3)).token_ids
    np.testing.assert_array_equal(ids[[0, 2]], np.asarray(alone)[[0, 2]])


def test_minus_infinity_beside_numbers_is_an_impossible_token_and_no_fault():
    logits = np.full((4, 300), -np.inf, np.float32)
    places = [0, 255, 256, 299]
    logits[np.arange(4), places] = -50.0
    for temperature in (0.0, 3.0):
        rows = [Row(row, temperature=temperature, top_p=0.9) for row in logits]
        np.testing.assert_array_equal(sample_jit(*pack(rows)).token_ids, places)
