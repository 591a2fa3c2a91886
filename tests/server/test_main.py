"""The server as a process: loading, readiness, draining, exit codes, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jserve.client import GenerateClient
from jserve.errors import EngineDead
from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams
from tests.server.conftest import TIMEOUT_S
from tests.server.otlp_collector import collector

ROOT = Path(__file__).parents[2]


class Process:
    """A fake_server process and what it logs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log = ""
        self.port = 0

    async def logged(self, pattern: str) -> re.Match[str]:
        """Returns the match of the first logged line with `pattern`."""
        async with asyncio.timeout(TIMEOUT_S):
            while line := (await self.process.stderr.readline()).decode():
                self.log += line
                if found := re.search(pattern, line):
                    return found
        raise AssertionError(f"{pattern!r} was not logged:\n{self.log}")

    async def load(self, outcome: str = "go") -> None:
        self.process.stdin.write(f"{outcome}\n".encode())
        await self.process.stdin.drain()

    async def exit_code(self) -> int:
        async with asyncio.timeout(TIMEOUT_S):
            self.log += (await self.process.stderr.read()).decode()
            return await self.process.wait()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"


@contextlib.asynccontextmanager
async def started(*flags: str) -> AsyncIterator[Process]:
    """A server that is bound and loading."""
    pipe = asyncio.subprocess.PIPE
    command = [
        sys.executable,
        "-m",
        "tests.server.fake_server",
        "--port=0",
        "--http_port=0",
        *flags,
    ]
    process = Process(
        await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stderr=pipe)
    )
    try:
        process.port = int((await process.logged(r"health answers on .*:(\d+)"))[1])
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.process.kill()
        await process.process.wait()


async def streamed(client: GenerateClient, num_tokens: int, begun: asyncio.Event) -> list[int]:
    ids: list[int] = []
    sampling = SamplingParams(max_tokens=num_tokens)
    async for update in client.stream(GenerateRequest(prompt="x", sampling=sampling)):
        ids += update.token_ids
        begun.set()
    return ids


async def four_streams(client: GenerateClient, num_tokens: int) -> list[asyncio.Task[list[int]]]:
    """Starts four streams and returns when each has brought something."""
    begun = [asyncio.Event() for _ in range(4)]
    tasks = [asyncio.create_task(streamed(client, num_tokens, b)) for b in begun]
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*(b.wait() for b in begun))
    return tasks


async def test_o90_the_process_answers_not_serving_while_loading_and_logs_one_ready_line():
    async with started() as server, GenerateClient(server.target) as client:
        with pytest.raises(EngineDead, match="NOT_SERVING"):
            await client.wait_ready(0.3)
        await server.load()
        await client.wait_ready(TIMEOUT_S)
        server.terminate()
        assert await server.exit_code() == 0
    assert len(re.findall(r"ready: smollm2-135m on 127.0.0.1:\d+, [\d.]+ s", server.log)) == 1


async def test_o53_sigterm_lets_streams_finish_and_refuses_new_ones():
    async with started("--drain_timeout_s=10") as server, GenerateClient(server.target) as client:
        await server.load()
        await client.wait_ready(TIMEOUT_S)
        tasks = await four_streams(client, 100)
        assert not psutil.Process(server.process.pid).children()
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            server.terminate()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
        with pytest.raises(EngineDead, match="draining"):
            await client.generate(GenerateRequest(prompt="x"))
        async with asyncio.timeout(TIMEOUT_S):
            assert await asyncio.gather(*tasks) == [list(range(100))] * 4
        assert await server.exit_code() == 0


async def test_o53_with_no_time_to_drain_each_stream_ends_with_an_error():
    async with started("--drain_timeout_s=0") as server, GenerateClient(server.target) as client:
        await server.load()
        await client.wait_ready(TIMEOUT_S)
        tasks = await four_streams(client, 10**6)
        server.terminate()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineDead] * 4
        assert all("before this request finished" in str(end) for end in ends)
        assert await server.exit_code() == 0


async def test_o53_a_second_signal_stops_at_once():
    async with started("--drain_timeout_s=1000") as server, GenerateClient(server.target) as client:
        await server.load()
        await client.wait_ready(TIMEOUT_S)
        tasks = await four_streams(client, 10**6)
        server.terminate()
        await server.logged("draining")
        server.terminate()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, Exception) for end in ends)
        assert await server.exit_code() == 0


async def test_o53_sigterm_while_loading_ends_the_process():
    async with started() as server:
        server.terminate()
        begun = time.monotonic()
        assert await server.exit_code() == 0
        assert time.monotonic() - begun < 5


async def test_a_model_that_cannot_be_loaded_is_one_line_and_exit_code_1():
    async with started() as server:
        await server.load("fail")
        assert await server.exit_code() == 1
    assert "jserve-serve: model.gguf: the file is damaged\n" in server.log
    assert "Traceback" not in server.log


async def test_a_port_in_use_is_one_line_and_exit_code_1():
    async with started() as first:
        command = [sys.executable, "-m", "tests.server.fake_server", f"--port={first.port}"]
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    assert done.returncode == 1
    assert f"jserve-serve: cannot listen on 127.0.0.1:{first.port}" in done.stderr
    assert "Traceback" not in done.stderr


async def test_the_metrics_endpoint_exports_the_engines_registry(unused_tcp_port):
    async with started(f"--metrics_port={unused_tcp_port}") as server:
        await server.load()
        await server.logged("ready:")
        url = f"http://127.0.0.1:{unused_tcp_port}/metrics"
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
        assert "jserve_compilations_after_warmup_total 0.0" in page
        server.terminate()
        assert await server.exit_code() == 0


async def test_the_access_log_and_the_last_spans_are_complete_when_the_process_ends(tmp_path):
    log = tmp_path / "access.log"
    with collector() as (endpoint, received):
        async with started(f"--access_log={log}", f"--otlp_endpoint={endpoint}") as server:
            await server.load()
            await server.logged("ready:")
            async with GenerateClient(server.target) as client:
                await client.generate(GenerateRequest(prompt="x", request_id="last"))
            server.terminate()
            assert await server.exit_code() == 0
    [line] = map(json.loads, log.read_text().splitlines())
    assert (line["request_id"], line["code"]) == ("last", "OK")
    assert [path for path, _, body in received if b"last" in body] == ["/v1/traces"]


def test_a_device_that_does_not_answer_cannot_keep_the_process():
    """Its thread may sit in a library that waits for it as the interpreter shuts down."""
    code = """
import atexit, logging, threading
from jserve.engine.async_engine import ENGINE_THREAD
from jserve.server.main import leave_threads_behind
stuck = threading.Event()
threading.Thread(target=stuck.wait, name=ENGINE_THREAD, daemon=True).start()
atexit.register(stuck.wait)
leave_threads_behind()
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT_S).returncode == 0


def test_the_server_does_not_import_jax():
    code = "import sys, jserve.server.main, jserve.client; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
