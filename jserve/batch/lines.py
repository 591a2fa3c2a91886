"""Reads a batch file line by line and tells what each line asks for. Knows the input's format:
no engine, no output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, BinaryIO, NamedTuple

from jserve.errors import InvalidRequest
from jserve.openai_format import Endpoint, OpenAICall, parse_body

MAX_LINE_BYTES = 16 * 2**20  # a longer line is refused without being held in memory
_PIECE_BYTES = 2**20
_INPUT_NAMES = ("prompt", "messages", "prompt_token_ids")


def digest64(data: bytes) -> int:
    """A 64-bit digest, never 0. Of n lines, two share one with a chance of n * n / 2**65."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big") or 1


class InputLine(NamedTuple):
    number: int  # from 1
    raw: bytes | None  # without the line's end; None where it is longer than MAX_LINE_BYTES
    digest: int  # of the whole line
    num_bytes: int  # the line's end included


def read_lines(file: BinaryIO) -> Iterator[InputLine]:
    """Yields every line, blank ones too, holding one line of bounded size at a time."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) <= MAX_LINE_BYTES or raw.endswith(b"\n"):
            text = raw.rstrip(b"\r\n")
            yield InputLine(number, text, digest64(text), len(raw))
            continue
        digest, num_bytes = blake2b(raw, digest_size=8), len(raw)
        while not raw.endswith(b"\n") and (raw := file.readline(_PIECE_BYTES)):
            digest.update(raw)
            num_bytes += len(raw)
        yield InputLine(number, None, int.from_bytes(digest.digest(), "big") or 1, num_bytes)


def decode_line(raw: bytes | None) -> dict[str, Any]:
    """Returns the line's JSON object. Raises InvalidRequest saying what is wrong with it."""
    if raw is None:
        raise InvalidRequest(f"the line is longer than {MAX_LINE_BYTES} bytes")
    if not raw.strip():
        raise InvalidRequest("the line is blank")
    try:
        fields = json.loads(raw)
        if b"\\ud" in raw or b"\\uD" in raw:  # JSON can spell half of a surrogate pair; text cannot
            json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the line is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest(f"the line is a JSON {type(fields).__name__}, not an object")
    return fields


def take_custom_id(fields: dict[str, Any]) -> str | None:
    """Removes and returns the line's custom_id; None if it has none."""
    custom_id = fields.pop("custom_id", None)
    if custom_id is not None and not isinstance(custom_id, str):
        raise InvalidRequest(f"custom_id={custom_id!r} is not a string")
    return custom_id


def parse_task(fields: dict[str, Any], custom_id: str | None) -> OpenAICall:
    """Reads an OpenAI batch line ({"custom_id", "method", "url", "body"}), or a short one: the
    body itself, holding one of "prompt", "messages" and "prompt_token_ids" (custom_id optional).

    Raises InvalidRequest for a missing, unknown or unsupported field, by its name.
    """
    if not {"url", "body", "method"} & fields.keys():
        return _parse_short(dict(fields))
    if custom_id is None:
        raise InvalidRequest("custom_id is missing")
    rest = dict(fields)
    method, url, body = rest.pop("method", "POST"), rest.pop("url", None), rest.pop("body", None)
    if rest:
        raise InvalidRequest(f"the line has unknown fields: {', '.join(map(repr, sorted(rest)))}")
    if method != "POST":
        raise InvalidRequest(f"method={method!r} is not supported; use 'POST'")
    if url not in list(Endpoint):
        raise InvalidRequest(f"url={url!r} is not supported; use one of {', '.join(Endpoint)}")
    return parse_body(Endpoint(url), body)


def _parse_short(body: dict[str, Any]) -> OpenAICall:
    given = [name for name in _INPUT_NAMES if name in body]
    if len(given) != 1:
        found = ", ".join(given) or "none"
        raise InvalidRequest(f"give exactly one of {', '.join(_INPUT_NAMES)}; found {found}")
    if given == ["messages"]:
        return parse_body(Endpoint.CHAT, body)
    if given == ["prompt_token_ids"]:
        body["prompt"] = body.pop("prompt_token_ids")
        if not isinstance(body["prompt"], list):
            raise InvalidRequest("prompt_token_ids must be a non-empty list of token ids")
        return parse_body(Endpoint.COMPLETIONS, body, return_token_ids=True)
    return parse_body(Endpoint.COMPLETIONS, body)
