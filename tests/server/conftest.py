"""Real gRPC and HTTP servers on loopback ports over the fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc

from jserve.access import Access
from jserve.client import GenerateClient
from jserve.config import ServerSettings
from jserve.server.caller import Gate
from jserve.server.front import Front
from jserve.server.grpc_service import ENGINE_SERVICES, GENERATE_SERVICE, create_server
from jserve.server.health import EngineHealth
from jserve.server.http_api import make_app
from jserve.server.http_server import HttpServer
from jserve.server.rpc import stub_of
from jserve.server.tls import TlsFiles
from tests.server.fake_engine import FakeEngine

TIMEOUT_S = 20.0  # of anything that is expected to happen at once


@dataclass
class Served:
    engine: FakeEngine
    front: Front
    health: EngineHealth
    target: str
    client: GenerateClient
    channel: grpc.aio.Channel
    http: str = ""  # the HTTP server's URL, where one was asked for

    @property
    def stub(self) -> SimpleNamespace:
        return stub_of(self.channel, GENERATE_SERVICE)

    @property
    def health_stub(self) -> health_pb2_grpc.HealthStub:
        return health_pb2_grpc.HealthStub(self.channel)


async def until(condition: Callable[[], object]) -> None:
    """Returns as soon as `condition()` holds; fails after TIMEOUT_S."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(
    engine: FakeEngine | None = None,
    *,
    loaded: bool = True,
    http: bool = False,
    gate: Gate | None = None,
    tls: TlsFiles | None = None,
    access: Access | None = None,
    allowed_origins: Sequence[str] = (),
    **settings: object,
) -> AsyncIterator[Served]:
    """`gate` and `tls` are the servers', `access` is the client's."""
    engine = engine or FakeEngine()
    front = Front(gate)
    health = EngineHealth(lambda: front.is_ready, ENGINE_SERVICES)
    all_settings = ServerSettings(port=0, http_port=0, **settings)
    credentials = tls.grpc_credentials() if tls else None
    server, port = create_server(all_settings, front, health, credentials=credentials)
    app = make_app(front, all_settings, allowed_origins=allowed_origins)
    context = tls.http_context() if tls else None
    http_server = HttpServer(app, all_settings, context) if http else None
    if loaded:
        front.open(engine)
    await health.refresh()
    await server.start()
    if http_server:
        await http_server.start()
    polling = asyncio.create_task(health.poll())
    target = f"127.0.0.1:{port}"
    try:
        access = access or Access()
        async with GenerateClient(target, access) as client, access.open_channel(target) as channel:
            url = http_server.url if http_server else ""
            yield Served(engine, front, health, target, client, channel, url)
    finally:
        polling.cancel()
        await server.stop(0)
        if http_server:
            await http_server.stop(0)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as s:
        yield s


@pytest.fixture
async def stepped() -> AsyncIterator[Served]:
    """Like `served`, but tokens come only from `engine.step()`."""
    async with serving(FakeEngine(interval_s=None)) as s:
        yield s
