"""Reads logs of requests. Knows their formats: no caches, no templates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jserve.batch.lines import InputLine, decode_line, read_lines
from jserve.doctor.codec import Codec
from jserve.errors import ConfigError, InvalidRequest


class LoggedRequest(NamedTuple):
    """One request of a log."""

    tenant: str
    token_ids: np.ndarray | None  # i32[n]; None where the log keeps no prompts
    num_prompt_tokens: int
    num_cached_tokens: int | None  # None where the log does not tell
    arrival_s: float


class PromptLog(NamedTuple):
    requests: list[LoggedRequest]  # in order of arrival
    num_skipped: int  # lines that are no requests
    first_skipped: str  # where and why; "" if there is none


def read_log(path: str, codec: Codec) -> PromptLog:
    """Reads JSON lines of three kinds, mixed or not: --request_log's, those of jserve-batch, those
    of the OpenAI batch API. A line's prompt is its "prompt_token_ids", "prompt" or "messages".

    Raises:
      ConfigError: there is no such file, or none of its lines is a request.
    """
    requests: list[LoggedRequest] = []
    num_skipped, first_skipped = 0, ""
    try:
        with Path(path).expanduser().open("rb") as file:
            for line in read_lines(file):
                if line.raw is not None and not line.raw.strip():
                    continue
                try:
                    requests.append(_read(line, codec))
                except InvalidRequest as error:
                    num_skipped += 1
                    first_skipped = first_skipped or f"{path}:{line.number}: {error}"
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if not requests:
        raise ConfigError(first_skipped or f"{path} has no lines")
    # A log has its lines as requests ended; the sort keeps the file's order where none is told.
    requests.sort(key=lambda request: request.arrival_s)
    return PromptLog(requests, num_skipped, first_skipped)


def _read(line: InputLine, codec: Codec) -> LoggedRequest:
    fields = decode_line(line.raw)
    body = fields.get("body", fields)
    if not isinstance(body, Mapping):
        raise InvalidRequest("body is not an object")
    token_ids = _prompt(body, codec)
    if token_ids is not None and not len(token_ids):
        raise InvalidRequest("the prompt is empty")
    count = _number(body, "prompt_tokens") if token_ids is None else len(token_ids)
    if count is None:
        raise InvalidRequest("has none of prompt_token_ids, prompt, messages and prompt_tokens")
    cached, arrival_s = _number(body, "cached_tokens"), _number(body, "arrival_s")
    return LoggedRequest(
        tenant=str(body.get("tenant") or ""),
        token_ids=token_ids,
        num_prompt_tokens=int(count),
        num_cached_tokens=None if cached is None else int(cached),
        arrival_s=arrival_s or 0.0,
    )


def _number(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is None or (isinstance(value, (int, float)) and 0 <= value < float("inf")):
        return value
    raise InvalidRequest(f"{name}={value!r} is not a number, 0 or more")


def _prompt(body: Mapping[str, Any], codec: Codec) -> np.ndarray | None:
    prompt = body.get("prompt_token_ids", body.get("prompt"))
    try:
        if isinstance(prompt, str):
            prompt = codec.encode(prompt)
        elif prompt is None and "messages" in body:
            prompt = codec.encode_chat(body["messages"])
        return None if prompt is None else _token_ids(prompt)
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise InvalidRequest(f"the prompt is no text, chat or list of token ids: {error}") from None


def _token_ids(prompt: Any) -> np.ndarray:
    ids = np.asarray(prompt)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise ValueError("not a list of integers")
    return ids.astype(np.int32)
