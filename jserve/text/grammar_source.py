"""Turns what a caller asked for into the text of a grammar, or refuses it. Knows llguidance's
grammar language (its form of Lark): no tokens, no limits of time."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher

from jserve.errors import InvalidRequest
from jserve.structured import GrammarKind, OwnLark, StructuredOutput
from jserve.text.json_schema_rules import (
    MAX_PATTERN_CHARS,
    check_bounds,
    check_schema,
    parse_json,
)
from jserve.text.structural_tags import lark_of_structural_tag, lark_text
from jserve.text.tokenizer import Tokenizer

MAX_LARK_CHARS = 2**14  # compile time grows with the square: 2 s for the worst of this length
# One way to write a value: what json.dumps writes. Free white space lets a model spin in it, and
# a fixed one lets the grammar force whole keys.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_JSON_IN_LARK = re.compile(r"%json\s*")
_ESCAPE_OR_CLASS = r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]"
_REPEATED_ANCHOR = re.compile(rf"(?:{_ESCAPE_OR_CLASS})|([\^$][*+?{{])", re.DOTALL)


def grammar_source(spec: StructuredOutput, tokenizer: Tokenizer) -> str:
    """The grammar of `spec` as llguidance reads it.

    Raises:
      InvalidRequest: naming what is bad, unsupported, too long or too deep.
    """
    try:
        return _source(spec, tokenizer)
    except UnicodeError as error:
        raise InvalidRequest(f"{spec.kind} is not valid Unicode: {error}") from error
    except RecursionError as error:
        raise InvalidRequest(f"{spec.kind} nests too deeply; use a simpler one") from error


def _source(spec: StructuredOutput, tokenizer: Tokenizer) -> str:
    name, value = spec.kind, spec.value
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = check_schema(name, parse_json(name, value))
            return _grammar(json_schema=schema | {"x-guidance": JSON_OPTIONS})
        case GrammarKind.JSON_OBJECT:
            return _grammar(json_schema={"type": "object", "x-guidance": JSON_OPTIONS})
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(_checked_regex(name, value))
        case GrammarKind.CHOICE:
            return _grammar(lark_grammar=_lark_of_choice(name, parse_json(name, value)))
        case GrammarKind.LARK:
            if len(value) > MAX_LARK_CHARS and not isinstance(spec, OwnLark):
                raise InvalidRequest(f"{name} has more than {MAX_LARK_CHARS} characters")
            _check_json_in_lark(name, value)
            return _grammar(lark_grammar=value)
        case GrammarKind.STRUCTURAL_TAG:
            tags = parse_json(name, value)
            return _grammar(
                lark_grammar=lark_of_structural_tag(name, tags, JSON_OPTIONS, tokenizer)
            )


def _check_json_in_lark(name: str, lark: str) -> None:
    """Checks the schemas in a grammar for what takes long to compile, all together."""
    schemas = []
    for match in _JSON_IN_LARK.finditer(lark):
        try:
            schema, _ = json.JSONDecoder().raw_decode(lark, match.end())
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{name}: %json without a JSON schema behind it") from error
        schemas.append(schema)
    check_bounds(f"{name}: %json", schemas)


def _grammar(**source: Any) -> str:
    return json.dumps({"grammars": [source]})


def _checked_regex(name: str, pattern: str) -> str:
    if not 0 < len(pattern) <= MAX_PATTERN_CHARS:
        raise InvalidRequest(
            f"{name} has {len(pattern)} characters; use 1 to {MAX_PATTERN_CHARS} of them"
        )
    if repeated := next(filter(None, (m[1] for m in _REPEATED_ANCHOR.finditer(pattern))), None):
        raise InvalidRequest(f"{name}: there is nothing to repeat in {repeated!r}")
    return pattern


def _lark_of_choice(name: str, choices: Any) -> str:
    if not isinstance(choices, list) or not all(isinstance(text, str) for text in choices):
        raise InvalidRequest(f"{name} is not a list of texts")
    if not any(choices):
        raise InvalidRequest(f"{name} has no text to choose")
    # A terminal is matched by an automaton: thousands of texts cost no more than one.
    return "start: TEXT\nTEXT: " + " | ".join(map(lark_text, choices))
