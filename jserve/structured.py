"""What a caller says about the form of an output. Knows kinds and sizes: no tokens, no grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from jserve.errors import InvalidRequest

MAX_GRAMMAR_CHARS = 2**18


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"  # the schema as JSON text
    JSON_OBJECT = "json_object"  # any JSON object; the text is empty
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of texts, one of which is the whole output
    LARK = "grammar"  # in llguidance's form of Lark
    STRUCTURAL_TAG = "structural_tag"  # JSON text


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that an output has to have.

    Raises:
      InvalidRequest: the kind is unknown, or the text is none or too long.
    """

    kind: GrammarKind
    value: str = ""

    def __post_init__(self) -> None:
        if self.kind not in tuple(GrammarKind):
            raise InvalidRequest(
                f"structured output of kind {self.kind!r} is unknown; use one of "
                f"{', '.join(GrammarKind)}"
            )
        if not isinstance(self.value, str) or len(self.value) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"{self.kind} is not a text of at most {MAX_GRAMMAR_CHARS} characters"
            )

        if self.kind == GrammarKind.JSON_OBJECT and self.value:
            raise InvalidRequest(
                f"json_object takes no value but has {self.value!r:.80}; json_schema takes a schema"
            )

    @classmethod
    def of_json_schema(cls, schema: Any) -> StructuredOutput:
        return cls(GrammarKind.JSON_SCHEMA, _json_text("json_schema", schema))

    @classmethod
    def of_choice(cls, choices: Sequence[str]) -> StructuredOutput:
        return cls(GrammarKind.CHOICE, _json_text("choice", list(choices)))


class OwnLark(StructuredOutput):
    """A Lark grammar that jserve wrote itself: callers' own may be of the kind whose compile time
    grows with the square of its length, and have to be shorter."""


def _json_text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} cannot be written as JSON: {error}") from error
