"""Sampling on the device against a plain numpy one: masks, draws, seeds, log-probabilities.

Rows of public fault reports: O24 (seeds and neighbours), O27 (unset top_k), O29 (tiny temperature).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.runner.sampling import Edits, Sampled, argmax, draw, sample, truncate
from jserve.sampling_params import MAX_LOGPROBS
from scheduler.packer import BAD_TOKEN, MAX_LOGIT_BIAS, Wants

NUM_DRAWS = 4096
MANY_IDS = 600  # more than one block of the two-level draw, and no multiple of it

_sample_jit = jax.jit(sample)
truncate_jit = jax.jit(truncate)
draw_jit = jax.jit(draw)
argmax_jit = jax.jit(argmax)


def batch(num_rows: int, *, logprobs: bool = False, **settings) -> dict[str, np.ndarray]:
    """The sampling fields of a packed batch; a setting is one value for all rows, or one each."""
    defaults = {
        "temperature": (np.float32, 0.0),
        "top_k": (np.int32, 0),
        "top_p": (np.float32, 1.0),
        "min_p": (np.float32, 0.0),
        "presence_penalty": (np.float32, 0.0),
        "frequency_penalty": (np.float32, 0.0),
        "repetition_penalty": (np.float32, 1.0),
        "seed": (np.uint32, np.arange(num_rows)),
        "sample_positions": (np.int32, 7),
    }
    arrays = {
        name: np.array(np.broadcast_to(settings.pop(name, value), (num_rows,)), dtype)
        for name, (dtype, value) in defaults.items()
    }
    assert not settings, settings
    random = arrays["temperature"] > 0
    cuts = (arrays["top_k"] > 0) | (arrays["top_p"] < 1) | (arrays["min_p"] > 0)
    wants = Wants.RANDOM * bool(random.any()) | Wants.TRUNCATION * bool((random & cuts).any())
    wants |= Wants.LOGPROBS * logprobs
    slots = np.arange(num_rows, dtype=np.int32)
    return arrays | {"slots": slots, "wants": np.array([wants], np.int32)}


def no_edits(num_rows: int, V: int) -> Edits:
    shape = num_rows, MAX_LOGIT_BIAS
    return Edits(
        np.zeros((num_rows + 1, V), np.int16),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.float32),
        np.zeros((num_rows, -(-V // 32)), np.uint32),
    )


def sample_jit(logits: np.ndarray, settings: dict[str, np.ndarray]) -> Sampled:
    return _sample_jit(logits, settings, no_edits(*logits.shape))


def token_ids(logits: np.ndarray, **settings) -> np.ndarray:
    return np.asarray(sample_jit(logits, batch(len(logits), **settings)).token_ids)


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def kept(x: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """One row's mask in float64: values down to a threshold, so that ties stay together."""
    x = x.astype(np.float64)
    order = np.sort(x)[::-1]
    k_threshold = order[top_k - 1] if 0 < top_k < len(x) else -np.inf
    weights = np.where(x >= k_threshold, np.exp(x), 0.0)
    if top_p < 1:
        mass = np.cumsum(np.sort(weights)[::-1])
        p_threshold = order[np.argmax(mass >= top_p * mass[-1])]
    else:
        p_threshold = -np.inf
    keep = (x >= k_threshold) & (x >= p_threshold)
    return keep & (x >= (np.log(min_p) if min_p > 0 else -np.inf))


