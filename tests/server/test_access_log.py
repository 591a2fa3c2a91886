"""The access log: a line for each call, however it ends, and nothing of what was said."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from jserve.config import ServerSettings
from jserve.errors import InvalidRequest, Overloaded, RequestFailed, Unauthenticated
from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams
from jserve.server.access_log import AccessLog
from jserve.server.call_logs import CallLogs
from jserve.server.caller import Caller, Gate
from jserve.server.front import Call, Front
from jserve.server.grpc_service import GENERATE_SERVICE, SERVICE, create_server
from jserve.server.health import EngineHealth
from jserve.server.http_api import make_app
from jserve.server.http_server import HttpServer
from jserve.server.proto import generate_pb2 as pb
from jserve.server.rpc import stub_of
from tests.server.fake_engine import FakeEngine

SECRET = "kumquat marmalade"
CALL = Call(method="/v1/completions", caller=Caller(name="ann", tenant="acme"), peer="127.0.0.1:9")


def lines(path: Path) -> list[dict]:
    text = path.read_text()
    assert SECRET not in text
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def logged(tmp_path):
    """A log, a front that it observes, and how to read what it wrote."""
    path = tmp_path / "access.log"
    log = AccessLog(str(path))

    def read() -> list[dict]:
        log.close()
        return lines(path)

    engine, front = FakeEngine(), Front(observers=[log])
    front.open(engine)
    return engine, front, read


async def test_a_request_is_one_line_with_who_what_and_how_long(logged):
    _, front, read = logged
    request = GenerateRequest(
        prompt=SECRET, request_class="chat", sampling=SamplingParams(max_tokens=3, n=2)
    )
    async with await front.submit(request, CALL) as answer:
        async for _ in answer:
            pass
    [line] = read()
    assert line["time"].endswith("+00:00")
    assert [line[k] for k in ("method", "peer", "caller", "tenant")] == [
        *("/v1/completions", "127.0.0.1:9", "ann", "acme")
    ]
    assert (line["request_id"], line["request_class"]) == ("fake-0", "chat")
    assert (line["code"], line["status"], line["error"]) == ("OK", 200, None)
    assert line["finish_reasons"] == ["length", "length"]
    assert (line["prompt_tokens"], line["output_tokens"]) == (len(SECRET), 6)
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["e2e_ms"]


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (InvalidRequest(f"{SECRET} is no prompt"), "INVALID_ARGUMENT", 400),
        (Overloaded("full"), "RESOURCE_EXHAUSTED", 429),
        (KeyError(SECRET), "INTERNAL", 500),
    ],
)
async def test_a_refused_request_is_logged_by_the_errors_kind_alone(logged, error, code, status):
    engine, front, read = logged
    engine.submit_error = error
    with pytest.raises(type(error)):
        await front.submit(GenerateRequest(prompt=SECRET), CALL)
    [line] = read()
    assert (line["code"], line["status"], line["error"]) == (code, status, type(error).__name__)
    assert line["prompt_tokens"] is line["ttft_ms"] is None
    assert line["output_tokens"] == 0


async def test_a_request_that_fails_and_one_whose_reader_leaves_are_told_apart(logged):
    engine, front, read = logged
    engine.interval_s = None
    left = await front.submit(GenerateRequest(prompt=SECRET), CALL)
    engine.step()
    assert await anext(aiter(left))
    left.close()
    failed = await front.submit(GenerateRequest(prompt=SECRET), CALL)
    engine.live[0].end("error", RequestFailed(SECRET))
    with pytest.raises(RequestFailed):
        async for _ in failed:
            pass
    failed.close()
    first, second = read()
    assert (first["code"], first["status"], first["finish_reasons"]) == ("CANCELLED", 499, [])
    assert first["output_tokens"] == 1
    assert 0 <= first["ttft_ms"] <= first["e2e_ms"]
    assert (second["code"], second["status"], second["finish_reasons"]) == (
        *("INTERNAL", 500),
        ["error"],
    )


class AdasGate:
    """Knows one key."""

    def admit(self, key: str | None, certificate: str) -> Caller:
        if key != "adas":
            raise Unauthenticated("this API key is not known")
        return Caller(name="ada")


@asynccontextmanager
async def both_servers(path: Path, gate: Gate | None = None):
    """gRPC and HTTP as main.py starts them, with an access log."""
    logs = CallLogs(ServerSettings(access_log=str(path)), "fake")
    front, settings = Front(gate, logs.observers), ServerSettings(port=0, http_port=0)
    health = EngineHealth(lambda: front.is_ready, [SERVICE])
    server, port = create_server(settings, front, health, logs.interceptors)
    http = HttpServer(logs.around(make_app(front, settings)), settings)
    front.open(FakeEngine())
    await asyncio.gather(health.refresh(), server.start(), http.start())
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel, http.url
    finally:
        await asyncio.gather(server.stop(0), http.stop(0))
        logs.close()


async def test_calls_that_never_become_requests_are_logged_once_too(tmp_path):
    path = tmp_path / "access.log"
    async with both_servers(path) as (channel, url):
        stub = stub_of(channel, GENERATE_SERVICE)
        garbage = channel.unary_unary(f"/{SERVICE}/Generate")
        with pytest.raises(grpc.aio.AioRpcError):
            await garbage(b"\xff" + SECRET.encode())
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Generate(pb.GenerateRequest(prompt=SECRET, model="another"))
        await stub.Generate(pb.GenerateRequest(prompt=SECRET))
        async for _ in stub.GenerateStream(pb.GenerateRequest(prompt=SECRET)):
            pass
        async with aiohttp.ClientSession(url) as session:
            for target in ("/nowhere?q=" + SECRET, "/health", "/metrics", "/v1/models"):
                async with session.get(target):
                    pass
    seen = [(line["method"], line["code"], line["status"]) for line in lines(path)]
    assert seen == [
        (f"{SERVICE}/Generate", "INVALID_ARGUMENT", 400),
        (f"{SERVICE}/Generate", "NOT_FOUND", 404),
        (f"{SERVICE}/Generate", "OK", 200),
        (f"{SERVICE}/GenerateStream", "OK", 200),
        ("/nowhere", "NOT_FOUND", 404),
        ("/v1/models", "OK", 200),
    ]
    assert all(line["peer"] and line["e2e_ms"] >= 0 for line in lines(path))


async def test_refusals_name_the_caller_as_far_as_it_is_known(tmp_path):
    path = tmp_path / "access.log"
    async with both_servers(path, AdasGate()) as (channel, url):
        garbage = channel.unary_unary(f"/{SERVICE}/Generate")
        async with aiohttp.ClientSession(url) as session:
            for key in ("adas", "eves"):
                headers = {"authorization": f"Bearer {key}"}
                with pytest.raises(grpc.aio.AioRpcError):
                    await garbage(b"\xff", metadata=tuple(headers.items()))
                for target in ("/v1/models", "/metrics"):
                    async with session.get(target, headers=headers):
                        pass
    # Sorted: a gRPC client may have its status before the server has its line.
    seen = sorted((line["caller"], line["method"], line["status"]) for line in lines(path))
    assert seen == [
        *(("", "/metrics", 401), ("", "/v1/models", 401), ("", f"{SERVICE}/Generate", 401)),
        ("ada", "/metrics", 403),
        ("ada", "/v1/models", 200),
        ("ada", f"{SERVICE}/Generate", 400),
    ]


async def test_a_request_that_a_router_aborts_is_a_line_of_its_own_call(tmp_path):
    path = tmp_path / "access.log"
    service = "vllm.grpc.engine.VllmEngine"
    async with both_servers(path) as (channel, _):
        call = channel.unary_stream(f"/{service}/Generate")(
            vllm.GenerateRequest(
                text=SECRET,
                request_id="mine",
                stream=True,
                sampling_params=vllm.SamplingParams(max_tokens=9000),
            ).SerializeToString()
        )
        assert await call.read()
        abort = vllm.AbortRequest(request_ids=["mine"])
        await channel.unary_unary(f"/{service}/Abort")(abort.SerializeToString())
        while await call.read() is not grpc.aio.EOF:
            pass
    seen = [(line["method"], line.get("request_id")) for line in lines(path)]
    assert sorted(seen, key=str) == [(f"{service}/Abort", None), (f"{service}/Generate", "mine")]
