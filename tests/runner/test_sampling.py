"""Parts of the sampler by themselves: truncation of wide rows, seeds, ties, what is left out.

Rows of public fault reports: O24 (seeds and neighbours), O27 (unset top_k), O29 (tiny temperature),
O30 (biases at the ends of the vocabulary).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.runner.sampling import above, argmax, draw, sample
from jserve.runner.truncation import least_kept
from scheduler.packer import MAX_LOGIT_BIAS, Wants
from tests.runner.sampling_reference import Row, kept, pack

sample_jit = jax.jit(sample)
truncate_jit = jax.jit(lambda x, *cuts: above(x, least_kept(x, *cuts)[1]))
draw_jit = jax.jit(draw)
argmax_jit = jax.jit(argmax)


def token_ids(rows: list[Row]) -> list[int]:
    return np.asarray(sample_jit(*pack(rows)).token_ids).tolist()


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def shifted(rng: np.random.Generator, rows: int, V: int, ties: bool) -> np.ndarray:
    x = rng.normal(0, 3, (rows, V))
    x = np.round(x * 2) / 2 if ties else x
    return (x - x.max(axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("V", [5, 600, 20_000])
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
    rows = [Row(x[0], temperature=5.0, top_k=3, top_p=0.99, seed=i) for i in range(64)]
    assert set(token_ids(rows)) == {0, 2}


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30, 1e-45])
def test_o29_a_tiny_temperature_is_greedy_and_no_nan(temperature):
    logits = np.random.default_rng(3).permutation(np.linspace(-8, 8, 300, dtype=np.float32))
    assert np.float32(temperature) > 0
    bias = dict.fromkeys(range(0, 300, 3), -100.0)
    biased = logits.copy()
    biased[::3] -= 100
    others = [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.5}, {}]
    rows = [Row(logits, temperature=temperature, bias=bias, **settings) for settings in others]
    drawn = jax.tree.map(np.asarray, sample_jit(*pack(rows, Wants.LOGPROBS)))
    assert set(drawn.token_ids.tolist()) == {int(biased.argmax())}
    assert all(np.isfinite(array).all() for array in jax.tree.leaves(drawn))


def test_a_temperature_too_small_to_divide_by_is_greedy_among_equals_too():
    logits = np.zeros(300, np.float32)
    logits[[20, 270]] = 1e-7
    assert token_ids([Row(logits, temperature=9e-6, seed=i) for i in range(8)]) == [20] * 8
    assert len(set(token_ids([Row(logits, temperature=1.1e-5, seed=i) for i in range(8)]))) > 1


def test_o27_an_unset_top_k_with_a_temperature_is_not_greedy():
    flat, peaked = np.zeros(40, np.float32), normal(0, 40)
    for top_k in (0, 1000):
        rows = [Row(flat, temperature=1.5, top_k=top_k, seed=i) for i in range(50)]
        assert len(set(token_ids(rows))) > 10
    rows = [Row(peaked, temperature=1.5, top_k=1, seed=i) for i in range(50)]
    assert set(token_ids(rows)) == {int(peaked.argmax())}


def test_o30_a_bias_moves_only_its_token_at_both_ends_of_the_vocabulary():
    """And a row with as many entries as there may be is no different from one with few."""
    logits = normal(1, 2000)
    many = {i: 0.0 for i in range(1, MAX_LOGIT_BIAS)} | {1999: 100.0}
    rows = [Row(logits), Row(logits, bias={0: 100.0}), Row(logits, bias={1999: 100.0})]
    rows += [Row(logits, bias=many), Row(logits, bias={int(logits.argmax()): -100.0})]
    second = int(np.argsort(-logits)[1])
    assert token_ids(rows) == [int(logits.argmax()), 0, 1999, 1999, second]


def test_o24_equal_seed_and_position_give_the_same_token_in_batches_of_any_size():
    rng = np.random.default_rng(9)
    mine = Row(normal(9, 500), temperature=0.8, top_p=0.95, seed=42, position=17)
    (alone,) = token_ids([mine])
    for num_rows in (2, 5, 32):
        for place in (0, num_rows // 2, num_rows - 1):
            rows = [
                Row(
                    normal(i, 500),
                    temperature=rng.choice([0.0, 0.5, 1.7]),
                    top_k=rng.choice([0, 3]),
                    seed=rng.integers(2**32),
                    position=rng.integers(2000),
                )
                for i in range(num_rows)
            ]
            rows[place] = mine
            assert token_ids(rows)[place] == alone


def test_o24_truncation_that_only_neighbours_ask_for_changes_nothing():
    logits = normal(2, 700)
    cut = Row(logits, temperature=1.0, top_k=2, min_p=0.5)
    for seed in range(50):
        mine = Row(logits, temperature=1.0, seed=seed)
        assert token_ids([mine, mine])[0] == token_ids([mine, cut])[0]


def test_other_positions_and_other_seeds_draw_other_tokens():
    flat = np.zeros(1000, np.float32)
    by_position = token_ids([Row(flat, temperature=1.0, seed=1, position=i) for i in range(100)])
    by_seed = token_ids([Row(flat, temperature=1.0, seed=i, position=1) for i in range(100)])
    assert len(set(by_position)) > 80
    assert len(set(by_seed)) > 80
    assert by_position != by_seed


def test_greedy_ties_pick_the_first_index():
    logits = np.zeros((3, 700), np.float32)
    logits[1, [300, 301, 699]] = 2.5
    logits[2, 1:] = -np.inf
    np.testing.assert_array_equal(argmax_jit(logits)[0], [0, 300, 0])
    assert token_ids([Row(row) for row in logits]) == [0, 300, 0]


def test_a_vocabulary_smaller_than_the_alternatives_returns_all_of_it():
    out = sample_jit(*pack([Row(np.zeros(5, np.float32))], Wants.LOGPROBS))
    assert out.of_tokens.top_ids.shape == (1, 5)
    np.testing.assert_allclose(out.of_tokens.top_logprobs, np.log(0.2), atol=1e-6)


def test_log_probabilities_are_left_out_where_no_row_asks():
    out = sample_jit(*pack([Row(np.ones(50, np.float32))] * 2))
    assert not np.asarray(out.of_tokens.top_ids).any()
    assert not np.asarray(out.of_tokens.logprobs).any()


def test_a_draw_never_returns_an_id_of_no_weight():
    """Whatever a uniform number near 1 does to running sums in float32."""
    num_draws = 4096
    x = np.full((num_draws, 600), -np.inf, np.float32)
    x[:, [3, 255, 256, 511]] = [0.0, -1e-3, -20.0, -0.5]
    seeds = np.arange(num_draws, dtype=np.uint32)
    ids = draw_jit(x, seeds, jnp.zeros(num_draws, jnp.int32))
    assert set(np.asarray(ids).tolist()) <= {3, 255, 256, 511}


def test_the_sampler_never_sorts_the_vocabulary():
    text = sample_jit.lower(*pack([Row(normal(0, 500))] * 2)).as_text()
    assert "stablehlo.sort" not in text


def test_greedy_and_random_batches_run_through_one_conditional():
    """On a GPU the host waits for the predicate of each."""
    jaxpr = jax.make_jaxpr(sample)(*pack([Row(normal(0, 500))] * 2))
    (switch,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond")
    greedy, random, _ = switch.params["branches"]

    def num_conditionals(branch) -> int:
        found = (eqn.params for eqn in branch.eqns if eqn.primitive.name == "cond")
        # What depends on the platform is decided when the program is compiled.
        return sum(params.get("branches_platforms") is None for params in found)

    assert num_conditionals(greedy) == 0
    assert num_conditionals(random) == 0
