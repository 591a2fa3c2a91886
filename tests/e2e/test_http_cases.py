"""Fault reports about slow readers, disconnects, limits and bad fields, on the real engine behind
real HTTP."""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp
import pytest

from tests.e2e.real_engine import (
    alone,
    arranged,
    generate,
    greedy,
    idle,
    prompt_of,
    serving_real,
    tokens_of,
    value,
)
from tests.server.conftest import until

READER_PAUSE_S = 0.005  # several times what a step takes
AT_ONCE_S = 2.0
ENDLESS = 4000  # tokens: seconds of work
LIMIT = 128
COMPLETIONS = "/v1/completions"


def asking(prompt, max_tokens: int, **fields) -> dict:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    return body | fields


def session_of(served) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(served.http, timeout=aiohttp.ClientTimeout(total=60))


async def chunks_of(response):
    """The chunks of a stream; fails unless it ends with [DONE]."""
    async for line in response.content:
        data = line.decode().removeprefix("data: ").strip()
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)
    raise AssertionError("the stream ended without [DONE]")


async def ids_of(response, pause_s: float = 0.0) -> list[int]:
    ids, ends = [], []
    async for chunk in chunks_of(response):
        for choice in chunk["choices"]:
            ids += choice["token_ids"]
            ends.append(choice["finish_reason"])
        if pause_s:
            await asyncio.sleep(pause_s)  # the subject: a reader slower than the engine
    assert ends[-1] == "length"
    assert set(ends[:-1]) == {None}
    return ids


async def whole(session, body, status=200) -> dict:
    async with session.post(COMPLETIONS, json=body) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def alive(session) -> bool:
    [choice] = (await whole(session, asking([4, 5], 3)))["choices"]
    return choice["token_ids"] == alone([4, 5], greedy(3))


async def test_o05_slow_readers_of_events_get_every_token_in_order_and_then_the_end():
    prompts = [prompt_of(5 + i, i) for i in range(8)]
    want = tokens_of(generate(arranged(), prompts, greedy(256)))

    async def read_slowly(session, prompt):
        body = asking(prompt, 256, stream=True)
        async with session.post(COMPLETIONS, json=body) as response:
            return await ids_of(response, READER_PAUSE_S)

    async with serving_real(arranged(), http=True) as s, session_of(s) as session:
        assert await asyncio.gather(*(read_slowly(session, p) for p in prompts)) == want


@pytest.mark.parametrize("length", [LIMIT + 1, 10 * LIMIT])
async def test_o17_an_over_long_prompt_is_refused_and_others_go_on(length):
    neighbours = [prompt_of(9, 1), prompt_of(30, 2)]
    want = [alone(prompt, greedy(60)) for prompt in neighbours]
    engine = arranged(max_model_len=LIMIT)
    async with serving_real(engine, http=True) as s, session_of(s) as session:
        bodies = [asking(prompt, 60, stream=True) for prompt in neighbours]
        others = [await session.post(COMPLETIONS, json=body) for body in bodies]
        for stream in (True, False):
            body = asking(prompt_of(length), 1, stream=stream)
            error = (await whole(session, body, 400))["error"]
            assert f"max_model_len={LIMIT}" in error["message"]
        assert [await ids_of(other) for other in others] == want
        assert await alive(session)


@pytest.mark.parametrize("stream", [True, False])
async def test_o48_a_client_that_disconnects_stops_its_generation(stream):
    engine = arranged(max_num_seqs=1)
    async with serving_real(engine, http=True) as s, session_of(s) as session:
        body = asking([1, 2, 3], ENDLESS, stream=stream)
        post = asyncio.create_task(session.post(COMPLETIONS, json=body))
        if stream:
            chunks = chunks_of(response := await post)
            for _ in range(3):
                await anext(chunks)
            response.close()
        else:
            await until(lambda: value(engine, "time_to_first_token_seconds_count") == 1)
            post.cancel()
        begun = time.monotonic()
        await until(lambda: value(engine, "requests_running") == 0)
        assert time.monotonic() - begun < AT_ONCE_S
        assert value(engine, "requests_finished_total", reason="abort") == 1
        assert value(engine, "output_tokens_total") < ENDLESS
        assert await alive(session)


