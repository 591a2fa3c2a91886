"""The standard health service, reflection, and what idle connections may do."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jserve.errors import EngineDead
from jserve.server.grpc_service import ENGINE_SERVICES, SERVICE
from jserve.server.health import HEALTH_SERVICE
from jserve.server.proto import generate_pb2 as pb
from tests.server.conftest import TIMEOUT_S, Served, serving, until
from tests.server.fake_engine import FakeEngine

Status = health_pb2.HealthCheckResponse


async def health_of(served: Served, service: str = "") -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return (await served.health_stub.Check(request, timeout=TIMEOUT_S)).status


async def test_o90_health_is_not_serving_while_the_model_loads():
    async with serving(loaded=False) as s:
        assert await health_of(s) == await health_of(s, SERVICE) == Status.NOT_SERVING
        s.front.open(s.engine)
        assert await health_of(s) == await health_of(s, SERVICE) == Status.SERVING


async def test_o90_health_asks_the_engine_at_each_call(served):
    for ready in (True, False, True):
        served.engine.is_ready = ready  # an engine that is stuck or dead says no
        expected = Status.SERVING if ready else Status.NOT_SERVING
        assert await health_of(served) == await health_of(served, SERVICE) == expected


async def test_o90_a_busy_engine_is_serving():
    async with serving(FakeEngine(interval_s=None, max_running=1)) as s:
        calls = [s.stub.GenerateStream(pb.GenerateRequest(prompt="x")) for _ in range(100)]
        await until(lambda: len(s.engine.live) == len(calls))
        assert await health_of(s) == Status.SERVING


async def test_o92_an_unknown_service_is_not_found(served):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health_of(served, "jserve.v1.Other")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("service", ["", *ENGINE_SERVICES])
async def test_o92_watch_reports_loading_serving_and_shutdown(service):
    async with serving(loaded=False) as s, asyncio.timeout(TIMEOUT_S):
        watch = s.health_stub.Watch(health_pb2.HealthCheckRequest(service=service))
        assert (await watch.read()).status == Status.NOT_SERVING
        s.front.open(s.engine)
        assert (await watch.read()).status == Status.SERVING
        await s.health.enter_graceful_shutdown()
        assert (await watch.read()).status == Status.NOT_SERVING
        watch.cancel()


async def test_o92_watch_of_an_unknown_service_says_so(served):
    watch = served.health_stub.Watch(health_pb2.HealthCheckRequest(service="other"))
    assert (await watch.read()).status == Status.SERVICE_UNKNOWN
    watch.cancel()


async def test_o92_reflection_lists_the_services_and_describes_ours(served):
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    listed, described = [r async for r in stub.ServerReflectionInfo(iter(requests))]
    names = {service.name for service in listed.list_services_response.service}
    assert names == {
        *("jserve.v1.GenerateService", "vllm.grpc.engine.VllmEngine"),
        *("jetstream_proto.Orchestrator", HEALTH_SERVICE),
        "grpc.reflection.v1alpha.ServerReflection",
    }
    file = FileDescriptorProto.FromString(
        described.file_descriptor_response.file_descriptor_proto[0]
    )
    assert [m.name for m in file.service[0].method] == ["Generate", "GenerateStream"]


async def test_wait_ready_returns_when_serving_and_says_what_it_saw_otherwise():
    async with serving(loaded=False) as s:
        with pytest.raises(EngineDead, match="NOT_SERVING"):
            await s.client.wait_ready(0.3)
        waiting = asyncio.create_task(s.client.wait_ready(TIMEOUT_S))
        s.front.open(s.engine)
        await waiting


async def connection_survives(target: str, seconds: float) -> bool:
    """Pings `target` as often as gRPC allows, with no call; returns whether it stayed connected."""
    options = [
        ("grpc.keepalive_time_ms", 50),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        async with asyncio.timeout(TIMEOUT_S):
            await channel.channel_ready()
        ready = grpc.ChannelConnectivity.READY
        try:
            await asyncio.wait_for(channel.wait_for_state_change(ready), seconds)
        except TimeoutError:
            return True
        return False


async def test_o91_idle_pings_keep_the_connection(served):
    """A server with gRPC's own limits is the control: it hangs up after about 3 s (gRPC lets no
    client ping more often than once a second)."""
    control = grpc.aio.server()
    port = control.add_insecure_port("127.0.0.1:0")
    await control.start()
    try:
        ours, others = await asyncio.gather(
            connection_survives(served.target, 6.0),
            connection_survives(f"127.0.0.1:{port}", TIMEOUT_S),
        )
    finally:
        await control.stop(0)
    assert (ours, others) == (True, False)