def shifted(rng: np.random.Generator, rows: int, V: int, ties: bool) -> np.ndarray:
    x = rng.normal(0, 3, (rows, V))
    x = np.round(x * 2) / 2 if ties else x
    return (x - x.max(axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("V", [5, 600])
def test_masks_are_exactly_those_of_numpy(ties, V):
    rng = np.random.default_rng(V + ties)
    rows = 64
    x = shifted(rng, rows, V, ties)
    top_k = rng.choice([0, 1, 2, 3, V // 2, V - 1, V, V + 1, 2**31 - 1], rows).astype(np.int32)
    # odd fractions: in float32 no mass is ever a hair from one of them
    top_p = rng.choice([1.0, 0.9137, 0.5071, 0.1319, 1e-6], rows).astype(np.float32)
    min_p = rng.choice([0.0, 0.0313, 0.2097, 1.0], rows).astype(np.float32)
    out = np.asarray(truncate_jit(x, top_k, top_p, min_p))
    expected = np.stack([kept(*row) for row in zip(x, top_k, top_p, min_p, strict=True)])
    np.testing.assert_array_equal(np.isfinite(out), expected)
    np.testing.assert_array_equal(out[expected], x[expected])
    assert expected.any(axis=1).all()


def test_masks_are_exact_where_values_lie_in_all_magnitudes():
    """Halving the values gets nowhere here, so that halving the bits must end the search."""
    rng = np.random.default_rng(11)
    rows, V = 32, 400
    x = -(10.0 ** rng.uniform(-35, 35, (rows, V)))
    x[:, 7], x[:, 40:50] = 0.0, -np.inf
    x = x.astype(np.float32)
    top_k = rng.integers(1, V - 10, rows).astype(np.int32)
    top_p = rng.choice([1.0, 0.9137, 0.5071], rows).astype(np.float32)
    out = np.asarray(truncate_jit(x, top_k, top_p, np.zeros(rows, np.float32)))
    expected = np.stack([kept(*row, 0.0) for row in zip(x, top_k, top_p, strict=True)])
    np.testing.assert_array_equal(np.isfinite(out), expected)


@pytest.mark.parametrize("top_k", [0, 50, 51, 2**31 - 1])
def test_disabled_truncation_keeps_every_token(top_k):
    x = shifted(np.random.default_rng(1), 3, 50, ties=False)
    rows = [np.full(3, v, d) for v, d in ((top_k, "i4"), (1.0, "f4"), (0.0, "f4"))]
    np.testing.assert_array_equal(truncate_jit(x, *rows), x)


def test_tokens_that_are_impossible_stay_impossible_under_truncation():
    x = np.array([[0.0, -np.inf, -1.0, -np.inf]], np.float32)
    args = np.array([3], "i4"), np.array([0.99], "f4"), np.array([1e-30], "f4")
    np.testing.assert_array_equal(np.isfinite(truncate_jit(x, *args)), [[True, False, True, False]])
    logits = np.repeat(x, 500, axis=0)
    assert set(token_ids(logits, temperature=5.0, top_k=3, top_p=0.99)) == {0, 2}


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30, 1e-45])
def test_a_tiny_temperature_is_greedy_and_no_nan(temperature):  # O29
    rng = np.random.default_rng(3)
    logits = rng.permuted(np.tile(np.linspace(-8, 8, 300, dtype=np.float32), (8, 1)), axis=1)
    logits[:, ::3] -= 100
    assert np.float32(temperature) > 0
    drawn = sample_jit(logits, batch(8, temperature=temperature, logprobs=True))
    np.testing.assert_array_equal(drawn.token_ids, logits.argmax(axis=1))
    assert all(np.isfinite(array).all() for array in jax.tree.leaves(drawn))
    for settings in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        ids = token_ids(logits, temperature=temperature, **settings)
        np.testing.assert_array_equal(ids, logits.argmax(axis=1))


def test_an_unset_top_k_with_a_temperature_is_not_greedy():  # O27
    logits = np.zeros((50, 40), np.float32)
    assert len(set(token_ids(logits, temperature=1.5))) > 10
    assert len(set(token_ids(logits, temperature=1.5, top_k=0))) > 10
    assert len(set(token_ids(logits, temperature=1.5, top_k=1000))) > 10
    peaked = shifted(np.random.default_rng(0), 50, 40, ties=False)
    np.testing.assert_array_equal(
        token_ids(peaked, temperature=1.5, top_k=1), peaked.argmax(axis=1)
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 20},
        {"top_p": 0.7},
        {"min_p": 0.05},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=lambda s: "+".join(s) or "plain",
)
def test_drawn_frequencies_are_the_distribution_by_chi_squared(settings):
    temperature = 1.3
    row = np.random.default_rng(5).normal(0, 2, MANY_IDS).astype(np.float32)
    logits = np.tile(row, (NUM_DRAWS, 1))
    counts = np.bincount(token_ids(logits, temperature=temperature, **settings), minlength=MANY_IDS)
    x = (row - row.max()) / temperature
    cuts = [settings.get(name, off) for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0))]
    expected = NUM_DRAWS * softmax(np.where(kept(x, *cuts), x, -np.inf))
    assert counts[expected == 0].sum() == 0
    # cells of fewer than 8 expected draws are pooled: the statistic is no chi-squared there
    large = expected >= 8
    cells = np.append(expected[large], expected[~large].sum())
    found = np.append(counts[large], counts[~large].sum())
    used = cells > 0
    statistic = ((found[used] - cells[used]) ** 2 / cells[used]).sum()
    freedom = used.sum() - 1
    # above the 0.999999 quantile of chi-squared for every number of cells used here
    assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 15


