"""The whole sampler against the float64 reference, over random mixed batches, and each row's
independence of the others.

Logits and settings lie on grids: sums and quotients of theirs that differ at all differ by more
than float32 rounds, so ties, sets and greedy choices have to be exact. Rows of public fault
reports: O24, O25 (order and neighbours), O38 (whose log-probability).
"""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jserve.runner.sampling import Sampled, sample
from jserve.sampling_params import MAX_LOGPROBS
from scheduler.packer import Wants
from tests.runner.sampling_reference import (
    Row,
    edited,
    kept_sets,
    log_softmax,
    pack,
    rank,
    scaled,
    softmax,
    tokens_at,
    uniform,
)

NUM_ROWS = 8
SMALL = MAX_LOGPROBS  # a vocabulary of which the alternatives show the whole distribution
LARGE = 300  # two blocks of the draw, and a mask whose last word is not full

raw_jit = jax.jit(sample)
processed_jit = jax.jit(partial(sample, processed_logprobs=True))


def rows_of(V: int) -> st.SearchStrategy[list[Row]]:
    ids = st.lists(st.integers(0, V - 1), max_size=6)
    row = st.builds(
        Row,
        logits=st.builds(_logits, st.just(V), st.integers(0, 2**32 - 1), st.booleans()),
        temperature=st.sampled_from([0.0, 1e-6, 0.25, 0.5, 0.75, 1.0, 1.25, 2.0, 8.0, 100.0]),
        top_k=st.sampled_from([0, 1, 2, 3, 7, V - 1, V, 2**31 - 1]),
        top_p=st.sampled_from([1.0, 1.0, 0.9137, 0.5071, 0.1319, 1e-6]),
        min_p=st.sampled_from([0.0, 0.0, 0.0313, 0.2097, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 0.75, 1.25, 1.5, 5.0]),
        presence_penalty=st.sampled_from([0.0, 0.0, -2.0, 0.375, 1.5]),
        frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 0.125, 2.0]),
        seed=st.integers(0, 2**32 - 1),
        position=st.integers(0, 2**20),
        bias=st.one_of(
            st.just({}),
            st.dictionaries(
                st.integers(0, V - 1), st.sampled_from([-100.0, -2.5, 0.25, 7.0, 100.0])
            ),
        ),
        allowed=st.one_of(
            st.none(), st.lists(st.integers(0, V - 1), min_size=1, max_size=V, unique=True)
        ),
        prompt=ids,
        output=ids,
    )
    return st.lists(row, min_size=NUM_ROWS, max_size=NUM_ROWS, unique_by=lambda row: row.seed)


def _logits(V: int, seed: int, has_holes: bool) -> np.ndarray:
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(0, 4, V) * 4) / 4
    if has_holes:  # tokens that the model itself excludes
        logits[rng.random(V) < 0.2] = -np.inf
        logits[rng.integers(V)] = 1.0
    return logits.astype(np.float32)


def may_be_chosen(row: Row) -> set[int]:
    """The token that a row gives, or the few that its draw is too near between to tell."""
    x = edited(row)
    if row.temperature < 1e-5:
        return {int(np.argmax(x))}
    y, point = scaled(row), uniform(row)
    sets = (softmax(np.where(keep, y, -np.inf)) for keep in kept_sets(row))
    return set.union(*(tokens_at(probabilities, point) for probabilities in sets))


def has_a_token(row: Row) -> bool:
    return bool(np.isfinite(edited(row)).any())


@pytest.mark.parametrize("V", [SMALL, LARGE])
@settings(max_examples=60)
@given(data=st.data())
def test_each_row_of_a_mixed_batch_gives_the_token_of_the_reference(V, data):
    rows = data.draw(rows_of(V))
    token_ids = np.asarray(raw_jit(*pack(rows)).token_ids)
    for row, token_id in zip(rows, token_ids.tolist(), strict=True):
        if has_a_token(row):
            assert token_id in may_be_chosen(row)
        else:
            assert token_id == -1


