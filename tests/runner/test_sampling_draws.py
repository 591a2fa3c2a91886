"""Frequencies of what is drawn, by chi-squared, under settings of all kinds at once."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from scipy import stats

from jserve.runner.sampling import sample
from tests.runner.sampling_reference import Row, kept_sets, pack, scaled, softmax

NUM_DRAWS, NUM_ROWS = 16_384, 512
VOCAB = 600  # more than one block of the two-level draw, and no multiple of it
sample_jit = jax.jit(sample)

RNG = np.random.default_rng(5)
LOGITS = RNG.normal(0, 2, VOCAB).astype(np.float32)
EVERY_OTHER = tuple(range(0, VOCAB, 2))
OUTPUT = tuple(RNG.integers(0, VOCAB, 300).tolist())
SETTINGS = {
    "plain": {},
    "top-k": {"top_k": 20},
    "top-p": {"top_p": 0.7123},
    "min-p": {"min_p": 0.0513},
    "cuts": {"top_k": 90, "top_p": 0.9137, "min_p": 0.0213},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    "bias and mask": {"bias": {4: 6.0, 8: -100.0, 9: 50.0}, "allowed": EVERY_OTHER},
    "all": {
        "bias": {4: 3.0, 8: -100.0},
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
        "allowed": EVERY_OTHER,
        "top_k": 120,
        "top_p": 0.9637,
        "min_p": 0.0113,
    },
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_drawn_frequencies_are_the_distribution_by_chi_squared(settings):
    row = Row(LOGITS, temperature=1.3, prompt=OUTPUT[:50], output=OUTPUT[50:], **settings)
    packed = pack([row] * NUM_ROWS)
    found = np.zeros(VOCAB)
    for begin in range(0, NUM_DRAWS, NUM_ROWS):
        packed.batch["seed"][:] = np.arange(begin, begin + NUM_ROWS)
        found += np.bincount(sample_jit(*packed).token_ids, minlength=VOCAB)
    (kept, _) = kept_sets(row)
    expected = NUM_DRAWS * softmax(np.where(kept, scaled(row), -np.inf))
    assert found[~kept].sum() == 0
    # cells of fewer than 8 expected draws are pooled: the statistic is no chi-squared there
    large = expected >= 8
    cells = np.array(
        [[*found[large], found[~large].sum()], [*expected[large], expected[~large].sum()]]
    )
    cells = cells[:, cells[1] > 0]
    assert stats.chisquare(cells[0], cells[1]).pvalue > 1e-4


def test_draws_of_one_seed_at_following_positions_are_independent_by_chi_squared():
    """As one request's draws are made: pairs of neighbours fill all cells alike."""
    flat = Row(np.zeros(16, np.float32), temperature=1.0, seed=1234)
    packed = pack([flat] * NUM_ROWS)
    ids = []
    for begin in range(0, NUM_DRAWS, NUM_ROWS):
        packed.batch["sample_positions"][:] = np.arange(begin, begin + NUM_ROWS)
        ids += np.asarray(sample_jit(*packed).token_ids).tolist()
    pairs = np.bincount(16 * np.array(ids[::2]) + np.array(ids[1::2]), minlength=256)
    assert stats.chisquare(pairs).pvalue > 1e-4


def test_draws_over_a_real_vocabulary_are_the_distribution_by_chi_squared():
    logits = np.random.default_rng(6).normal(0, 3, 49_152).astype(np.float32)
    row = Row(logits, temperature=0.8)
    packed = pack([row] * 64)
    expected = softmax(scaled(row))
    order = np.argsort(-expected)
    group = np.empty(len(logits), int)  # 40 groups of tokens, about equally likely
    group[order] = np.minimum(np.cumsum(expected[order]) * 40, 39).astype(int)
    found = np.zeros(40)
    for begin in range(0, 2048, 64):
        packed.batch["seed"][:] = np.arange(begin, begin + 64)
        found += np.bincount(group[np.asarray(sample_jit(*packed).token_ids)], minlength=40)
    shares = np.bincount(group, expected, minlength=40)
    used = shares > 0
    assert stats.chisquare(found[used], shares[used] * found.sum()).pvalue > 1e-4


def test_choices_of_one_prompt_with_following_seeds_draw_apart():
    row = Row(LOGITS, temperature=1.0)
    ids = sample_jit(*pack([replace(row, seed=i) for i in range(64)])).token_ids
    assert len(set(np.asarray(ids).tolist())) > 25
