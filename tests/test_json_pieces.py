"""Long JSON in pieces: the same values and errors as the standard library's, and others get to run
meanwhile."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jserve import json_pieces
from jserve.json_pieces import chunks_of, loads_in_pieces
from jserve.server.http_errors import json_bytes

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.lists(st.integers()) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
BROKEN = (
    *("[1,]", "[1, ]", "[ ,1]", "[,1]", "[1,,2]", "[1, ,2]", "[01,2]", "[1,-,2]", "[1 2]", "[1,2"),
    *("[1,2}", "[1,2]]", "", "{", '{"a":[1,2,}', "[1,\u00a02]", '[1,"a]'),
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(json_pieces, "_CHUNK_CHARS", 7)


@settings(max_examples=50, deadline=None)
@given(VALUES, st.sampled_from([None, 1]))
def test_values_are_read_as_by_the_standard_library(value, indent):
    text = json.dumps(value, indent=indent)
    assert repr(loads_in_pieces(text)) == repr(json.loads(text))


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_no_json_is_refused(text):
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    with pytest.raises(json.JSONDecodeError):
        loads_in_pieces(text)


def test_an_error_far_inside_is_told_with_its_place():
    with pytest.raises(json.JSONDecodeError, match="char 302") as caught:
        loads_in_pieces("[" + "1, " * 100 + "1x2]")
    assert caught.value.pos == 302


def test_hooks_see_each_number_and_constant():
    text = "[1, 2.5, [3.5, NaN]]"
    found = loads_in_pieces(text, parse_float=str, parse_constant=str.lower)
    assert found == [1, "2.5", ["3.5", "nan"]]


@settings(max_examples=25, deadline=None)
@given(VALUES)
def test_values_are_written_as_in_one_piece(value):
    assert b"".join(chunks_of(value)) == json_bytes(value)


def test_half_a_surrogate_pair_is_written_as_an_escape():
    value = ["é", "\ud800", {"\udfff": []}]
    text = b"".join(chunks_of(value))
    assert text == json_bytes(value) == '["é","\\ud800",{"\\udfff":[]}]'.encode()
    assert json.loads(text) == value