def test_equal_seed_and_position_give_the_same_token_in_any_batch():  # O24
    rng = np.random.default_rng(9)
    row = rng.normal(0, 1, 500).astype(np.float32)
    mine = {"temperature": 0.8, "top_p": 0.95, "seed": 42, "sample_positions": 17}
    alone = token_ids(row[None], **mine)[0]
    for num_rows in (2, 5, 32):
        for place in {0, num_rows // 2, num_rows - 1}:
            others = {
                "temperature": rng.choice([0.0, 0.5, 1.7], num_rows),
                "top_p": rng.choice([0.3, 1.0], num_rows),
                "seed": rng.integers(0, 2**32, num_rows, dtype=np.uint32),
                "sample_positions": rng.integers(0, 2000, num_rows),
            }
            for name, value in mine.items():
                others[name][place] = value
            logits = rng.normal(0, 1, (num_rows, 500)).astype(np.float32)
            logits[place] = row
            top_k = rng.choice([0, 3], num_rows)
            top_k[place] = 0
            assert token_ids(logits, top_k=top_k, **others)[place] == alone


def test_truncation_that_only_neighbours_ask_for_changes_nothing():  # O24
    row = np.random.default_rng(2).normal(0, 1, 700).astype(np.float32)
    logits = np.tile(row, (2, 1))
    for seed in range(50):
        mine = {"temperature": 1.0, "seed": seed}
        alone = token_ids(logits, **mine)[0]
        assert token_ids(logits, top_k=[0, 2], min_p=[0, 0.5], **mine)[0] == alone


def test_other_positions_and_other_seeds_draw_other_tokens():
    logits = np.zeros((100, 1000), np.float32)
    by_position = token_ids(logits, temperature=1.0, seed=1, sample_positions=np.arange(100))
    by_seed = token_ids(logits, temperature=1.0, seed=np.arange(100), sample_positions=1)
    assert len(set(by_position)) > 80
    assert len(set(by_seed)) > 80
    assert (by_position != by_seed).any()


def test_greedy_rows_beside_random_ones_stay_greedy():
    logits = np.random.default_rng(4).normal(0, 1, (16, 90)).astype(np.float32)
    temperature = np.where(np.arange(16) % 2, 2.0, 0.0)
    ids = token_ids(logits, temperature=temperature)
    np.testing.assert_array_equal(ids[::2], logits[::2].argmax(axis=1))
    assert (ids[1::2] != logits[1::2].argmax(axis=1)).any()


def test_greedy_ties_pick_the_first_index():
    logits = np.zeros((3, 700), np.float32)
    logits[1, [300, 301, 699]] = 2.5
    logits[2, 1:] = -np.inf
    np.testing.assert_array_equal(argmax_jit(logits)[0], [0, 300, 0])
    np.testing.assert_array_equal(token_ids(logits), [0, 300, 0])


@pytest.mark.parametrize("bad", [-np.inf, np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_best_logit_is_no_number_gives_no_token_and_hurts_no_other(bad, temperature):
    logits = np.random.default_rng(6).normal(0, 1, (4, 300)).astype(np.float32)
    logits[1] = bad
    logits[2, 5] = bad
    for settings in ({}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}):
        ids = token_ids(logits, temperature=temperature, **settings)
        assert ids[1] == BAD_TOKEN
        assert (ids[2] == BAD_TOKEN) == (bad != -np.inf), "one token may be impossible"
        assert ((ids[[0, 3]] >= 0) & (ids[[0, 3]] < 300)).all()
        others = token_ids(logits[[0, 3]], temperature=temperature, seed=[0, 3], **settings)
        np.testing.assert_array_equal(ids[[0, 3]], others)


def test_logprobs_are_the_log_softmax_of_the_raw_logits():
    logits = np.random.default_rng(8).normal(0, 5, (6, 200)).astype(np.float32)
    temperature = np.array([0, 0, 1, 1, 50, 50], np.float32)
    out = sample_jit(logits, batch(6, temperature=temperature, top_k=3, logprobs=True))
    expected = np.log(softmax(logits))
    np.testing.assert_allclose(
        out.of_tokens.logprobs, expected[np.arange(6), np.asarray(out.token_ids)], atol=2e-5
    )
    order = np.argsort(-logits, axis=1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(out.of_tokens.top_ids, order)
    np.testing.assert_allclose(
        out.of_tokens.top_logprobs, np.take_along_axis(expected, order, axis=1), atol=2e-5
    )


def test_a_vocabulary_smaller_than_the_alternatives_returns_all_of_it():
    out = sample_jit(np.zeros((1, 5), np.float32), batch(1, logprobs=True))
    assert out.of_tokens.top_ids.shape == (1, 5)
    np.testing.assert_allclose(out.of_tokens.top_logprobs, np.log(0.2), atol=1e-6)


def test_log_probabilities_are_left_out_where_no_row_asks():
    out = sample_jit(np.ones((2, 50), np.float32), batch(2))
    assert not np.asarray(out.of_tokens.top_ids).any()
    assert not np.asarray(out.of_tokens.logprobs).any()


def test_a_draw_never_returns_an_id_of_no_weight():
    """Whatever a uniform number near 1 does to running sums in float32."""
    x = np.full((NUM_DRAWS, MANY_IDS), -np.inf, np.float32)
    x[:, [3, 255, 256, 511]] = [0.0, -1e-3, -20.0, -0.5]
    seeds = np.arange(NUM_DRAWS, dtype=np.uint32)
    ids = draw_jit(x, seeds, jnp.zeros(NUM_DRAWS, jnp.int32))
    assert set(np.asarray(ids).tolist()) <= {3, 255, 256, 511}


def test_greedy_rows_never_sort_the_vocabulary():
    logits = np.zeros((2, 500), np.float32)
    text = _sample_jit.lower(logits, batch(2), no_edits(2, 500)).as_text()
    assert "stablehlo.sort" not in text
