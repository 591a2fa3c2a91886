"""The access log: a line of JSON for each call, whatever became of it. Knows names, codes, counts
and times: nothing of prompts, of outputs, or of error messages, which may quote them.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

import grpc
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jserve.engine.line_log import LineLog
from jserve.errors import WIRE_CODES, WireCode, wire_code
from jserve.messages import Usage
from jserve.server.caller import admitted
from jserve.server.front import CallRecord

OK = WireCode("OK", 200)
CANCELLED = WireCode("CANCELLED", 499)  # the caller left; 499 is nginx's word for it
_OF_GRPC = {code.grpc: code for code in (OK, CANCELLED, *WIRE_CODES.values())}
_OF_HTTP = {code.http: code for code in _OF_GRPC.values()}
_OF_KIND = {2: "OK", 3: "OK", 4: "INVALID_ARGUMENT", 5: "INTERNAL"}  # of HTTP codes not above
# Asked every few seconds by machines, so that only what is refused of them is logged; "not ready"
# (503) is an answer.
QUIET = ("/health", "/metrics", "/debug/state", "/grpc.health.v1.Health/")
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")  # of handlers

# The records of the call that runs in this context, so that none is logged twice.
_told: ContextVar[list[CallRecord] | None] = ContextVar("jserve_told", default=None)


class AccessLog:
    """Writes what it is told, as an observer of `Front`, and what it sees of calls that never
    became a request, as `HttpAccessLog` and `GrpcAccessLog`.

    The file may be renamed at any time: a new one takes its place within a second.

    Raises:
      ConfigError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._lines = LineLog("access_log", path, "a")

    def __call__(self, record: CallRecord) -> None:
        told = _told.get()
        if told is not None:
            told.append(record)
        call, timings, code = record.call, record.timings, code_of(record)
        usage = Usage.of_choices(record.usages) if record.usages else None
        fields = {
            "time": _iso(record.began),
            "method": call.method,
            "peer": call.peer,
            "caller": call.caller.name,
            "tenant": call.caller.tenant,
            "request_id": record.request_id,
            "request_class": record.request_class,
            "code": code.grpc,
            "status": code.http,
            "error": type(record.error).__name__ if record.error else None,
            "finish_reasons": record.finish_reasons,
            "prompt_tokens": usage and usage.prompt_tokens,
            "cached_tokens": usage and usage.cached_tokens,
            "output_tokens": usage.completion_tokens if usage else record.num_output_tokens,
            "queue_ms": _ms(timings.queue_s) if timings else None,
            "ttft_ms": _ms(timings.ttft_s if timings else record.ttft_s),
            "itl_ms": _ms(timings.itl_s) if timings else None,
            "e2e_ms": _ms(record.seconds),
        }
        self._lines.add(_json(fields))

    def add(self, method: str, peer: str, began: float, code: WireCode) -> None:
        """Writes a call that was no request: refused before it was one, or a question."""
        self._lines.add(
            _json(
                {
                    "time": _iso(began),
                    "method": method,
                    "peer": peer,
                    "caller": admitted.get().name,
                    "code": code.grpc,
                    "status": code.http,
                    "e2e_ms": _ms(time.time() - began),
                }
            )
        )

    def close(self) -> None:
        self._lines.close()


class HttpAccessLog:
    """ASGI middleware that logs calls which end without a request's record."""

    def __init__(self, app: ASGIApp, log: AccessLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told: list[CallRecord] = []
        token = _told.set(told)
        began, status = time.time(), CANCELLED.http  # unless an answer begins

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            _told.reset(token)
            path = scope["path"]
            if not told and not (status in (200, 503) and path.startswith(QUIET)):
                host, port = scope.get("client") or ("", 0)
                code = _OF_HTTP.get(status, WireCode(_OF_KIND[status // 100], status))
                self._log.add(path, f"{host}:{port}", began, code)


class GrpcAccessLog(grpc.aio.ServerInterceptor):
    """The same for gRPC, of calls whose method exists."""

    def __init__(self, log: AccessLog) -> None:
        self._log = log

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler, method = await continuation(details), details.method
        if handler is None:
            return handler
        kind = next(kind for kind in _KINDS if getattr(handler, kind))
        behavior = getattr(handler, kind)
        if not handler.response_streaming:
            return handler._replace(**{kind: self._unary(behavior, method)})
        if inspect.isasyncgenfunction(behavior):  # not that of health
            return handler._replace(**{kind: self._streaming(behavior, method)})
        return handler

    def _unary(self, behavior: Any, method: str) -> Any:
        async def logged(request: Any, context: grpc.aio.ServicerContext) -> Any:
            with self._watching(method, context):
                return await behavior(request, context)

        return logged

    def _streaming(self, behavior: Any, method: str) -> Any:
        async def logged(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            with self._watching(method, context):
                async with aclosing(behavior(request, context)) as answers:
                    async for answer in answers:
                        yield answer

        return logged

    @contextmanager
    def _watching(self, method: str, context: grpc.aio.ServicerContext) -> Iterator[None]:
        told: list[CallRecord] = []
        _told.set(told)  # for good: the context ends with the call
        began, code = time.time(), CANCELLED
        try:
            yield
            code = OK
        except Exception:
            code = _status_of(context)
            raise
        finally:
            if not told and not (code is OK and method.startswith(QUIET)):
                self._log.add(method.removeprefix("/"), context.peer(), began, code)


def code_of(record: CallRecord) -> WireCode:
    """Returns how a request ended, in the words of both protocols."""
    if record.error is not None and isinstance(record.error, Exception):
        return wire_code(record.error)
    return CANCELLED if record.is_aborted or record.error else OK


def _status_of(context: grpc.aio.ServicerContext) -> WireCode:
    """The status that the call was ended with; an error without one is UNKNOWN."""
    status = context.code() or grpc.StatusCode.UNKNOWN
    return _OF_GRPC.get(status.name, WireCode(status.name, 500))


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _json(fields: dict[str, Any]) -> str:
    return json.dumps(fields, separators=(",", ":"))
