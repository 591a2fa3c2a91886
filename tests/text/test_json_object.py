"""Following JSON character by character agrees with the standard library's parser."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jserve.text.json_object import CallObject, JsonObject, is_object

FIXED = settings(deadline=None, derandomize=True, max_examples=300)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def refuse(constant):
    raise ValueError(constant)  # NaN and Infinity, which are no JSON


def is_object_to_python(text):
    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return False


@FIXED
@given(VALUES, st.sampled_from([None, 2]), st.booleans())
def test_every_written_object_is_one_and_nothing_else_is(value, indent, ascii):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assert is_object(text) == isinstance(value, dict)


@FIXED
@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), st.data())
def test_a_damaged_object_is_one_only_where_python_reads_it(value, data):
    text = json.dumps(value, indent=data.draw(st.sampled_from([None, 1])))
    at = data.draw(st.integers(0, len(text)))
    cut = data.draw(st.integers(0, 2))
    damage = data.draw(st.text(alphabet='{}[]",:\\u0123-+.eEtrufalsn \n\x01', max_size=3))
    text = text[:at] + damage + text[at + cut :]
    assert is_object(text) == is_object_to_python(text)


@FIXED
@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=3))
def test_an_object_is_done_with_its_last_brace_and_not_before(value):
    scan = JsonObject()
    text = json.dumps(value)
    done = [scan.feed(char) and scan.done for char in text]
    assert done == [False] * (len(text) - 1) + [True]
    assert scan.feed("\n")
    assert not scan.feed("{")


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": {"name": "g"}}}', "f", '{"a": {"name": "g"}}'),
        ('{"type": "function", "parameters": { } , "name":"f"}', "f", "{ }"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}", "id": {"x": []}}', "f", '{"a": 1}'),
        ('{"name": "f", "arguments": {}, "parameters": {"a": 1}}', "f", "{}"),
        ('{"n\\u0061me": "\\u0066"}', "f", ""),
    ],
)
def test_a_call_has_its_name_and_the_arguments_as_written(text, name, arguments):
    call = CallObject(["f"])
    assert all(map(call.feed, text))
    assert (call.done, call.name, call.take()) == (True, name, arguments)
    assert call.take() == ""


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "g',
        '{"name": {"f": 1}}',
        '{"name": "f", "arguments": [',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": "none"}',
        '{"arguments": {}}',
        '{"answer": ',
        '["f"]',
    ],
)
def test_what_cannot_be_a_call_of_a_known_function_is_refused(text):
    call = CallObject(["f"])
    assert not all(map(call.feed, text + '"'))
