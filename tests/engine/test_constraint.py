"""Masks of allowed tokens against the rules read token by token."""

from __future__ import annotations

import numpy as np
import pytest

from jserve.engine.constraint import Constraint, num_mask_words

V = 75  # not a multiple of 32


def allowed_by(constraint: Constraint, output: list[int]) -> tuple[set[int], str]:
    words = np.zeros(num_mask_words(V), np.uint32)
    problem = constraint.fill(words, output, len(output))
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not bits[V:].any(), "what is no token is not allowed"
    return set(np.flatnonzero(bits).tolist()), problem


def expected(output, allowed, bad, min_tokens, stops) -> set[int]:
    found = set(range(V)) if allowed is None else set(allowed)
    if len(output) < min_tokens:
        found -= set(stops)
    for token_id in list(found):
        text = [*output, token_id]
        if any(text[-len(word) :] == list(word) for word in bad):
            found.discard(token_id)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_masks_are_what_the_rules_say_token_by_token(seed):
    rng = np.random.default_rng(seed)
    ids = lambda n: tuple(rng.integers(0, 6, n).tolist())  # noqa: E731  few, so that they meet
    allowed = None if seed % 3 else tuple(rng.choice(V, 30, replace=False).tolist())
    bad = [ids(rng.integers(1, 4)) for _ in range(rng.integers(0, 6))]
    min_tokens, stops = int(rng.integers(0, 5)), ids(2)
    constraint = Constraint(
        V,
        allowed_token_ids=allowed,
        bad_word_ids=bad,
        min_tokens=min_tokens,
        stop_token_ids=stops,
    )
    for length in range(9):
        output = list(ids(length))
        found, problem = allowed_by(constraint, output)
        assert found == expected(output, allowed, bad, min_tokens, stops)
        assert bool(problem) == (not found)


class Library:
    """A matcher that breaks."""

    is_finished, error = False, None

    def __init__(self, breaks_in: str) -> None:
        self.breaks_in = breaks_in

    def fill(self, words) -> bool:
        if self.breaks_in == "fill":
            raise ValueError("out of fuel")
        words.fill(0xFFFFFFFF)
        return True

    def accept(self, token_id: int) -> bool:
        if self.breaks_in == "accept":
            raise ValueError("out of fuel")
        return self.breaks_in != "refuses"


@pytest.mark.parametrize(
    ("breaks_in", "why"),
    [("fill", "out of fuel"), ("accept", "out of fuel"), ("refuses", "does not take token 5")],
)
def test_a_grammar_that_fails_ends_its_output_with_a_reason(breaks_in, why):
    constraint = Constraint(V, matcher=Library(breaks_in))
    if breaks_in != "fill":
        assert allowed_by(constraint, [])[1] == ""
    constraint.accept(5)
    words = np.zeros(num_mask_words(V), np.uint32)
    assert why in constraint.fill(words, [5], 1)
