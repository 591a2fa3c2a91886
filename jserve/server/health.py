"""grpc.health.v1 that asks the engine each time. Knows one question: are you ready?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2

from jserve.server.rpc import Context, add_service

HEALTH_SERVICE = health.SERVICE_NAME
POLL_INTERVAL_S = 0.25  # how late a Watch may hear of a change

_Status = health_pb2.HealthCheckResponse


class EngineHealth(health.aio.HealthServicer):
    """The standard health service: SERVING exactly while `is_ready()`, for "" and `services`.

    Unknown names get NOT_FOUND from Check and SERVICE_UNKNOWN from Watch, as the protocol says
    (grpc.io, "GRPC Health Checking Protocol").
    """

    def __init__(self, is_ready: Callable[[], bool], services: Sequence[str]) -> None:
        super().__init__()
        self._is_ready = is_ready
        self._services = ("", *services)
        self._shown: bool | None = None

    async def refresh(self) -> None:
        """Asks the engine, and tells the watchers if the answer has changed."""
        ready = self._is_ready()
        if ready == self._shown:
            return
        self._shown = ready
        for service in self._services:
            await self.set(service, _Status.SERVING if ready else _Status.NOT_SERVING)

    async def poll(self) -> None:
        """Refreshes until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(POLL_INTERVAL_S)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        await self.refresh()
        return await super().Check(request, context)

    async def List(
        self, request: health_pb2.HealthListRequest, context: Context
    ) -> health_pb2.HealthListResponse:
        await self.refresh()
        status = _Status.SERVING if self._shown else _Status.NOT_SERVING
        return health_pb2.HealthListResponse(
            statuses={name: _Status(status=status) for name in self._services}
        )


def add_health(servicer: EngineHealth, server: grpc.aio.Server) -> None:
    add_service(server, health_pb2.DESCRIPTOR.services_by_name["Health"], servicer)
