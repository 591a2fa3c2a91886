"""The server as a process, over HTTP: loading, readiness, draining, ports."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys

import aiohttp

from tests.server.conftest import TIMEOUT_S
from tests.server.test_main import ROOT, Process, started


def session_of(server: Process) -> aiohttp.ClientSession:
    url = re.search(r"HTTP answers on (http://127.0.0.1:\d+)", server.log)[1]
    return aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


async def status_of(session: aiohttp.ClientSession, path: str) -> int:
    async with session.get(path) as response:
        return response.status


async def four_streams(session, num_tokens: int) -> list[aiohttp.ClientResponse]:
    """Streams that have begun."""
    body = {"prompt": "x", "max_tokens": num_tokens, "stream": True}
    return [await session.post("/v1/completions", json=body) for _ in range(4)]


async def events_of(response) -> list[str]:
    text = await response.text()
    return [part.removeprefix("data: ") for part in text.split("\n\n") if part]


async def test_o90_health_answers_over_http_while_loading():
    async with started() as server, session_of(server) as session:
        assert await status_of(session, "/health/live") == 200
        assert await status_of(session, "/health/ready") == 503
        await server.load()
        await server.logged("ready:")
        assert await status_of(session, "/health/ready") == 200
        assert await status_of(session, "/v1/models") == 200
        server.terminate()
        assert await server.exit_code() == 0


async def test_o53_sigterm_lets_http_streams_finish_and_refuses_new_requests():
    async with started("--drain_timeout_s=10") as server, session_of(server) as session:
        await server.load()
        await server.logged("ready:")
        streams = await four_streams(session, 100)
        server.terminate()
        await server.logged("draining")
        assert await status_of(session, "/health/ready") == 503
        assert await status_of(session, "/health/live") == 200
        async with session.post("/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 503
            assert "draining" in (await response.json())["error"]["message"]
        for stream in streams:
            *chunks, done = await events_of(stream)
            assert len(chunks) == 100
            assert done == "[DONE]"
        assert await server.exit_code() == 0


async def test_o53_with_no_time_to_drain_each_http_stream_ends_with_an_error_event():
    async with started("--drain_timeout_s=0") as server, session_of(server) as session:
        await server.load()
        await server.logged("ready:")
        streams = await four_streams(session, 10**6)
        server.terminate()
        for stream in streams:
            *_, last = await events_of(stream)
            assert "before this request finished" in json.loads(last)["error"]["message"]
        assert await server.exit_code() == 0


async def test_an_http_port_in_use_is_one_line_and_exit_code_1():
    async with started() as first:
        port = re.search(r"HTTP answers on .*:(\d+)", first.log)[1]
        command = [sys.executable, "-m", "tests.server.fake_server", "--port=0"]
        done = await asyncio.to_thread(
            subprocess.run,
            [*command, f"--http_port={port}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert done.returncode == 1
    assert f"jserve-serve: cannot serve HTTP on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


async def test_without_http_only_grpc_answers():
    async with started("--noenable_http") as server:
        await server.load()
        await server.logged("ready:")
        assert "HTTP answers" not in server.log
        server.terminate()
        assert await server.exit_code() == 0
