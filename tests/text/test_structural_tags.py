"""Structural tags: free text, until a trigger opens JSON of the given form."""

from __future__ import annotations

import json

import pytest

from jserve.structured import GrammarKind, StructuredOutput
from jserve.text.grammar import GrammarCompiler, Matcher
from tests.text.test_grammar import PADDING, allowed_by, follow

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CITY |= {"additionalProperties": False}
NUMBER = {"type": "integer"}


def structures(triggers: list[str], *tags: tuple[str, dict, str]) -> StructuredOutput:
    value = {
        "type": "structural_tag",
        "structures": [{"begin": b, "schema": s, "end": e} for b, s, e in tags],
        "triggers": triggers,
    }
    return StructuredOutput(GrammarKind.STRUCTURAL_TAG, json.dumps(value))


def triggered_tags(**options: bool) -> StructuredOutput:
    content = {"type": "json_schema", "json_schema": NUMBER}
    value = {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<f="],
            "tags": [{"type": "tag", "begin": "<f=n>", "content": content, "end": "</f>"}],
        }
        | options,
    }
    return StructuredOutput(GrammarKind.STRUCTURAL_TAG, json.dumps(value))


WEATHER = structures(["<f="], ("<f=weather>", CITY, "</f>"), ("<f=n>", NUMBER, "</f>"))


@pytest.fixture
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + PADDING, tokenizer.eos_token_ids)


def ends(matcher: Matcher, compiler: GrammarCompiler) -> bool:
    allowed = allowed_by(matcher, compiler.vocab_size) or set()
    return not allowed.isdisjoint(compiler._tokenizer.eos_token_ids)


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [
        ("", True),
        ("no call at all, 1 < 2 and <f", True),
        ('I ask. <f=weather>{"city": "Paris"}</f>', True),
        ('<f=weather>{"city": "a"}</f>\nthen <f=n>12</f> done', True),
        ("a <f=", False),
        ('<f=weather>{"city": "a"', False),
        ("<f=n>12", False),
    ],
)
def test_text_is_free_and_a_trigger_opens_a_tag_that_has_to_be_closed(compiler, text, is_whole):
    matcher = compiler.compile(WEATHER).matcher()
    assert follow(matcher, compiler, text)
    assert ends(matcher, compiler) == is_whole


@pytest.mark.parametrize(
    "text", ["<f=other>", "a <f=weather>[", '<f=weather>{"town"', "<f=n>x", "<f=n>1</g>"]
)
def test_a_tag_that_is_not_of_its_form_is_not_allowed(compiler, text):
    assert not follow(compiler.compile(WEATHER).matcher(), compiler, text)


@pytest.mark.parametrize(
    ("options", "texts", "refused"),
    [
        ({}, ["", "a", "<f=n>1</f>", "a<f=n>1</f>b<f=n>2</f>c"], []),
        ({"at_least_one": True}, ["a<f=n>1</f>", "<f=n>1</f>b<f=n>2</f>"], ["", "a"]),
        ({"stop_after_first": True}, ["", "a", "a<f=n>1</f>"], ["<f=n>1</f>b"]),
        ({"at_least_one": True, "stop_after_first": True}, ["a<f=n>1</f>"], ["a", "<f=n>1</f>b"]),
    ],
    ids=str,
)
def test_the_newer_form_says_how_many_tags_there_are(compiler, options, texts, refused):
    grammar = compiler.compile(triggered_tags(**options))
    for text in texts + refused:
        matcher = grammar.matcher()
        is_whole = follow(matcher, compiler, text) and ends(matcher, compiler)
        assert is_whole == (text in texts), text


def test_o72_a_trigger_that_is_a_special_token_is_that_token_and_not_its_text(compiler, tokenizer):
    id = tokenizer.bos_token_id
    spec = structures([tokenizer.bos_token], (tokenizer.bos_token + "n=", NUMBER, ";"))
    matcher = compiler.compile(spec).matcher()
    assert id in allowed_by(matcher, compiler.vocab_size)
    assert follow(matcher, compiler, f"as text, {tokenizer.bos_token}x")
    assert ends(matcher, compiler)
    assert matcher.accept(id)
    assert not follow(matcher.copy(), compiler, "x")
    assert follow(matcher, compiler, "n=1;")
    assert ends(matcher, compiler)
