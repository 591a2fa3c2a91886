"""The gRPC front end: calls in, engine requests out, statuses back. Knows no model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

import grpc
from grpc_reflection.v1alpha import reflection

from jserve.config import ServerSettings
from jserve.errors import ConfigError
from jserve.messages import RequestUpdate, joined
from jserve.server.cache_service import CACHE_SERVICE, KV_SERVICE, CacheService
from jserve.server.front import Front
from jserve.server.health import HEALTH_SERVICE, EngineHealth, add_health
from jserve.server.identity import call_of
from jserve.server.jetstream_service import JETSTREAM_SERVICE, ORCHESTRATOR, JetstreamService
from jserve.server.proto import generate_pb2 as pb
from jserve.server.rpc import Context, add_service, read_message, with_call_deadline
from jserve.server.security import GrpcGuard
from jserve.server.vllm_service import VLLM_ENGINE, VLLM_SERVICE, VllmService
from jserve.server.wire import answer_to_proto, request_from_proto, update_to_proto

GENERATE_SERVICE = pb.DESCRIPTOR.services_by_name["GenerateService"]
SERVICE = GENERATE_SERVICE.full_name
# What health knows by name. The rest is there whatever the engine does.
ENGINE_SERVICES = (SERVICE, VLLM_SERVICE, JETSTREAM_SERVICE)

PING_EVERY_S, PONG_WITHIN_S = 60.0, 20.0


class GenerateService:
    """jserve.v1.GenerateService over the engine behind `front`."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def Generate(self, message: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """Answers with the whole output at once."""
        async with aclosing(self._updates(message, "Generate", context)) as updates:
            choices = joined([update async for update in updates])
        return answer_to_proto(choices, return_prompt_token_ids=message.return_prompt_token_ids)

    async def GenerateStream(
        self, message: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Answers with one message per update. A slow reader slows only its own stream."""
        wants_ids = message.return_prompt_token_ids
        async with aclosing(self._updates(message, "GenerateStream", context)) as updates:
            async for update in updates:
                yield update_to_proto(update, return_prompt_token_ids=wants_ids)

    async def _updates(
        self, message: pb.GenerateRequest, method: str, context: Context
    ) -> AsyncGenerator[RequestUpdate, None]:
        """Yields the request's updates. Left before the last one, for whatever reason (the client
        cancelled or went away, its deadline passed, a write failed), it aborts the request."""
        request = await read_message(message, request_from_proto)
        request = with_call_deadline(request, context)
        call = call_of(context, self._front.gate, f"{SERVICE}/{method}")
        async with await self._front.submit(request, call) as answer:
            async for update in answer:
                if update.finish_reason == "abort":
                    await context.abort(grpc.StatusCode.CANCELLED, "the request was aborted")
                yield update


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
            # Nor may one that has vanished, or takes nothing of its connection, keep its calls.
            ("grpc.keepalive_time_ms", int(PING_EVERY_S * 1e3)),
            ("grpc.http2.ping_timeout_ms", int(PONG_WITHIN_S * 1e3)),
        ],
    )
    opens_cache = settings.enable_cache_service
    add_service(server, GENERATE_SERVICE, GenerateService(front))
    add_service(server, VLLM_ENGINE, VllmService(front, enable_cache_service=opens_cache))
    add_service(server, ORCHESTRATOR, JetstreamService(front))
    add_health(health, server)
    services = [*ENGINE_SERVICES, HEALTH_SERVICE, reflection.SERVICE_NAME]
    if opens_cache:
        add_service(server, KV_SERVICE, CacheService(front))
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
