"""Reasoning is split off where it begins the output, whatever way the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jserve.text.reasoning import ReasoningSplitter, starts_inside

THINK = ("<think>", "</think>")
FIXED = settings(deadline=None, derandomize=True, max_examples=300)


def split(pieces, inside=False):
    splitter = ReasoningSplitter(*THINK, inside)
    parts = [*map(splitter.feed, pieces), splitter.finish()]
    return "".join(reasoning for reasoning, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "answer"),
    [
        ("<think>\nSo.\n\nYes.\n</think>\n\nIt is.\n", False, "So.\n\nYes.", "It is.\n"),
        (" \n<think>So</think>It is", False, "So", "It is"),
        ("<think>\n\n</think>\n\nIt is", False, "", "It is"),
        ("\nSo.\n</think>\n\nIt is", True, "So.", "It is"),
        ("<think>in", True, "<think>in", ""),
        ("<think>never ends </thin", False, "never ends </thin", ""),
        ("It is <think>no</think>", False, "", "It is <think>no</think>"),
        ("\n It is", False, "", "\n It is"),
        ("<thin", False, "", "<thin"),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("<think>a </think </think>b", False, "a </think ", "b"),
        ("", False, "", ""),
    ],
)
def test_reasoning_and_answer_by_hand(text, inside, reasoning, answer):
    assert split([text], inside) == (reasoning, answer)
    assert split(text, inside) == (reasoning, answer)


@FIXED
@given(
    st.lists(st.sampled_from([*THINK, "\n", "\n\n", " ", "a", "<", "</", "<think", "think>"])),
    st.lists(st.integers(1, 9)),
    st.booleans(),
)
def test_however_the_text_is_cut_the_parts_are_the_same(words, sizes, inside):
    text = "".join(words)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    whole = split([text], inside)
    assert split([*pieces, text[at:]], inside) == whole
    assert split(text, inside) == whole


def test_text_is_given_out_at_once_where_it_can_be_no_marker():
    splitter = ReasoningSplitter(*THINK)
    assert splitter.feed("<think>\nSo be") == ("So be", "")
    assert splitter.feed(" it\n</th") == (" it", "")
    assert splitter.feed("ink>\nYes\n") == ("", "Yes\n")


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<s> hello<think>", True),
        ("<s> hello<think>\n", True),
        ("<s> hello", False),
        ("<think> hello", False),
        ("<think>\n\n</think>\n\n", False),
    ],
)
def test_a_prompt_that_ends_with_the_marker_starts_inside(spm, prompt, inside):
    ids = spm.encode("x" * 50 + prompt)
    assert starts_inside(spm, ids, THINK) == inside
    assert not starts_inside(spm, ids, None)
