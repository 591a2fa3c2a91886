"""Who may call what: keys and certificates become callers, before any service sees a call. Knows
keys, methods and paths: no request's insides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc

from jserve.config import EngineConfig, parse_classes
from jserve.errors import (
    ConfigError,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    JserveError,
    Overloaded,
    Unauthenticated,
)
from jserve.server.api_keys import KeyEntry, find_key, read_keys
from jserve.server.caller import Caller, Gate, OpenGate, admitted
from jserve.server.identity import call_of
from jserve.server.quota import CallerQuota
from jserve.server.status import end_with_status
from jserve.server.watch import Watch

logger = logging.getLogger(__name__)

ARRIVAL_LIMIT_S = 60.0  # of a call's message: calls without one would take the place of others
HEALTH = "/grpc.health.v1.Health/"
WATCH = HEALTH + "Watch"  # the one question of health that stays open
# What shows or changes something of all callers.
ADMIN_METHODS = (
    "/jserve.v1.CacheService/",
    *(
        f"/vllm.grpc.engine.VllmEngine/{name}"
        for name in ("SubscribeKvEvents", "FlushCache", "StartProfile", "StopProfile")
    ),
)


def gate_of(config: EngineConfig) -> Gate:
    """Returns the gate that the settings ask for. Raises ConfigError for a file of keys that is
    no good."""
    if not config.security.api_keys:
        return OpenGate()
    classes = [c.name for c in parse_classes(config.scheduler.request_classes)]
    return KeyGate(config.security.api_keys, classes)


class KeyGate:
    """Admits who has a key of the file, or a certificate that the file names. For one event loop.

    The file is read again when it changes; one that is no good leaves all as it was.

    Raises:
      ConfigError: at the start it is no good.
    """

    def __init__(self, path: str, known_classes: Collection[str] = ()) -> None:
        self._path, self._known_classes = path, known_classes
        self._watch = Watch([path])
        self._quotas: dict[str, CallerQuota] = {}  # by entry; what was used outlives the file
        self._entries: list[KeyEntry] = []
        self._callers: dict[str, Caller] = {}  # by entry
        self._certificates: dict[str, KeyEntry] = {}
        self._read()

    def admit(self, key: str | None, certificate: str) -> Caller:
        """Returns who this is; a key comes before a certificate. Raises Unauthenticated."""
        if self._watch.has_changed():
            try:
                self._read()
                logger.info("read %d keys of %s", len(self._entries), self._path)
            except ConfigError as error:
                logger.error("the old keys stay: %s", error)
        if key is not None:
            entry = find_key(key, self._entries)
        else:
            entry = self._certificates.get(certificate)
        if entry is not None:
            return self._callers[entry.name]
        if key is not None:
            raise Unauthenticated("this API key is not known; ask the server's operator for one")
        if certificate:
            raise Unauthenticated(
                f"the certificate's name {certificate!r} is not known; send an API key, or have "
                "the server's operator add it"
            )
        raise Unauthenticated('there is no API key; send it as "authorization: Bearer KEY"')

    def _read(self) -> None:
        entries = read_keys(self._path, self._known_classes)
        callers = {}
        for entry in entries:
            quota = self._quotas.setdefault(entry.name, CallerQuota(entry.limits))
            quota.set_limits(entry.limits)
            callers[entry.name] = Caller(
                name=entry.name,
                tenant=entry.tenant,
                request_classes=entry.request_classes,
                is_admin=entry.is_admin,
                quota=quota,
            )
        self._entries, self._callers = entries, callers
        self._certificates = {e.certificate: e for e in entries if e.certificate}


class GrpcGuard(grpc.aio.ServerInterceptor):
    """Stands before every service but health: who is not admitted is told so before its message is
    read, and so is one call too many."""

    def __init__(self, gate: Gate, max_open_streams: int) -> None:
        self._gate = gate
        self._max_open = max_open_streams
        self._num_open = 0
        self._num_watches = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is not None and method == WATCH:
            return handler._replace(unary_stream=self._watching(handler.unary_stream))
        if handler is None or method.startswith(HEALTH):
            return handler
        # Whatever it is to be, as a stream of requests it is called before any of them is read.
        kind, behavior = (
            (grpc.stream_stream_rpc_method_handler, self._streaming(handler, method))
            if handler.response_streaming
            else (grpc.stream_unary_rpc_method_handler, self._unary(handler, method))
        )
        return kind(
            behavior,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _watching(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """They need no key, so they are counted apart: they cannot take a place of other calls."""

        async def watch(request: Any, context: grpc.aio.ServicerContext) -> None:
            if self._num_watches >= self._max_open:
                error = Overloaded(f"{self._num_watches} watch health already; ask with Check")
                await end_with_status(context, error)
            self._num_watches += 1
            try:
                await inner(request, context)
            finally:
                self._num_watches -= 1

        return watch

    def _unary(self, handler: grpc.RpcMethodHandler, method: str) -> Callable[..., Any]:
        inner = handler.stream_unary or handler.unary_unary

        async def answer(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
            async with self._entered(method, context):
                request = requests if handler.request_streaming else await _only(requests, context)
                return await inner(request, context)

        return answer

    def _streaming(self, handler: grpc.RpcMethodHandler, method: str) -> Callable[..., Any]:
        inner = handler.stream_stream or handler.unary_stream

        async def answers(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
            async with self._entered(method, context):
                request = requests if handler.request_streaming else await _only(requests, context)
                async with aclosing(inner(request, context)) as messages:
                    async for message in messages:
                        yield message

        return answers

    @asynccontextmanager
    async def _entered(self, method: str, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        """Counts a call while it is open. One that may not be made ends with its status."""
        try:
            caller = call_of(context, self._gate, method).caller
            admitted.set(caller)
            if method.startswith(ADMIN_METHODS) and not caller.is_admin:
                raise Forbidden(f"{method} is for administrators; use a key with admin rights")
            if self._num_open >= self._max_open:
                raise Overloaded(f"{self._num_open} calls are open; try again later")
        except JserveError as error:
            await end_with_status(context, error)
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1


async def _only(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
    error: JserveError = InvalidRequest("the call ended without its message")
    try:
        async with asyncio.timeout(ARRIVAL_LIMIT_S):
            async for request in requests:
                return request
    except TimeoutError:
        error = DeadlineExceeded(f"the call's message did not come within {ARRIVAL_LIMIT_S:g} s")
    await end_with_status(context, error)
