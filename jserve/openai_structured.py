"""Reads what an OpenAI body says about the form of its answer. Knows field names and shapes: no
grammars.

Sources: `response_format` of the OpenAI API reference; `guided_*` and `structured_outputs` are
vLLM's names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jserve.errors import InvalidRequest
from jserve.structured import GrammarKind, StructuredOutput

_GUIDED = ("json", "regex", "choice", "grammar")
_OUTPUTS = (*_GUIDED, "json_object", "structural_tag")
_SCHEMA_FIELDS = {"name", "description", "schema", "strict"}


def take_structured(fields: dict[str, Any]) -> StructuredOutput | None:
    """Removes what `fields` say about the answer's form and returns it; None for free text.

    Raises:
      InvalidRequest: a field of the wrong shape, or two that ask for a form.
    """
    found: dict[str, StructuredOutput] = {}
    if (spec := fields.pop("response_format", None)) is not None:
        form = _response_format(spec)
        if form is not None:
            found["response_format"] = form
    for key in _GUIDED:
        if (value := fields.pop(name := f"guided_{key}", None)) is not None:
            found[name] = _form(name, key, value)
    if (given := fields.pop("structured_outputs", None)) is not None:
        for key, value in _object("structured_outputs", given, set(_OUTPUTS)).items():
            found[f"structured_outputs.{key}"] = _form(f"structured_outputs.{key}", key, value)
    if len(found) > 1:
        raise InvalidRequest(f"{' and '.join(found)} each ask for a form; give one of them")
    return next(iter(found.values()), None)


def _response_format(spec: Any) -> StructuredOutput | None:
    where = "response_format"
    kind = spec.get("type") if isinstance(spec, Mapping) else None
    if kind == "text":
        _object(where, spec, {"type"})
        return None
    if kind == "json_object":
        _object(where, spec, {"type"})
        return StructuredOutput(GrammarKind.JSON_OBJECT)
    if kind == "json_schema":
        outer = _object(where, spec, {"type", "json_schema"})
        inner = _object(f"{where}.json_schema", outer.get("json_schema"), _SCHEMA_FIELDS)
        if not isinstance(inner.get("strict", True), bool):  # either way all of it is kept
            raise InvalidRequest(f"{where}.json_schema.strict is not true or false")
        return _form(f"{where}.json_schema.schema", "json", inner.get("schema"))
    if kind == "structural_tag":
        return _form(where, kind, spec)
    raise InvalidRequest(
        f"{where}.type={kind!r} is not known; use text, json_object, json_schema or structural_tag"
    )


def _object(where: str, value: Any, known: set[str]) -> dict[str, Any]:
    """The fields of `value` that are not null, none of which may be unknown."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where} is not an object")
    fields = {name: field for name, field in value.items() if field is not None}
    if unknown := fields.keys() - known:
        names = ", ".join(sorted(map(repr, unknown)))
        raise InvalidRequest(f"{where} has unknown or unsupported fields: {names}")
    return fields


def _form(where: str, key: str, value: Any) -> StructuredOutput:
    """The form that `value` describes, of the kind that vLLM calls `key`."""
    if key == "json" and isinstance(value, (Mapping, str, bool)):
        return StructuredOutput.of_json_schema(value)
    if key == "choice" and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return StructuredOutput.of_choice(value)
    if key == "json_object" and value is True:
        return StructuredOutput(GrammarKind.JSON_OBJECT)
    if key in ("regex", "grammar") and isinstance(value, str):
        return StructuredOutput(GrammarKind(key), value)
    if key == "structural_tag" and isinstance(value, (Mapping, str)):
        text = value if isinstance(value, str) else json.dumps(value)
        return StructuredOutput(GrammarKind.STRUCTURAL_TAG, text)
    expected = {
        "json": "a JSON schema",
        "choice": "a list of texts",
        "json_object": "true",
        "structural_tag": "an object",
    }
    raise InvalidRequest(f"{where} is not {expected.get(key, 'a text')}")
