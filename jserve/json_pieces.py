"""Reads and writes long JSON piece by piece. Knows JSON: no fields, no transport.

The interpreter runs nothing else while its C code parses or encodes a value, which takes tenths of
a second for some megabytes, and streams stand still. This is slower, for threads, and lets others
run between pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from json import decoder, scanner
from typing import Any

INLINE_BYTES = 2**16  # longer messages are read in a thread
_CHUNK_CHARS = 2**15
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_CONTAINERS = (dict, list, tuple)
_INTEGERS = re.compile(r"[0-9,\s-]*")


def loads_in_pieces(text: str, **hooks: Callable[[str], Any]) -> Any:
    """Returns what `json.loads` would, with its hooks for constants and numbers, and its errors."""
    return _Decoder(**hooks).decode(text)


class _Decoder(json.JSONDecoder):
    """The standard decoder with its Python scanner, but for long runs of integers."""

    def __init__(self, **hooks: Any) -> None:
        super().__init__(**hooks)
        self.parse_array = _array
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def _array(text_and_start: tuple[str, int], scan_once: Callable[..., Any]) -> tuple[list[Any], int]:
    text, at = text_and_start
    found: list[Any] = []
    while (end := text.rfind(",", at, _integers_end(text, at))) > at:
        try:
            piece = json.loads(f"[{text[at:end]}]")
        except ValueError:
            break  # which the scanner meets again, and says where
        if not piece:  # "[ ,1]", likewise
            break
        found += piece
        at = end + 1
    rest, at = decoder.JSONArray((text, at), scan_once)  # type: ignore[attr-defined]
    if found and not rest:
        raise json.JSONDecodeError("Expecting value", text, at - 1)  # "[1,]"
    return found + rest, at


def _integers_end(text: str, at: int) -> int:
    match = _INTEGERS.match(text, at, at + _CHUNK_CHARS)
    return match.end() if match else at


def chunks_of(value: Any) -> Iterator[bytes]:
    """Yields compact UTF-8, in which half surrogate pairs are escapes, some 32 KiB at a time; keys
    are texts."""
    parts: list[str] = []
    size = 0
    for piece in pieces(value, _encode):
        parts.append(piece)
        size += len(piece)
        if size >= _CHUNK_CHARS:
            yield "".join(parts).encode(errors="backslashreplace")
            parts, size = [], 0
    yield "".join(parts).encode(errors="backslashreplace")


def pieces(value: Any, encode: Callable[[Any], str]) -> Iterator[str]:
    """Yields the JSON of a value, whose keys are texts. What holds no containers is one piece, made
    by `encode`."""
    inner = value.values() if isinstance(value, dict) else value
    if not isinstance(value, _CONTAINERS) or not any(isinstance(v, _CONTAINERS) for v in inner):
        yield encode(value)
    elif isinstance(value, dict):
        for index, (key, item) in enumerate(value.items()):
            yield f"{',' if index else '{'}{encode(key)}:"
            yield from pieces(item, encode)
        yield "}"
    else:
        for index, item in enumerate(value):
            yield "," if index else "["
            yield from pieces(item, encode)
        yield "]"
