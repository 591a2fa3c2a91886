"""Masks of allowed tokens against the rules read token by token, alone and beside a grammar.

Rows of public fault reports: O13, O16 (min_tokens over every stop id).
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from jserve.engine.constraint import Constraint, num_mask_words
from jserve.structured import GrammarKind, StructuredOutput
from jserve.text.grammar import GrammarCompiler
from tests.engine.tiny import byte_tokenizer

V = 75  # not a multiple of 32


def allowed_by(
    constraint: Constraint, output: list[int], vocab_size: int = V
) -> tuple[set[int], str]:
    words = np.full(num_mask_words(vocab_size), 0xDEADBEEF, np.uint32)  # whatever was there
    problem = constraint.fill(words, output, len(output))
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any(), "what is no token is not allowed"
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


def test_o13_no_stop_id_comes_before_the_minimum_and_each_may_after():
    constraint = Constraint(V, min_tokens=8, stop_token_ids=(2, V - 1))
    for num_output in range(10):
        found, _ = allowed_by(constraint, [5] * num_output)
        assert {2, V - 1} & found == ({2, V - 1} if num_output >= 8 else set())
        assert len(found) == (V if num_output >= 8 else V - 2)


def test_overlapping_bad_words_are_each_found_at_their_ends():
    constraint = Constraint(V, bad_word_ids=[(1, 2), (1, 2, 1), (2, 1, 2), (2, 2, 2), (9,)])
    everything = set(range(V)) - {9}
    assert allowed_by(constraint, [])[0] == everything
    assert allowed_by(constraint, [1])[0] == everything - {2}
    assert allowed_by(constraint, [1, 2])[0] == everything - {1}
    assert allowed_by(constraint, [2, 1])[0] == everything - {2}
    assert allowed_by(constraint, [2, 2])[0] == everything - {2}
    assert allowed_by(constraint, [2, 5, 2])[0] == everything


def test_settings_that_leave_nothing_are_told_and_not_passed_on():
    constraint = Constraint(V, allowed_token_ids=[3], min_tokens=2, stop_token_ids=[3])
    assert allowed_by(constraint, [1]) == (
        set(),
        "the request's settings together allow no token here",
    )
    assert allowed_by(constraint, [1, 1]) == ({3}, "")


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    """Of bytes: a token is a byte, and 256 ends an output."""
    return GrammarCompiler(byte_tokenizer(), 260, [256])


@pytest.mark.parametrize("bad_words", [[], ["b"], ["ab", "ba", "cc"], ["abc", "a", "cb"]])
@pytest.mark.parametrize("min_tokens", [0, 4])
def test_a_grammar_loses_only_what_the_other_settings_take(grammars, bad_words, min_tokens):
    """Walks every output of a small language, and asks Python's own regular expressions."""
    words = [tuple(word.encode()) for word in bad_words]
    spec = StructuredOutput(GrammarKind.REGEX, "[abc]{2,4}")
    allowed = [*b"abc", 256]

    def goes_on(output: list[int]) -> set[int]:
        can_follow = set(b"abc") if len(output) < 4 else set()
        if re.fullmatch(rb"[abc]{2,4}", bytes(output)) and len(output) >= min_tokens:
            can_follow.add(256)
        return {
            token_id
            for token_id in can_follow
            if not any((*output, token_id)[-len(word) :] == word for word in words)
        }

    def walk(output: list[int]) -> int:
        constraint = Constraint(
            260,
            allowed_token_ids=allowed,
            bad_word_ids=words,
            min_tokens=min_tokens,
            stop_token_ids=[256],
            matcher=grammars.compile(spec).matcher(),
        )
        for token_id in output:
            constraint.accept(token_id)
        if constraint.is_complete:
            return 1
        found, problem = allowed_by(constraint, output, 260)
        assert found == goes_on(output)
        assert bool(problem) == (not found)
        return 1 + sum(walk([*output, token_id]) for token_id in found - {256})

    assert walk([]) > 3


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
