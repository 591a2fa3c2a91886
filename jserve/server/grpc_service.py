"""The gRPC front end: calls in, engine requests out, statuses back. Knows no model."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

import grpc
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection

from jserve.config import ServerSettings
from jserve.errors import ConfigError, DeadlineExceeded, InvalidRequest
from jserve.messages import GenerateRequest, RequestUpdate, joined
from jserve.server.cache_service import CACHE_SERVICE, CacheService
from jserve.server.front import Front
from jserve.server.health import HEALTH_SERVICE, EngineHealth, add_health
from jserve.server.identity import call_of
from jserve.server.proto import generate_pb2 as pb
from jserve.server.security import GrpcGuard
from jserve.server.status import end_with_status
from jserve.server.wire import answer_to_proto, request_from_proto, update_to_proto

SERVICE = pb.DESCRIPTOR.services_by_name["GenerateService"].full_name


class GenerateService:
    """jserve.v1.GenerateService over the engine behind `front`."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def generate(
        self, message: pb.GenerateRequest | InvalidRequest, context: grpc.aio.ServicerContext
    ) -> pb.GenerateResponse:
        """Answers with the whole output at once."""
        try:
            async with aclosing(self._updates(message, "Generate", context)) as updates:
                choices = joined([update async for update in updates])
            return answer_to_proto(choices, return_prompt_token_ids=_wants_prompt_ids(message))
        except Exception as error:
            await end_with_status(context, error)

    async def generate_stream(
        self, message: pb.GenerateRequest | InvalidRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Answers with one message per update. A slow reader slows only its own stream."""
        try:
            async with aclosing(self._updates(message, "GenerateStream", context)) as updates:
                async for update in updates:
                    yield update_to_proto(
                        update, return_prompt_token_ids=_wants_prompt_ids(message)
                    )
        except Exception as error:
            await end_with_status(context, error)

    async def _updates(
        self,
        message: pb.GenerateRequest | InvalidRequest,
        method: str,
        context: grpc.aio.ServicerContext,
    ) -> AsyncGenerator[RequestUpdate, None]:
        """Yields the request's updates. Left before the last one, for whatever reason (the client
        cancelled or went away, its deadline passed, a write failed), it aborts the request."""
        if isinstance(message, InvalidRequest):
            raise message
        request = with_call_deadline(request_from_proto(message), context)
        call = call_of(context, self._front.gate, f"{SERVICE}/{method}")
        async with await self._front.submit(request, call) as answer:
            async for update in answer:
                if update.finish_reason == "abort":
                    await context.abort(grpc.StatusCode.CANCELLED, "the request was aborted")
                yield update

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
    settings: ServerSettings,
    front: Front,
    health: EngineHealth,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    credentials: grpc.ServerCredentials | None = None,
) -> tuple[grpc.aio.Server, int]:
    """Returns a bound server, not yet started, and its port (drawn by the system for port 0). It
    speaks TLS with `credentials`.

    Raises:
      ConfigError: the address cannot be bound.
    """
    server = grpc.aio.server(
        interceptors=[*interceptors, GrpcGuard(front.gate, settings.max_open_streams)],
        options=[
            ("grpc.so_reuseport", 0),  # else a second server silently shares the port
            ("grpc.max_receive_message_length", settings.max_message_bytes),
            ("grpc.max_metadata_size", settings.max_header_bytes),
            ("grpc.absolute_max_metadata_size", settings.max_header_bytes),
            # Idle clients may ping as often as they like: gRPC's default closes the connection
            # of one that does so more than twice in five minutes.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 0),
            ("grpc.http2.max_ping_strikes", 0),
        ],
    )
    GenerateService(front).add_to(server)
    add_health(health, server)
    services = [SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME]
    if settings.enable_cache_service:
        CacheService(front).add_to(server)
        services.append(CACHE_SERVICE)
    reflection.enable_server_reflection(services, server)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        address = f"{host}:{settings.port}"
        port = (
            server.add_secure_port(address, credentials)
            if credentials
            else server.add_insecure_port(address)
        )
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


def with_call_deadline(
    request: GenerateRequest, context: grpc.aio.ServicerContext
) -> GenerateRequest:
    """Returns the request with the earlier one of its own time limit and the call's."""
    remaining = context.time_remaining()
    if remaining is None or (request.timeout_s is not None and request.timeout_s <= remaining):
        return request
    if remaining <= 0:
        raise DeadlineExceeded("the call's deadline passed before the request was read")
    return dataclasses.replace(request, timeout_s=remaining)