@settings(max_examples=60)
@given(rows_of(LARGE))
def test_raw_log_probabilities_and_ranks_are_those_of_the_logits_themselves(rows):
    out: Sampled = jax.tree.map(np.asarray, raw_jit(*pack(rows, Wants.LOGPROBS)))
    for i, row in enumerate(rows):
        token_id = int(out.token_ids[i])
        if token_id < 0:
            continue
        expected = log_softmax(row.logits)
        best = np.argsort(-row.logits, kind="stable")[:MAX_LOGPROBS]
        assert_close(out.of_tokens.logprobs[i], expected[token_id])
        assert out.of_tokens.ranks[i] == rank(row.logits, token_id)
        np.testing.assert_array_equal(out.of_tokens.top_ids[i], best)
        assert_close(out.of_tokens.top_logprobs[i], expected[best])
        assert_is_among_the_best(out, i)


@settings(max_examples=120)
@given(rows_of(SMALL))
def test_processed_log_probabilities_are_those_of_what_is_drawn_from(rows):
    """Of this vocabulary all tokens are reported, so that the sets are seen to be exact."""
    out: Sampled = jax.tree.map(np.asarray, processed_jit(*pack(rows, Wants.LOGPROBS)))
    for i, row in enumerate(rows):
        token_id = int(out.token_ids[i])
        if token_id < 0:
            continue
        found = np.empty(SMALL)
        found[out.of_tokens.top_ids[i]] = out.of_tokens.top_logprobs[i]
        if row.temperature < 1e-5:
            choices = [edited(row)]
        else:
            choices = [np.where(keep, scaled(row), -np.inf) for keep in kept_sets(row)]
        same_set = [x for x in choices if (np.isfinite(x) == np.isfinite(found)).all()]
        assert same_set, (np.isfinite(found), choices)
        assert_close(found, log_softmax(same_set[0]))
        assert out.of_tokens.ranks[i] == rank(same_set[0], token_id)
        assert_is_among_the_best(out, i)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=5e-7, atol=2e-5)


def assert_is_among_the_best(out: Sampled, i: int) -> None:
    """O38: the chosen token's entry and its own among the alternatives are the same."""
    place = np.flatnonzero(out.of_tokens.top_ids[i] == out.token_ids[i])
    if len(place):
        assert out.of_tokens.top_logprobs[i, place[0]] == out.of_tokens.logprobs[i]
        assert out.of_tokens.ranks[i] <= place[0] + 1  # less only where others are equal
    else:
        assert out.of_tokens.ranks[i] > 1
        assert out.of_tokens.logprobs[i] <= out.of_tokens.top_logprobs[i, -1]


@pytest.mark.parametrize("jitted", [raw_jit, processed_jit], ids=["raw", "processed"])
@settings(max_examples=40)
@given(data=st.data())
def test_a_row_is_the_same_bit_for_bit_alone_and_at_any_place_in_any_batch(jitted, data):
    """O24, O25: with neighbours that want other things, in the same program and in one of 1 row."""
    rows = data.draw(rows_of(LARGE))
    mixed = jax.tree.map(np.asarray, jitted(*pack(rows, Wants.LOGPROBS)))
    turned = jax.tree.map(np.asarray, jitted(*pack(rows[3:] + rows[:3], Wants.LOGPROBS)))
    for i, row in enumerate(rows):
        alone = jax.tree.map(np.asarray, jitted(*pack([row], Wants.LOGPROBS)))
        quiet = jitted(*pack([row]))  # where nobody asks for log-probabilities
        assert quiet.token_ids[0] == mixed.token_ids[i]
        for mine, other, own in zip(*map(jax.tree.leaves, (mixed, turned, alone)), strict=True):
            np.testing.assert_array_equal(mine[i], other[i - 3])
            np.testing.assert_array_equal(mine[i], own[0])
