"""O53: SIGTERM on the real server, a process of its own with a tiny model, over gRPC and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

import aiohttp
import psutil
import pytest

from jserve.bench.served import served
from jserve.client import GenerateClient
from jserve.errors import EngineDead
from jserve.messages import GenerateRequest
from tests.e2e.real_engine import SETTINGS, alone, greedy, model

END_S = 20.0
ENDLESS = 4000  # tokens: seconds of work


class Started(NamedTuple):
    process: asyncio.subprocess.Process
    client: GenerateClient
    http: aiohttp.ClientSession


@contextlib.asynccontextmanager
async def started(drain_s: int) -> AsyncIterator[Started]:
    """A server that is ready, and clients of it."""
    settings = SETTINGS | {"model": model("random").folder, "drain_timeout_s": drain_s}
    async with (
        served(*(f"--{name}={value}" for name, value in settings.items())) as server,
        GenerateClient(server.target) as client,
        aiohttp.ClientSession(server.url) as http,
    ):
        yield Started(server.process, client, http)


async def begun_grpc(client: GenerateClient, prompt: list[int], num_tokens: int):
    """A stream that has begun, and the tokens that it brought."""
    stream = client.stream(GenerateRequest(prompt_token_ids=prompt, sampling=greedy(num_tokens)))
    return stream, list((await anext(stream)).token_ids)


async def rest_of_grpc(begun) -> list[int]:
    stream, head = begun
    return head + [i async for update in stream for i in update.token_ids]


async def begun_http(http: aiohttp.ClientSession, prompt: list[int], num_tokens: int):
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    response = await http.post("/v1/completions", json=body)
    return response.content, await response.content.readline()


async def rest_of_http(begun) -> list[str]:
    """The data of all events."""
    lines, head = begun
    found = [head, *[line async for line in lines]]
    return [line.decode()[6:-1] for line in found if line.strip()]


def ids_of(events: list[str]) -> list[int]:
    assert events[-1] == "[DONE]"
    return [i for event in events[:-1] for i in json.loads(event)["choices"][0]["token_ids"]]


async def ended(process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(END_S):
        return await process.wait()


@pytest.mark.slow
async def test_O53_within_the_drain_limit_streams_finish_and_new_requests_are_refused():
    num_tokens = 600
    async with started(drain_s=10) as (process, client, http):
        grpc = [await begun_grpc(client, [i], num_tokens) for i in (1, 2)]
        sse = [await begun_http(http, [i], num_tokens) for i in (3, 4)]
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        tasks = [asyncio.create_task(rest_of_grpc(begun)) for begun in grpc]
        tasks += [asyncio.create_task(rest_of_http(begun)) for begun in sse]
        await _refused(client, http)
        *found, three, four = await asyncio.gather(*tasks)
        assert await ended(process) == 0
    found += [ids_of(three), ids_of(four)]
    for i, token_ids in enumerate(found, 1):
        assert token_ids == alone([i], greedy(num_tokens))
    assert not [child for child in children if child.is_running()]


async def _refused(client: GenerateClient, http: aiohttp.ClientSession) -> None:
    """Returns when new requests meet a server that drains; the signal takes a moment."""

    async def probe_until_refused() -> None:
        while True:
            await client.generate(GenerateRequest(prompt_token_ids=[9], sampling=greedy(1)))

    with pytest.raises(EngineDead, match="draining"):
        await asyncio.wait_for(probe_until_refused(), END_S)
    async with http.post("/v1/completions", json={"prompt": [9], "max_tokens": 1}) as answer:
        assert (answer.status, "draining" in await answer.text()) == (503, True)
    async with http.get("/health/ready") as answer:
        assert answer.status == 503


@pytest.mark.slow
async def test_O53_with_no_time_to_drain_every_stream_ends_with_an_error():
    async with started(drain_s=0) as (process, client, http):
        grpc = [await begun_grpc(client, [i], ENDLESS) for i in (1, 2)]
        sse = [await begun_http(http, [i], ENDLESS) for i in (3, 4)]
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        ends = await asyncio.gather(*map(rest_of_grpc, grpc), return_exceptions=True)
        events = await asyncio.gather(*map(rest_of_http, sse))
        assert await ended(process) == 0
        assert time.monotonic() - begun < END_S / 2
    assert [type(end) for end in ends] == [EngineDead] * 2
    words = [str(end) for end in ends]
    words += [json.loads(of_stream[-1])["error"]["message"] for of_stream in events]
    assert all("shut down before the request ended" in said for said in words)


@pytest.mark.slow
async def test_O53_a_second_signal_ends_the_drain():
    async with started(drain_s=1000) as (process, client, http):
        grpc = await begun_grpc(client, [1], ENDLESS)
        sse = await begun_http(http, [3], ENDLESS)
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        await _refused(client, http)
        process.send_signal(signal.SIGTERM)
        ends = await asyncio.gather(
            *(rest_of_grpc(grpc), rest_of_http(sse)), return_exceptions=True
        )
        assert await ended(process) == 0
        assert time.monotonic() - begun < END_S / 2
    assert isinstance(ends[0], EngineDead)
    assert isinstance(ends[1], aiohttp.ClientError) or "error" in ends[1][-1]
