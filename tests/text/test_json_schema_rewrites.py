"""Keywords that are written in others: what fits the result fits the schema, by a public suite's
own values, by `jsonschema_rs` on random schemas, and by hand."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from jserve.errors import InvalidRequest
from jserve.structured import StructuredOutput
from jserve.text.grammar_source import grammar_source
from jserve.text.json_schema_rules import check_schema

BYTES = LLTokenizer("byte")
DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
}


def compiled(schema: dict) -> LLMatcher | None:
    try:
        source = grammar_source(StructuredOutput.of_json_schema(json.dumps(schema)), None)
    except InvalidRequest:
        return None
    matcher = LLMatcher(BYTES, source, log_level=0)
    return None if matcher.is_error() else matcher


def accepts(matcher: LLMatcher, value: Any) -> bool:
    """Whether the grammar takes a value, its members in whatever order."""
    values = [value]
    if isinstance(value, dict) and len(value) < 5:
        values = [dict(items) for items in itertools.permutations(value.items())]
    for written in values:
        place = matcher.deep_copy()
        tokens = BYTES.tokenize_str(json.dumps(written, ensure_ascii=False))
        if place.try_consume_tokens(tokens) == len(tokens) and place.is_accepting():
            return True
    return False


# What the grammars do not tell: whether a year has a 29 February and a minute a leap second, that
# U+FEFF is a space, and what is encoded in a text.
NOT_TOLD = {"date-time", "date", "time", "ecmascript-regex", "content"}


def test_no_value_that_a_public_suite_calls_invalid_fits(json_schema_suite):
    distinct, passed, failed = set(), 0, 0
    for description, drafts, schema, valid, invalid in json_schema_suite:
        if (matcher := compiled({"$schema": DRAFTS[drafts[0]]} | schema)) is None:
            continue
        distinct.add(json.dumps(schema))
        fits = [value for value in invalid if accepts(matcher, value)]
        assert fits == [] or description.partition(":")[0] in NOT_TOLD, f"{description}: {fits}"
        passed += sum(accepts(matcher, value) for value in valid)
        failed += len(valid)
    print(f"{len(distinct)} schemas, {passed} of {failed} valid values fit")
    assert len(distinct) >= 360
    assert passed > 0.96 * failed  # not 1.0 for 1, for one


CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
DOG = {
    "type": "object",
    "properties": {"kind": {"const": "dog"}, "name": {"type": "string", "pattern": "^[A-Z]"}},
    "required": ["kind", "name"],
}
PETS = {
    "$defs": {"Cat": CAT, "Dog": DOG},
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "discriminator": {"propertyName": "kind"},
}
STREET = {"type": "object", "properties": {"country": {"enum": ["US", "NL"]}}}
ADDRESS = STREET | {
    "if": {"properties": {"country": {"const": "US"}}, "required": ["country"]},
    "then": {"properties": {"code": {"pattern": "^[0-9]{5}$"}}, "required": ["code"]},
    "else": {"properties": {"code": {"pattern": "^[A-Z]{2}$"}}},
}
BASE = {"$defs": {"base": {"properties": {"a": {"type": "integer"}}}}, "type": "object"}
INTO_A_BRANCH = {"$ref": "#/properties/b/oneOf/0"}
CASES: dict[str, tuple[dict, list, list]] = {
    "a union of models told apart by a constant": (
        PETS,
        [{"kind": "cat"}, {"kind": "dog", "name": "Rex"}],
        [{"kind": "cow"}, {"kind": "dog"}, {"kind": "dog", "name": "rex"}, {}],
    ),
    "one of two names": (
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}, {"a": 1, "c": 2}],
        [{}, {"a": 1, "b": 1}],
    ),
    "closed objects": (
        {
            "oneOf": [
                {"type": "object", "properties": {n: {}}, "required": [n]}
                | {"additionalProperties": False}
                for n in "ab"
            ]
        },
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "a $ref into a branch": (
        {"oneOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/oneOf/0"}}]},
        ["a", ["a"], []],
        [1, [1], [["a"]]],
    ),
    "a $ref into a branch, by an exclusive bound": (
        {
            "properties": {
                "a": {"type": "number", "exclusiveMinimum": 2, "maximum": 2.5},
                "b": {"oneOf": [{"type": "null"}, {"type": "array"} | {"items": INTO_A_BRANCH}]},
            }
        },
        [{"a": 2.1}, {"a": 2.1, "b": [None]}],
        [{"a": 2}, {"a": 2.1, "b": [1]}],
    ),
    "a condition": (
        ADDRESS,
        [{"country": "US", "code": "12345"}, {"country": "NL", "code": "AB"}, {"country": "NL"}],
        [{"country": "US", "code": "AB"}, {"country": "NL", "code": "12345"}, {"country": "US"}],
    ),
    "not some texts": (
        {"type": "string", "not": {"enum": ["a", "", "ab", "é\n"]}},
        ["b", "abc", "é", "aa", "\n"],
        ["a", "", "ab", "é\n", 1],
    ),
    "not a name": ({"not": {"required": ["a"]}}, [{"b": 1}], [{"a": 1}]),
    "names by a pattern": (
        {
            "propertyNames": {"pattern": "^a.?$"},
            "additionalProperties": {"type": "null"},
        },
        [{"a": None}, {"ab": None}, {}],
        [{"b": None}, {"abc": None}, {"a": 1}],
    ),
    "names of a list": (
        {"$defs": {"e": {"enum": ["x", "y"]}}, "propertyNames": {"$ref": "#/$defs/e"}},
        [{"x": 1}, {"x": 1, "y": 2}],
        [{"z": 1}],
    ),
    "names of a length as JavaScript writes it": (
        {"type": "object", "propertyNames": {"minLength": 1.0, "maxLength": 3.0}},
        [{"a": 1, "abc": 1}, {}],
        [{"abcd": 1}, {"": 1}],
    ),
    "not some values that hold quotes in lists": (
        {"oneOf": [{"const": [1.0, '"']}, {"const": [1, "\\"]}, {"const": [True, '"']}]},
        [[1, '"'], [1, "\\"], [True, '"']],
        [1],
    ),
    "names that need others": (
        {"dependentRequired": {"a": ["b"]}, "dependentSchemas": {"c": {"maxProperties": 1}}},
        [{"b": 1}, {"a": 1, "b": 1}, {"c": 1}, 3],
        [{"a": 1}, {"c": 1, "b": 2}],
    ),
    "nothing unevaluated": (
        BASE
        | {"allOf": [{"$ref": "#/$defs/base"}], "properties": {"b": {}}}
        | {"unevaluatedProperties": False},
        [{"a": 1}, {"b": 1, "a": 2}, {}],
        [{"a": "x"}, {"c": 1}],
    ),
    "counts as JavaScript writes them": ({"type": "array", "maxItems": 1.0}, [[1]], [[1, 2]]),
    "sets of one": ({"type": "array", "maxItems": 1, "uniqueItems": True}, [[1]], [[1, 1]]),
    "an exclusive bound next to another": (
        {"type": "number", "exclusiveMinimum": 2, "maximum": 2.5},
        [2.5, 2.1],
        [2, 2.0, 3],
    ),
    "an exclusive bound above a fraction": (
        {"type": "number", "minimum": -1.5, "exclusiveMaximum": -1},
        [-1.5, -1.25],
        [-1, -2],
    ),
}


@pytest.mark.parametrize(("schema", "fit", "do_not"), CASES.values(), ids=CASES)
def test_what_fits_by_hand(schema, fit, do_not):
    matcher = compiled(schema)
    assert matcher is not None
    assert [value for value in fit if not accepts(matcher, value)] == []
    assert [value for value in do_not if accepts(matcher, value)] == []


INTS, TEXTS = ({"type": "array", "items": {"type": name}} for name in ("integer", "string"))
REFUSED: dict[str, tuple[dict, str]] = {
    "not a text with a backslash": ({"type": "string", "not": {"const": "a\\b"}}, "'not'"),
    "not a text with a quote": ({"type": "string", "not": {"enum": ["a", '"']}}, "'not'"),
    "not a number that doubles do not tell": ({"not": {"const": 2**53 + 1}}, "'not'"),
    "not above such a number": ({"not": {"minimum": 2**53 + 1}}, "'not'"),
    "lists whose negation leaves no list": ({"oneOf": [INTS, TEXTS, {"type": "null"}]}, "oneOf"),
    "no list left beside oneOf": (
        {"type": "array", "oneOf": [{"maxItems": 1}, {"type": "null"}, {"maxItems": 1}]},
        "oneOf",
    ),
    "lists whose negation leaves the empty one": (
        {
            "oneOf": [{"type": "array", "prefixItems": [{"const": x}], "minItems": 1} for x in "ab"]
            + [{"type": "null"}]
        },
        "oneOf",
    ),
    "numbers whose negation leaves those below": (
        {"oneOf": [{"type": "number", "minimum": 2, "multipleOf": m} for m in (2, 3)]},
        "oneOf",
    ),
    "two equal branches": ({"oneOf": [{"type": "null"}, {"type": "null"}]}, "oneOf"),
    "nothing left of else": ({"if": INTS, "then": INTS, "type": "array"}, "'if'"),
    "nothing left of not": ({"not": INTS, "type": "array"}, "'not'"),
    "names of no length": ({"propertyNames": {"maxLength": 2.5}}, "'propertyNames'"),
    "names of no type": ({"propertyNames": {"type": "stringy"}}, "'propertyNames'"),
    "a $ref into not": ({"not": {"type": "null"}, "items": {"$ref": "#/not"}}, "'not'"),
    "a $ref to a place of many digits": (
        {"uniqueItems": True, "allOf": [{}], "items": {"$ref": "#/allOf/" + "9" * 5000}},
        "'uniqueItems'",
    ),
    "a $ref to nothing": ({"not": {"type": "null"}, "items": {"$ref": "#/allOf/0"}}, "'not'"),
}


@pytest.mark.parametrize(("schema", "keyword"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_kept_in_part_only_or_not_at_all_is_refused_by_name(schema, keyword):
    try:
        source = grammar_source(StructuredOutput.of_json_schema(json.dumps(schema)), None)
    except InvalidRequest as error:
        message = str(error)
    else:
        message = LLMatcher(BYTES, source, log_level=0).get_error()
    assert f"keyword {keyword}" in message or f"{keyword} constraints are not" in message


TYPES = ("string", "integer", "number", "null", "boolean", "array", "object")
SCALARS = (None, True, False, 0, 1, 2, 2.5, -1, "", "a", "b", "ab")
LISTS = ([], [1], ["a"], [1, "a"], [[1]])
ITEMS = (1, 2, "a", "b", {"a": 1}, {"b": "a"}, ["a"])
OBJECTS = [
    {key: ITEMS[(i + j) % len(ITEMS)] for j, key in enumerate(keys)}
    for keys in ("", "a", "b", "c", "ab", "ac", "bc", "abc", ("ab",), ("a", "ab"))
    for i in range(len(ITEMS))
]
NAMES = st.sampled_from("abc")
LEAVES = st.one_of(
    st.booleans(),
    st.fixed_dictionaries({"type": st.sampled_from(TYPES)}),
    st.fixed_dictionaries({"enum": st.lists(st.sampled_from(SCALARS), min_size=1, max_size=4)}),
    st.fixed_dictionaries({"minimum": st.sampled_from([0, 1, 2.5])}),
    st.fixed_dictionaries({"exclusiveMaximum": st.sampled_from([0, 2])}),
    st.fixed_dictionaries({"maxLength": st.integers(0, 2)}),
    st.fixed_dictionaries({"minItems": st.integers(0, 2)}),
    st.fixed_dictionaries({"required": st.lists(NAMES, max_size=2, unique=True)}),
    st.just({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}),
    st.just({"$ref": "#/$defs/x"}),
)


def larger(schemas: st.SearchStrategy) -> st.SearchStrategy:
    several = st.lists(schemas, min_size=1, max_size=3)
    keywords: dict[str, st.SearchStrategy] = {
        **dict.fromkeys(("not", "if", "then", "else", "items", "additionalProperties"), schemas),
        **dict.fromkeys(("oneOf", "anyOf", "allOf"), several),
        **dict.fromkeys(("properties", "dependentSchemas"), st.dictionaries(NAMES, schemas)),
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True)),
        "propertyNames": st.sampled_from([{"maxLength": 1}, {"pattern": "^a"}, {"enum": ["a"]}]),
        "unevaluatedProperties": st.sampled_from([False, {"type": "integer"}]),
        "unevaluatedItems": st.just(False),
        "type": st.sampled_from(TYPES),
    }
    return st.fixed_dictionaries({}, optional=keywords)


@settings(max_examples=300 if settings().max_examples <= 100 else settings().max_examples)
@given(
    st.recursive(LEAVES, larger, max_leaves=8).filter(lambda schema: isinstance(schema, dict)),
    LEAVES.filter(lambda schema: schema != {"$ref": "#/$defs/x"}),
    st.sampled_from(list(DRAFTS.values())[:3]),
)
def test_what_fits_a_random_schemas_grammar_fits_the_schema(schema, referred, draft):
    schema = {"$schema": draft} | schema | {"$defs": {"x": referred}}
    if (matcher := compiled(schema)) is None:
        return
    judge = jsonschema_rs.validator_for(schema)
    for value in (*SCALARS, *LISTS, *OBJECTS):
        assert judge.is_valid(value) or not accepts(matcher, value), value


LINKS = {
    f"d{i}": {"properties": {n: {"not": {"not": {"$ref": f"#/$defs/d{i + 1}"}}} for n in "abcdef"}}
    for i in range(12)
}
BIG: dict[str, Any] = {
    "evens": {"enum": [[i] for i in range(0, 600, 2)]},
    "odds": {"enum": [[i] for i in range(1, 600, 2)]},
    "names": {"enum": [f"v{i}" for i in range(6000)]},
    "properties": {"properties": {f"p{i}": {"type": "null"} for i in range(3000)}},
    "annotated": {f"x-{i}": 1 for i in range(6000)},
    "leads": {"$ref": "#/$defs/" + "%41/" * 9000},
    "same": {"not": {"const": [1] * 20000}},
    "digits": {"not": {"const": [10**4000] * 10}},
    "hidden": {"allOf": [{"not": {}}, {"not": {f"x-{i}": 1 for i in range(6000)}}]},
}


def refs(*names: str, number: int, **others: Any) -> list[dict[str, Any]]:
    return [
        others | {"$ref": f"#/$defs/{names[i % len(names)]}", "title": i} for i in range(number)
    ]


def several(parts: list[dict[str, Any]], keyword: str) -> dict[str, Any]:
    return {"properties": {f"q{i}": {keyword: part} for i, part in enumerate(parts)}}


HEAVY: dict[str, dict[str, Any]] = {
    "a negation that doubles with each definition": {
        "$defs": LINKS | {"d12": {"type": "null"}},
        "not": {"$ref": "#/$defs/d0"},
    },
    "branches of two long lists": {"oneOf": refs("evens", "odds", number=40)},
    "equal branches of a long list": {"oneOf": refs("names", number=40)},
    "branches with much beside": {"oneOf": refs("annotated", number=100)},
    "branches behind a long $ref": {"oneOf": refs("leads", number=300)},
    "names of a long list, often": several(refs("names", number=1000), "propertyNames"),
    "names of a long list, ten times": several(refs("names", number=10), "propertyNames"),
    "a long value, often": several(refs("same", number=12), "not"),
    "large numbers, often": several(refs("digits", number=1000), "not"),
    "much beside, often": several(refs("hidden", number=900), "not"),
    "many names evaluated, often": several(
        refs("properties", number=300, unevaluatedProperties=False), "items"
    ),
}


@pytest.mark.parametrize("schema", HEAVY.values(), ids=HEAVY)
def test_a_schema_that_would_take_long_or_become_large_is_refused_at_once(schema):
    text = json.dumps(schema)
    schema = {"$defs": {name: part for name, part in BIG.items() if f"/{name}" in text}} | schema
    assert len(json.dumps(schema)) <= 2**17
    begin = time.process_time()
    with pytest.raises(InvalidRequest, match=r"use a simpler schema$"):
        check_schema("schema", schema)
    assert time.process_time() - begin < 1


def test_a_union_of_a_hundred_models_compiles():
    models = {
        f"M{i}": {"type": "object", "properties": {"k": {"const": f"m{i}"}}, "required": ["k"]}
        for i in range(100)
    }
    schema = {"$defs": models, "oneOf": [{"$ref": f"#/$defs/{name}"} for name in models]}
    matcher = compiled(schema)
    assert accepts(matcher, {"k": "m42"})
    assert not accepts(matcher, {"k": "m100"})