async def test_o49_queued_requests_whose_clients_have_gone_are_never_run():
    engine = arranged(max_num_seqs=1)
    async with serving_real(engine, http=True) as s, session_of(s) as session:
        busy = await session.post(COMPLETIONS, json=asking([1, 2], ENDLESS, stream=True))
        queued = [
            asyncio.create_task(
                session.post(COMPLETIONS, json=asking([i] * 50, 9, stream=bool(i % 2)))
            )
            for i in range(5)
        ]
        await until(lambda: engine.stats()["waiting"] == 5)
        for task in queued:
            task.cancel()
        await until(lambda: engine.stats()["waiting"] == 0)
        busy.close()
        await idle(engine)
        assert value(engine, "requests_finished_total", reason="abort") == 6
        assert value(engine, "time_to_first_token_seconds_count") == 1


async def test_o50_aborting_one_of_two_calls_with_one_id_leaves_the_other_as_it_was():
    want = alone([1, 2, 3], greedy(200))
    async with serving_real(arranged(), http=True) as s, session_of(s) as session:
        named = {"headers": {"x-request-id": "same"}}
        first = await session.post(COMPLETIONS, json=asking([1, 2, 3], 200, stream=True), **named)
        second = await session.post(COMPLETIONS, json=asking([9], ENDLESS, stream=True), **named)
        second.close()
        assert await ids_of(first) == want
        assert await alive(session)


async def test_o86_health_answers_while_a_body_of_20_mb_is_read_and_streams_keep_flowing():
    engine = arranged()
    settings = {"http": True, "max_message_bytes": 32 * 2**20}
    async with serving_real(engine, **settings) as s, session_of(s) as session:
        stream = await session.post(COMPLETIONS, json=asking([1, 2], 2000, stream=True))
        reading = asyncio.create_task(ids_of(stream))
        data = json.dumps(asking("word " * 4_000_000, 1)).encode()
        headers = {"content-type": "application/json"}

        async def send_three():
            for _ in range(3):
                async with session.post(COMPLETIONS, data=data, headers=headers) as response:
                    assert response.status == 400

        sending = asyncio.create_task(send_three())
        waits = []
        while not sending.done() or len(waits) < 20:
            for path in ("/health", "/metrics"):
                begun = time.monotonic()
                async with session.get(path) as response:
                    assert response.status == 200
                waits.append(time.monotonic() - begun)
            await asyncio.sleep(0.02)  # the probes' rhythm
        await sending
        assert len(await reading) == 2000
        # 0.2 s on a quiet machine; the client's own work for such bodies is in it, too.
        assert sorted(waits)[int(len(waits) * 0.95)] < 0.5


BAD_FIELDS = [
    ({"prompt": None}, 400),
    ({"prompt": 7}, 400),
    ({"prompt": {}}, 400),
    ({"prompt": []}, 400),
    ({"prompt": ""}, 400),
    ({"prompt": [1, "a"]}, 400),
    ({"prompt": ["a", 1]}, 400),
    ({"prompt": [[]]}, 400),
    ({"prompt": [99999]}, 400),
    ({"prompt": [-1]}, 400),
    ({"prompt": [True]}, 400),
    ({"model": "another"}, 404),
    ({"model": 1}, 400),
    ({"max_tokens": -1}, 400),
    ({"max_tokens": "many"}, 400),
    ({"max_tokens": 10**12}, 400),
    ({"temperature": "hot"}, 400),
    ({"top_p": 0}, 400),
    ({"n": 0}, 400),
    ({"n": 1000}, 400),
    ({"logprobs": 21}, 400),
    ({"logprobs": True}, 400),
    ({"stop": 5}, 400),
    ({"stop": [""]}, 400),
    ({"seed": 1.5}, 400),
    ({"logit_bias": {"a": 1}}, 400),
    ({"echo": "yes"}, 400),
    ({"stream": "yes"}, 400),
    ({"guided_regex": 5}, 400),
    ({"priority": 2**40}, 400),
    ({"timeout": 0}, 400),
    ({"request_class": "gold"}, 400),
    ({"messages": []}, 400),
    ({"tools": [1]}, 400),
]


async def test_o87_what_a_client_gets_wrong_is_never_a_server_error():
    async with serving_real(arranged(), http=True) as s, session_of(s) as session:
        for bad, status in BAD_FIELDS:
            error = (await whole(session, asking("x", 1) | bad, status))["error"]
            assert error["type"] == "invalid_request_error", bad
            assert next(iter(bad)) in error["message"], (bad, error)
        for messages in (None, [], "hi", [1], [{}], [{"role": 1}], [{"role": "a", "content": 1}]):
            body = {"messages": messages, "max_tokens": 1}
            async with session.post("/v1/chat/completions", json=body) as response:
                assert response.status == 400, messages
        assert await alive(session)
