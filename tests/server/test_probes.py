"""What tools see that know nothing of jserve: grpcurl, which has reflection alone to go by, and
grpc_health_probe, which asks in time and by name."""

from __future__ import annotations

import asyncio
import signal

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from jserve.errors import Overloaded
from jserve.server.grpc_service import ENGINE_SERVICES
from tests.engine.test_async_engine import at_gate, running
from tests.engine.tiny import asking, tiny
from tests.server.conftest import TIMEOUT_S, serving
from tests.server.test_grpc_service import status_of
from tests.server.test_main import started

PROBE_S = 1.0  # grpc_health_probe's own -rpc-timeout
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"  # HealthCheckResponse.status on the wire

CALLS = {
    "jserve.v1.GenerateService.Generate": (
        {"prompt": "hi", "sampling": {"max_tokens": 2}},
        {"text": "t0 t1 ", "tokenIds": [0, 1], "finishReason": "length"},
    ),
    "vllm.grpc.engine.VllmEngine.Generate": (
        {"text": "hi", "samplingParams": {"maxTokens": 2}},
        {"complete": {"outputIds": [0, 1], "finishReason": "length"}},
    ),
    "jetstream_proto.Orchestrator.HealthCheck": ({}, {"isLive": True}),
    "grpc.health.v1.Health.Check": ({}, {"status": "SERVING"}),
}


def curl(target: str, full_name: str, request: dict) -> dict:
    """`grpcurl -d REQUEST TARGET NAME`: the last answer, of a call made from reflection alone."""
    with grpc.insecure_channel(target) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        service, _, name = full_name.rpartition(".")
        method = pool.FindServiceByName(service).methods_by_name[name]
        call = channel.unary_stream(
            f"/{service}/{name}",
            GetMessageClass(method.input_type).SerializeToString,
            GetMessageClass(method.output_type).FromString,
        )
        message = ParseDict(request, GetMessageClass(method.input_type)())
        *_, last = call(message, timeout=TIMEOUT_S)
    return MessageToDict(last)


@pytest.mark.parametrize("name", CALLS)
async def test_o92_a_call_is_made_from_what_reflection_tells(served, name):
    request, want = CALLS[name]
    got = await asyncio.to_thread(curl, served.target, name, request)
    (inside,) = want.values() if name.endswith("VllmEngine.Generate") else (want,)
    assert inside.items() <= got.get("complete", got).items()


async def test_o92_reflection_tells_of_every_method_of_every_service(served):
    def methods() -> dict[str, int]:
        with grpc.insecure_channel(served.target) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            pool = DescriptorPool(database)
            names = database.get_services()
            return {name: len(pool.FindServiceByName(name).methods) for name in names}

    found = await asyncio.to_thread(methods)
    assert {name: found[name] for name in ENGINE_SERVICES} == {
        "jserve.v1.GenerateService": 2,
        "vllm.grpc.engine.VllmEngine": 12,
        "jetstream_proto.Orchestrator": 2,
    }


async def probe(target: str, service: str = "") -> bytes:
    """What grpc_health_probe -service=SERVICE gets, as bytes. Raises AioRpcError."""
    request = b"\x0a" + bytes([len(service)]) + service.encode() if service else b""
    async with grpc.aio.insecure_channel(target) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        return await check(request, timeout=PROBE_S, wait_for_ready=True)


@pytest.mark.parametrize("service", ["", *ENGINE_SERVICES])
async def test_o92_the_probe_is_answered_for_every_service(service):
    async with serving(loaded=False) as s:
        assert await probe(s.target, service) == NOT_SERVING
        s.front.open(s.engine)
        assert await probe(s.target, service) == SERVING


async def test_o92_the_probe_of_an_unknown_service_is_told_so(served):
    assert (await status_of(probe(served.target, "no.Such"))).code() == grpc.StatusCode.NOT_FOUND


async def test_o90_a_stuck_engine_is_not_serving_within_the_limit_and_serving_after_it():
    async with running(tiny(), step_timeout_s=0.05) as (front, gate), serving(front) as s:
        assert await probe(s.target) == SERVING
        await front.submit(asking("a", [1, 2], 3))
        await at_gate(gate)
        async with asyncio.timeout(TIMEOUT_S):
            while await probe(s.target) == SERVING:
                await asyncio.sleep(0.005)
        gate.open()
        async with asyncio.timeout(TIMEOUT_S):
            while await probe(s.target) == NOT_SERVING:
                await asyncio.sleep(0.005)


async def test_o90_a_stopped_process_does_not_answer_the_probe_in_time():
    async with started() as server:
        await server.load()
        await server.logged("ready: ")
        assert await probe(server.target) == SERVING
        server.process.send_signal(signal.SIGSTOP)
        stopped = await status_of(probe(server.target))
        assert stopped.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        server.process.send_signal(signal.SIGCONT)
        assert await probe(server.target) == SERVING


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("/vllm.grpc.engine.VllmEngine/Generate", b"\x1a\x02hi"),
        ("/vllm.grpc.engine.VllmEngine/Embed", b"\x12\x03\x12\x01\x01"),
        ("/jetstream_proto.Orchestrator/Decode", b"\x2a\x04\x0a\x02hi"),
    ],
)
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("the queue is full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (KeyError("a bug"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_o91_errors_of_every_front_are_statuses(served, path, data, error, code):
    served.engine.submit_error = error
    call = served.channel.unary_stream(path)(data, timeout=TIMEOUT_S)
    status = await status_of(call)
    assert status.code() == code
    assert "a bug" not in status.details()
