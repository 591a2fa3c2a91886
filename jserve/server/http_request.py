"""Reads what an HTTP request says before any endpoint does: who calls, and a body that is JSON and
small enough. Knows HTTP: no fields of bodies.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar
from uuid import uuid4

from starlette.exceptions import HTTPException
from starlette.requests import Request

from jserve.config import ServerSettings
from jserve.errors import Forbidden, InvalidRequest
from jserve.json_pieces import INLINE_BYTES, loads_in_pieces
from jserve.messages import GenerateRequest
from jserve.server.caller import admitted
from jserve.server.front import Call, Front
from jserve.server.http_errors import ID_HEADER, ClientGone

TIMEOUT_HEADER = "x-request-timeout-ms"
_MAX_ID_CHARS = 200

T = TypeVar("T")


def front_of(request: Request) -> Front:
    front: Front = request.app.state.front
    return front


def settings_of(request: Request) -> ServerSettings:
    settings: ServerSettings = request.app.state.settings
    return settings


def call_of_http(request: Request) -> Call:
    """Returns what is known of a call, which `http_guard` has admitted."""
    client = request.client
    return Call(
        method=request.url.path,
        caller=admitted.get(),
        peer=f"{client.host}:{client.port}" if client else "",
        traceparent=request.headers.get("traceparent", ""),
    )


def admin_call_of_http(request: Request) -> Call:
    """The same, of callers who may see what all of them do. Raises Forbidden."""
    call = call_of_http(request)
    if not call.caller.is_admin:
        raise Forbidden(f"{call.method} is for administrators; use a key with admin rights")
    return call


async def read_json(request: Request, read: Callable[[dict[str, Any]], T]) -> T:
    """Returns what `read` makes of the body, a JSON object. Long bodies are read in a thread.

    Raises:
      HTTPException: 413 as soon as more than `max_message_bytes` have come, 415 for what does not
        call itself JSON. That, because browsers let any page send other kinds to any address.
      InvalidRequest: as `read` does; it is no JSON object in UTF-8, or holds NaN, Infinity or too
        large a number.
      ClientGone: the client left before it was complete.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, f"content-type {kind!r} is not supported; use application/json")
    if encoding := request.headers.get("content-encoding"):
        raise HTTPException(415, f"content-encoding {encoding!r} is not supported; send plain JSON")
    data = await _read(request, settings_of(request).max_message_bytes)
    if len(data) <= INLINE_BYTES:
        return read(_parse(data, json.loads))
    return await asyncio.to_thread(lambda: read(_parse(data, loads_in_pieces)))


async def _read(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limit:
        raise _too_large(limit)
    parts, size = [], 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left while it sent its request")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(limit)
        if not message.get("more_body"):
            return b"".join(parts)


def _too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {limit} bytes (--max_message_bytes)")


def _parse(data: bytes, loads: Callable[..., Any]) -> dict[str, Any]:
    try:
        body = loads(data.decode(), parse_constant=_no_number, parse_float=_finite)
        if b"\\ud" in data or b"\\uD" in data:  # half a surrogate pair, which no text can hold
            json.dumps(body, ensure_ascii=False).encode()
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"the body is not UTF-8 text: {error.reason}") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body is a JSON {type(body).__name__}; give an object")
    return body


def _no_number(name: str) -> NoReturn:
    raise InvalidRequest(f"the body holds {name}, which is not JSON; use a finite number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise InvalidRequest(f"the body holds {text:.40}, which no float can; use a smaller number")
    return number


def as_headers_say(
    request: Request, asked: Sequence[GenerateRequest]
) -> tuple[str, list[GenerateRequest], dict[str, str]]:
    """Returns a call's id; its requests, named by it and within the time that its headers give
    them; and the headers of its answer. Raises InvalidRequest."""
    given_id = request.headers.get(ID_HEADER)
    if given_id is not None and not 0 < len(given_id) <= _MAX_ID_CHARS:
        raise InvalidRequest(f"{ID_HEADER} must have 1 to {_MAX_ID_CHARS} characters")
    limit_s = _header_timeout_s(request)
    unique = uuid4().hex
    # A proxy that tries again sends the same one, maybe while its first try still runs.
    call_id = unique if given_id is None else f"{given_id}-{unique[:8]}"
    is_single = len(asked) == 1
    requests = [
        replace(
            one,
            request_id=call_id if is_single else f"{call_id}-{index}",
            timeout_s=min((s for s in (one.timeout_s, limit_s) if s is not None), default=None),
        )
        for index, one in enumerate(asked)
    ]
    return call_id, requests, {ID_HEADER: given_id or call_id}


def _header_timeout_s(request: Request) -> float | None:
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    if not re.fullmatch("[0-9]{1,12}", text) or not int(text):
        raise InvalidRequest(f"{TIMEOUT_HEADER}={text!r:.40} is not a number of milliseconds")
    return int(text) / 1e3


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns what `work` returns; cancels it as soon as the client has left. To be used once the
    body is read.

    Raises:
      ClientGone: the client has left.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client left before its answer was complete")
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})  # until it has tidied up


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
