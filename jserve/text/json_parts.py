"""JSON values: their parts, types, sizes and equality, and JSON pointers. Knows no schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_TYPE_NAMES = {
    type(None): "null",
    **{bool: "boolean", str: "string", list: "array", dict: "object"},
}


def numbers_in(value: Any) -> list[float]:
    """All numbers of a JSON value."""
    return [part for part in parts_of(value) if type_of(part) == "number"]


def size(value: Any, limit: float) -> int:
    """About how many characters a JSON value has; some number above `limit` where it has more."""
    total = 0
    for part in parts_of(value):
        total += 4
        if isinstance(part, str):
            total += len(part)
        elif isinstance(part, dict):
            total += sum(len(name) + 4 for name in part)
        elif isinstance(part, int):
            total += part.bit_length() // 3  # digits
        if total > limit:
            break
    return total


def refs_in(value: Any) -> set[str]:
    """The $ref of every part."""
    refs = (part.get("$ref") for part in parts_of(value) if isinstance(part, dict))
    return {ref for ref in refs if isinstance(ref, str)}


def parts_of(value: Any) -> Iterator[Any]:
    """A value and all that is in it, but for names."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, dict | list):
            waiting += part.values() if isinstance(part, dict) else part


def type_of(value: Any) -> str:
    """As JSON Schema calls it; an integer is a number."""
    return _TYPE_NAMES.get(type(value), "number")


def key_of(value: Any) -> tuple[str, Any]:
    """Equal, and of one hash, where two values are one in JSON: 1 is 1.0 and not true."""
    if isinstance(value, dict):
        return "object", frozenset((name, key_of(part)) for name, part in value.items())
    return type_of(value), tuple(map(key_of, value)) if isinstance(value, list) else value


def pointed_to(root: Any, pointer: str) -> Any:
    """What a JSON pointer (RFC 6901, as in a URI) names in `root`; None where it names nothing."""
    node = root
    for part in unquote(pointer).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        is_index = part.isdecimal() and len(part) < 10
        if isinstance(node, list) and is_index and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict) and part in node:
            node = node[part]
        else:
            return None
    return node if not pointer or pointer.startswith("/") else None
