"""What a failed HTTP request is answered: which status, which words, in the form of OpenAI's error
bodies. Knows errors and JSON: no routes.

Source: the OpenAI API reference, "Error codes".
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jserve.errors import (
    DeadlineExceeded,
    InvalidRequest,
    JserveError,
    Overloaded,
    Unauthenticated,
    UnknownModel,
    let_go,
    trace_of,
    wire_code,
)
from jserve.json_pieces import chunks_of

MAX_MESSAGE_CHARS = 1000
ID_HEADER = "x-request-id"
CLIENT_GONE = 499  # nginx's number for it; nobody reads the answer

# What OpenAI's clients call a failure, by status; others are "invalid_request_error".
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
    504: "timeout",
}

logger = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client has closed its connection before its answer was complete."""


def status_of(error: BaseException) -> int:
    """Returns the HTTP status that `error` stands for."""
    if isinstance(error, HTTPException):
        return error.status_code
    if isinstance(error, ClientGone):
        return CLIENT_GONE
    # Only what callers send is as deep as they like; all that is ours is shallow.
    return 400 if isinstance(error, RecursionError) else wire_code(error).http


def error_body(error: BaseException) -> dict[str, Any]:
    """Returns OpenAI's body for `error`. What is not meant for callers is logged instead."""
    status = status_of(error)
    message, param, code = str(error), None, _CODES.get(status)
    if isinstance(error, HTTPException):
        message = error.detail
    elif isinstance(error, RecursionError):
        message = "the body is nested too deeply"
    elif not isinstance(error, (JserveError, ClientGone)):
        logger.error("a call failed: %s", trace_of(error))
        message = f"internal error ({type(error).__name__}); the server's log has the details"
    if isinstance(error, UnknownModel):
        code = "model_not_found"
    if isinstance(error, InvalidRequest):
        param = _field_of(message)
    kind = _TYPES.get(status, "invalid_request_error")
    if len(message) > MAX_MESSAGE_CHARS:  # it quotes what the caller has sent
        message = message[:MAX_MESSAGE_CHARS] + "..."
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_headers(error: BaseException) -> dict[str, str]:
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(math.ceil(error.retry_after_s), 1))
        headers["retry-after-ms"] = str(max(math.ceil(error.retry_after_s * 1e3), 1))
    if isinstance(error, DeadlineExceeded):  # OpenAI's clients would spend as much time again
        headers["x-should-retry"] = "false"
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return headers


def error_response(error: BaseException) -> Response:
    return JsonResponse(error_body(error), status_of(error), error_headers(error))


async def on_error(request: Request, error: Exception) -> Response:
    """Starlette's exception handler, for every kind of error."""
    response = error_response(error)
    given_id = request.headers.get(ID_HEADER)
    if given_id is not None:
        response.headers[ID_HEADER] = given_id
    let_go(error)
    return response


class Faults:
    """Answers errors that no handler knows. Starlette's own handler of them raises them again, and
    uvicorn logs their words, which may quote a prompt."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            if not has_begun:
                response = error_response(error)
                let_go(error)
                await response(scope, receive, send)
                return
            logger.error("an answer broke off: %s", trace_of(error))
            raise RuntimeError("an answer broke off") from None  # has uvicorn close the connection


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def json_bytes(value: Any) -> bytes:
    """Returns compact UTF-8; half surrogate pairs, which models can make, stay escapes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace")


def long_json(value: Any, headers: Mapping[str, str]) -> Response:
    """Returns an answer that may be of many megabytes: it is written by threads, while it is taken,
    and never all in memory."""
    return StreamingResponse(chunks_of(value), media_type="application/json", headers=headers)


def _field_of(message: str) -> str | None:
    """The field that a message is about: messages name it first, or quote the unknown ones."""
    if found := re.match(r"body has unknown or unsupported fields: '([^']*)'", message):
        return found[1]
    found = re.match(r"([a-z_]+(?:\[\d+\]|\.[a-z_]+)*)(?:=| is | has | must | needs )", message)
    return found[1] if found else None
