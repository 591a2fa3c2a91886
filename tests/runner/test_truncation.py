"""What a row's best blocks tell of its truncation and of its best tokens, against numpy's sorts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from jserve.runner.sampling import sample
from jserve.runner.truncation import best_blocks, best_tokens, least_kept
from scheduler.packer import Wants
from tests.runner.sampling_reference import Row, kept, pack

V = 20_000
best_blocks_jit, least_kept_jit = jax.jit(best_blocks), jax.jit(least_kept)
processed_jit = jax.jit(partial(sample, processed_logprobs=True))


def rows_of_all_kinds(rng: np.random.Generator) -> np.ndarray:
    """Returns f32[8, V]: flat, peaked, with equal values, with holes, all equal, one possible."""
    x = rng.normal(0, 1, (8, V)) * np.array([0.1, 3, 6, 12, 3, 3, 0, 3])[:, None]
    x[4] = np.round(x[4]) + 0.0
    x[5, rng.random(V) < 0.999] = -np.inf
    x[7, np.arange(V) != 1234] = -np.inf
    return x.astype(np.float32)


def test_a_set_that_lies_above_all_other_blocks_is_that_of_the_whole_row():
    rng = np.random.default_rng(3)
    num_told = np.zeros(8, int)  # how often each kind of row was
    for top_k, top_p, min_p in [
        *((1, 1.0, 0.0), (64, 0.9537, 0.0), (700, 1.0, 0.0), (5000, 0.5071, 0.0)),
        *((0, 0.9537, 0.0), (0, 0.5071, 0.0213), (0, 1.0, 0.0513), (0, 1.0, 0.0)),
    ]:
        logits = rows_of_all_kinds(rng)
        x = logits - logits.max(axis=1, keepdims=True)
        near = best_blocks_jit(x)
        total = np.exp(x.astype(np.float64)).sum(axis=1).astype(np.float32)
        settings = (np.full(8, v, d) for v, d in ((top_k, "i4"), (top_p, "f4"), (min_p, "f4")))
        k_least, least = least_kept_jit(near.values, *settings, near.others, total)
        is_told = np.asarray(np.where(top_k > 0, k_least, least) > near.others)
        num_told += is_told
        for row in np.flatnonzero(is_told):
            expected = kept(x[row], top_k, top_p, min_p) & np.isfinite(x[row])
            found = np.asarray(near.ids[row])[np.asarray(near.values[row]) >= least[row]]
            np.testing.assert_array_equal(found, np.flatnonzero(expected))
    assert (num_told > [-1, 2, 2, 2, 2, 7, -1, 7]).all(), num_told
    assert (num_told < [8, 8, 8, 8, 8, 9, 1, 9]).all(), num_told


def test_the_best_blocks_hold_their_tokens_in_order_and_nothing_else_is_larger():
    logits = rows_of_all_kinds(np.random.default_rng(4))
    near = jax.tree.map(np.asarray, best_blocks_jit(logits))
    for x, values, ids, others in zip(logits, *near, strict=True):
        real = ids < V
        assert (np.diff(ids[real]) > 0).all()
        np.testing.assert_array_equal(values[real], x[ids[real]])
        assert (values[~real] == -np.inf).all()
        assert others == np.delete(x, ids[real]).max()


@pytest.mark.parametrize("V", [20, 300, 2_561, 49_152])
def test_the_best_tokens_are_those_of_a_stable_sort(V):
    rng = np.random.default_rng(V)
    x = np.stack([rng.normal(0, 3, V), np.round(rng.normal(0, 1, V)) + 0.0, np.zeros(V)])
    x = np.concatenate([x, np.where(rng.random((2, V)) < 0.999, -np.inf, x[:2])]).astype("f4")
    top, ids = jax.jit(best_tokens, static_argnums=1)(x, 20)
    expected = np.argsort(-x, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(top, np.take_along_axis(x, expected, axis=1))


def test_a_row_that_its_best_blocks_decide_is_the_same_beside_rows_that_need_all():
    rng = np.random.default_rng(6)
    logits = rows_of_all_kinds(rng)
    cut = {"temperature": 0.75, "top_k": 64, "top_p": 0.9537}
    mine = [Row(row, seed=i, **cut) for i, row in enumerate(logits)]
    others = [Row(logits[0], temperature=1.0, top_p=0.9537, seed=i) for i in range(2)]
    others += [replace(others[0], top_p=1.0), replace(others[0], temperature=0.0)]
    together = jax.tree.map(np.asarray, processed_jit(*pack([*mine, *others], Wants.LOGPROBS)))
    for i, row in enumerate(mine):
        alone = jax.tree.map(np.asarray, processed_jit(*pack([row], Wants.LOGPROBS)))
        for both, own in zip(*map(jax.tree.leaves, (together, alone)), strict=True):
            np.testing.assert_array_equal(both[i], own[0])
