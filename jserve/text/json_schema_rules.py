"""Says which JSON schemas can be kept to. Knows the keywords of JSON Schema (drafts 6 to 2020-12):
no tokens, no grammar.

The compiler of grammars skips a keyword that it does not know, as the specification allows. Here
such a keyword is refused by its name, so that no constraint is accepted and then not kept.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from jserve.errors import InvalidRequest
from jserve.text.json_schema_keywords import (
    DRAFTS,
    KNOWN,
    LATEST_DRAFT,
    OF_SCHEMAS,
    OF_SCHEMAS_BY_NAME,
    REWRITTEN,
)
from jserve.text.json_schema_rewrites import rewritten

MAX_NESTING = 100  # levels of JSON; the compiler's own parser ends at 127
MAX_PATTERN_CHARS = 4096  # compile time grows with the square: 0.4 s for the worst of this length
MAX_MULTIPLE_OF = 100_000  # an automaton with as many states

MAX_PLACE_CHARS = 200

_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)


def parse_json(name: str, text: str) -> Any:
    """The value of a JSON text; `name` says in errors what it is.

    Raises:
      InvalidRequest: it is no JSON, nested too deeply, or holds NaN or an infinity.
    """
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if depth > MAX_NESTING:
            raise InvalidRequest(f"{name} is nested more than {MAX_NESTING} levels deep")

    def refuse(constant: str) -> Any:
        raise InvalidRequest(f"{name} holds {constant}, which is no JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is no JSON: {error}") from error


def check_schema(name: str, schema: Any) -> dict[str, Any]:
    """Returns `schema`, written in keywords that can be kept or only describe.

    Raises:
      InvalidRequest: naming the keyword and its place (as a JSON pointer).
    """
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{name} is not a JSON object: {str(schema)[:40]!r}")
    draft = str(schema.get("$schema", LATEST_DRAFT)).rstrip("#")
    if draft not in DRAFTS:
        raise InvalidRequest(f"{name}: $schema={draft!r} is not supported; use draft 6 or later")
    schema = rewritten(schema, ref_stands_alone=draft.startswith("http:"))
    pattern_chars, multiple = 0, 1
    waiting: list[tuple[str, Any]] = [("#", schema)]
    while waiting:
        place, node = waiting.pop()
        if not isinstance(node, dict):
            continue  # true, false, or what the compiler refuses
        where = f"{name} at {place[:MAX_PLACE_CHARS]}"
        _check_keywords(where, node, draft, place == "#")
        pattern_chars += sum(map(len, _patterns(node)))
        multiple = math.lcm(multiple, _scaled(node.get("multipleOf", 1)))
        if pattern_chars > MAX_PATTERN_CHARS:
            raise InvalidRequest(
                f"{where}: patterns with more than {MAX_PATTERN_CHARS} characters in all"
            )
        if multiple > MAX_MULTIPLE_OF:
            raise InvalidRequest(
                f"{where}: multipleOf={node['multipleOf']} is too large or too precise; the common "
                f"multiple of all, as integers without the decimal point, is at most "
                f"{MAX_MULTIPLE_OF}"
            )
        waiting += _children(place, node)
    check_bounds(name, schema)
    return schema


def check_bounds(name: str, value: Any) -> None:
    """Checks, wherever in `value` a schema might be read from, what takes long to compile: a $ref
    leads anywhere, and what is compiled too long cannot be stopped.

    Raises:
      InvalidRequest: naming what is too much.
    """
    pattern_chars, multiple = 0, 1
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        if not isinstance(node, dict):
            continue
        waiting += node.values()
        pattern_chars += sum(map(len, _patterns(node)))
        multiple = math.lcm(multiple, _scaled(node.get("multipleOf", 1)))
        if pattern_chars > MAX_PATTERN_CHARS or multiple > MAX_MULTIPLE_OF:
            raise InvalidRequest(
                f"{name}: patterns of at most {MAX_PATTERN_CHARS} characters in all are supported, "
                f"and a multipleOf of at most {MAX_MULTIPLE_OF}, the common one of all"
            )


def _check_keywords(where: str, node: dict[str, Any], draft: str, is_root: bool) -> None:
    for keyword in node:
        if keyword == "x-guidance" or not (keyword in KNOWN or keyword.startswith("x-")):
            raise InvalidRequest(
                f"{where}: keyword {keyword[:MAX_PLACE_CHARS]!r} is not supported; "
                f"supported: {', '.join(sorted(KNOWN))}; and some forms of "
                f"{', '.join(sorted(REWRITTEN))}"
            )
    if "$schema" in node and not is_root:
        raise InvalidRequest(f"{where}: $schema is supported at the root only")
    if "prefixItems" in node and draft != LATEST_DRAFT:
        raise InvalidRequest(f"{where}: prefixItems needs $schema={LATEST_DRAFT!r}; use items")
    # The grammar cannot tell a repeated name from a new one, so one name more is what it counts.
    required, least = node.get("required"), node.get("minProperties", 0)
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > num_required + 1:
        raise InvalidRequest(
            f"{where}: minProperties={least} is not supported above one more than the "
            f"{num_required} required; name the properties in required"
        )


def _patterns(node: dict[str, Any]) -> Iterator[str]:
    if isinstance(pattern := node.get("pattern"), str):
        yield pattern
    if isinstance(by_pattern := node.get("patternProperties"), dict):
        yield from by_pattern


def _scaled(multiple_of: Any) -> int:
    """A number's digits as an integer: 0.25 -> 25. One for what the compiler refuses."""
    if isinstance(multiple_of, bool) or not isinstance(multiple_of, int | float):
        return 1
    if not 1e-12 < multiple_of < 1e12:
        return MAX_MULTIPLE_OF + 1
    value = Decimal(str(multiple_of)).normalize()
    return int(value.scaleb(-min(0, int(value.as_tuple().exponent))))


def _children(place: str, node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword, value in node.items():
        if keyword in OF_SCHEMAS_BY_NAME and isinstance(value, dict):
            yield from ((f"{place}/{keyword}/{key}", child) for key, child in value.items())
        elif keyword in OF_SCHEMAS and isinstance(value, list):
            yield from ((f"{place}/{keyword}/{i}", child) for i, child in enumerate(value))
        elif keyword in OF_SCHEMAS:
            yield f"{place}/{keyword}", value
