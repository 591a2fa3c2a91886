"""The gRPC front end: calls in, engine requests out, statuses back. Knows no model."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection

from jserve.config import ServerSettings
from jserve.errors import ConfigError, DeadlineExceeded, EngineDead, InvalidRequest
from jserve.messages import GenerateRequest, RequestUpdate, joined
from jserve.server.cache_service import CACHE_SERVICE, CacheService, CachingEngine
from jserve.server.health import HEALTH_SERVICE, EngineHealth, add_health
from jserve.server.identity import identity_of
from jserve.server.proto import generate_pb2 as pb
from jserve.server.status import end_with_status
from jserve.server.wire import answer_to_proto, request_from_proto, update_to_proto

SERVICE = pb.DESCRIPTOR.services_by_name["GenerateService"].full_name


class RequestStream(Protocol):
    """Updates of one request, in order, up to the one that `is_last`."""

    def __aiter__(self) -> AsyncIterator[RequestUpdate]: ...

    def abort(self) -> None: ...  # may be called at any time, also after the end


class Engine(CachingEngine, Protocol):
    """What the front ends need of an engine."""

    @property
    def is_ready(self) -> bool: ...  # false while loading, draining, dead or stuck; never blocks

    async def submit(self, request: GenerateRequest) -> RequestStream:
        """Raises InvalidRequest, Overloaded or EngineDead before any work is done."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Refuses what is new, waits for the live requests for up to `timeout_s` seconds, ends
        the others with an EngineDead error, then stops the engine."""
        ...


class GenerateService:
    """jserve.v1.GenerateService over an engine that may still be loading."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._closed_because = "the model is still loading; wait for grpc.health.v1 to say SERVING"

    def open(self, engine: Engine) -> None:
        """Sends calls to `engine` from now on."""
        self._engine = engine
        self._closed_because = ""

    def close(self, reason: str) -> None:
        """Answers new calls with UNAVAILABLE and `reason`; running ones go on."""
        self._closed_because = reason

    def engine(self) -> Engine:
        """Returns the engine that serves new calls. Raises EngineDead while there is none."""
        if self._closed_because or self._engine is None:
            raise EngineDead(self._closed_because)
        return self._engine

    @property
    def is_ready(self) -> bool:
        return not self._closed_because and self._engine is not None and self._engine.is_ready

    async def generate(
        self, message: pb.GenerateRequest | InvalidRequest, context: grpc.aio.ServicerContext
    ) -> pb.GenerateResponse:
        """Answers with the whole output at once."""
        try:
            async with aclosing(self._updates(message, context)) as updates:
                choices = joined([update async for update in updates])
            return answer_to_proto(choices, return_prompt_token_ids=_wants_prompt_ids(message))
        except Exception as error:
            await end_with_status(context, error)

    async def generate_stream(
        self, message: pb.GenerateRequest | InvalidRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Answers with one message per update. A slow reader slows only its own stream."""
        try:
            async with aclosing(self._updates(message, context)) as updates:
                async for update in updates:
                    yield update_to_proto(
                        update, return_prompt_token_ids=_wants_prompt_ids(message)
                    )
        except Exception as error:
            await end_with_status(context, error)

    async def _updates(
        self, message: pb.GenerateRequest | InvalidRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[RequestUpdate, None]:
        """Yields the request's updates. Left before the last one, for whatever reason (the client
        cancelled or went away, its deadline passed, a write failed), it aborts the request."""
        if isinstance(message, InvalidRequest):
            raise message
        request = request_from_proto(message)
        request = dataclasses.replace(request, identity=identity_of(context))
        stream = await self.engine().submit(_with_call_deadline(request, context))
        finished = False
        try:
            async for update in stream:
                finished = update.is_last
                if update.error is not None:
                    raise update.error
                if update.finish_reason == "abort":
                    await context.abort(grpc.StatusCode.CANCELLED, "the request was aborted")
                yield update
        finally:
            if not finished:
                stream.abort()
        if not finished:
            raise RuntimeError(f"the engine's stream of {request.request_id=} ended unfinished")

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service. By hand, as generated code cannot answer bytes that do not parse
        with INVALID_ARGUMENT."""
        codec = {
            "request_deserializer": _parse,
            "response_serializer": pb.GenerateResponse.SerializeToString,
        }
        handlers = {
            "Generate": grpc.unary_unary_rpc_method_handler(self.generate, **codec),
            "GenerateStream": grpc.unary_stream_rpc_method_handler(self.generate_stream, **codec),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def create_server(
    settings: ServerSettings, service: GenerateService, health: EngineHealth
) -> tuple[grpc.aio.Server, int]:
    """Returns a bound server, not yet started, and its port (drawn by the system for port 0).

    Raises:
      ConfigError: the address cannot be bound.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),  # else a second server silently shares the port
            ("grpc.max_receive_message_length", settings.max_message_bytes),
            # Idle clients may ping as often as they like: gRPC's default closes the connection
            # of one that does so more than twice in five minutes.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 0),
            ("grpc.http2.max_ping_strikes", 0),
        ]
    )
    service.add_to(server)
    add_health(health, server)
    services = [SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME]
    if settings.enable_cache_service:
        CacheService(service.engine).add_to(server)
        services.append(CACHE_SERVICE)
    reflection.enable_server_reflection(services, server)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        port = server.add_insecure_port(f"{host}:{settings.port}")
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {host}:{settings.port}; choose a free --port (0 draws one) and a "
            "--host of this machine"
        ) from error
    return server, port


def _parse(data: bytes) -> pb.GenerateRequest | InvalidRequest:
    try:
        return pb.GenerateRequest.FromString(data)
    except DecodeError:
        return InvalidRequest(f"the message of {len(data)} bytes is no {SERVICE} request")


def _wants_prompt_ids(message: pb.GenerateRequest | InvalidRequest) -> bool:
    return isinstance(message, pb.GenerateRequest) and message.return_prompt_token_ids


def _with_call_deadline(
    request: GenerateRequest, context: grpc.aio.ServicerContext
) -> GenerateRequest:
    """Returns the request with the earlier one of its own time limit and the call's."""
    remaining = context.time_remaining()
    if remaining is None or (request.timeout_s is not None and request.timeout_s <= remaining):
        return request
    if remaining <= 0:
        raise DeadlineExceeded("the call's deadline passed before the request was read")
    return dataclasses.replace(request, timeout_s=remaining)
