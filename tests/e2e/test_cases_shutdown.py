"""O53: SIGTERM on the real server, as a process of its own with a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from jserve.client import GenerateClient
from jserve.errors import EngineDead
from jserve.messages import GenerateRequest
from tests.e2e.real_engine import SETTINGS, alone, greedy, model

ROOT = Path(__file__).parents[2]
START_S = 240.0  # a cold start compiles every bucket
END_S = 20.0
ENDLESS = 4000  # tokens: seconds of work


@contextlib.asynccontextmanager
async def started(drain_s: int) -> AsyncIterator[tuple[asyncio.subprocess.Process, GenerateClient]]:
    """A server that is ready, and a client of it."""
    flags = [f"--{name}={value}" for name, value in SETTINGS.items()]
    flags += [
        f"--model={model('random').folder}",
        "--port=0",
        "--http_port=0",
        f"--drain_timeout_s={drain_s}",
    ]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, ROOT / "scripts" / "serve.py", *flags),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(START_S):
            while True:
                line = (await process.stderr.readline()).decode()
                assert line, "the server ended before it was ready"
                if found := re.search(r"ready: tiny on .*:(\d+),", line):
                    break
        async with GenerateClient(f"127.0.0.1:{found[1]}") as client:
            yield process, client
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def four_streams(client: GenerateClient, num_tokens: int):
    """Streams that have begun, and the tokens that they brought."""
    streams, heads = [], []
    for i in range(4):
        request = GenerateRequest(prompt_token_ids=[i + 1], sampling=greedy(num_tokens))
        streams.append(client.stream(request))
        heads.append(list((await anext(streams[-1])).token_ids))
    return streams, heads


async def rest(stream) -> list[int]:
    return [i async for update in stream for i in update.token_ids]


async def ended(process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(END_S):
        await process.stderr.read()
        return await process.wait()


@pytest.mark.slow
async def test_O53_within_the_drain_limit_streams_finish_and_new_requests_are_refused():
    num_tokens = 600
    async with started(drain_s=10) as (process, client):
        streams, heads = await four_streams(client, num_tokens)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        tasks = [asyncio.create_task(rest(stream)) for stream in streams]
        await _refused(client)
        tails = await asyncio.gather(*tasks)
        assert await ended(process) == 0
    for i, (head, tail) in enumerate(zip(heads, tails, strict=True)):
        assert head + tail == alone([i + 1], greedy(num_tokens))
    assert not [child for child in children if child.is_running()]


async def _refused(client: GenerateClient) -> None:
    """Returns when a new request meets a server that drains; the signal takes a moment."""

    async def probe_until_refused() -> None:
        while True:
            await client.generate(GenerateRequest(prompt_token_ids=[9], sampling=greedy(1)))

    with pytest.raises(EngineDead, match="draining"):
        await asyncio.wait_for(probe_until_refused(), END_S)


@pytest.mark.slow
async def test_O53_with_no_time_to_drain_every_stream_ends_with_an_error():
    async with started(drain_s=0) as (process, client):
        streams, _ = await four_streams(client, ENDLESS)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        ends = await asyncio.gather(*map(rest, streams), return_exceptions=True)
        assert await ended(process) == 0
        assert time.monotonic() - begun < END_S / 2
    assert [type(end) for end in ends] == [EngineDead] * 4
    assert all("shut down before the request ended" in str(end) for end in ends)
