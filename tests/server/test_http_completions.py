"""Completions and chats over HTTP: streams, errors, disconnects, time limits, several prompts."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager

import aiohttp
import pytest

from jserve.errors import EngineDead, Overloaded, RequestFailed
from jserve.server import http_connection
from tests.server.conftest import TIMEOUT_S, serving, until
from tests.server.fake_engine import FakeEngine

TEXT = {"prompt": "abc", "max_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
BODIES = [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)]


@asynccontextmanager
async def api(engine=None, **settings):
    """Yields what is served, and how to post to it."""
    limit = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with (
        serving(engine, http=True, **settings) as served,
        aiohttp.ClientSession(served.http, timeout=limit) as session,
    ):
        yield served, session


def events_of(text: str) -> list:
    """The data of each event; the last one is "[DONE]" or what ended the stream."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    datas = [line.removeprefix("data: ") for line in lines]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


async def streamed(session, path, **body) -> list:
    async with session.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        return events_of(await response.text())


async def whole(session, path, status=200, headers=None, **body) -> dict:
    async with session.post(path, json=body, headers=headers) as response:
        assert response.status == status, await response.text()
        return await response.json()


def text_in(chunk: dict) -> str:
    return "".join(c.get("text") or c.get("delta", {}).get("content", "") for c in chunk["choices"])


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_stream_joins_to_the_whole_answer(path, body):
    async with api() as (_, session):
        [*chunks, done] = await streamed(session, path, **body)
        answer = (await whole(session, path, **body))["choices"][0]
        text = answer["text"] if "text" in answer else answer["message"]["content"]
        assert "".join(map(text_in, chunks)) == text == "t0 t1 t2 "
        assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == answer["finish_reason"]
        assert done == "[DONE]"
        assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize(
    ("options", "has_usage"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {}}, False),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": {"include_usage": True}}, True),
    ],
)
async def test_o84_usage_comes_once_at_the_end_and_only_where_it_is_asked_for(
    path, body, options, has_usage
):
    async with api() as (_, session):
        [*chunks, _] = await streamed(session, path, **body, **options)
    assert [("usage" in chunk) for chunk in chunks] == [False] * (len(chunks) - has_usage) + [
        True
    ] * has_usage
    if has_usage:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 3


async def test_continuous_usage_counts_up_with_each_chunk():
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with api() as (_, session):
        [*chunks, _] = await streamed(session, "/v1/completions", **TEXT, stream_options=options)
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 3]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_o85_a_bad_field_of_a_stream_is_an_error_before_any_event(path, body):
    async with api() as (_, session):
        for bad in ({"n": 0}, {"stream_options": 1}, {"stream_options": {"x": 1}}, {"bogus": 1}):
            error = await whole(session, path, 400, **{**body, **bad, "stream": True})
            assert error["error"]["param"] == next(iter(bad))
        assert (await streamed(session, path, **body))[-1] == "[DONE]"


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_o85_a_failure_in_mid_stream_is_an_event_after_which_the_stream_ends(path, body):
    engine = FakeEngine(interval_s=None)
    async with api(engine) as (_, session):
        post = asyncio.create_task(session.post(path, json=body | {"stream": True}))
        await until(lambda: engine.live)
        engine.step()
        response = await post
        engine.live[0].end("error", RequestFailed("the grammar has a dead end"))
        *_, last = events_of(await response.text())
    assert last["error"]["message"] == "the grammar has a dead end"
    assert last["error"]["type"] == "server_error"


async def test_o85_a_request_that_fails_before_its_first_token_has_a_status_of_its_own():
    async with api(FakeEngine(interval_s=None)) as (_, session):
        for stream in (True, False):
            body = TEXT | {"stream": stream, "timeout": 0.05}
            error = await whole(session, "/v1/completions", 504, **body)
            assert "0.05 s" in error["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompts", [["abc"], ["abc", "d", "ef"]])
async def test_o48_a_client_that_leaves_ends_its_requests_at_once(stream, prompts):
    engine = FakeEngine(interval_s=None)
    async with api(engine) as (_, session):
        body = {"prompt": prompts, "max_tokens": 5000, "stream": stream}
        post = asyncio.create_task(session.post("/v1/completions", json=body))
        await until(lambda: len(engine.live) == len(prompts))
        for _ in range(3):
            engine.step()
        if stream:
            (await post).close()
        else:
            post.cancel()
        await until(lambda: len(engine.abort_calls) == len(prompts))
        assert not engine.live


@pytest.mark.parametrize("stream", [True, False])
async def test_o49_clients_that_leave_the_queue_are_never_run(stream):
    engine = FakeEngine(interval_s=None, max_running=1)
    async with api(engine) as (_, session):
        body = TEXT | {"stream": stream}
        tasks = [
            asyncio.create_task(session.post("/v1/completions", json=body | {"seed": i}))
            for i in range(6)
        ]
        await until(lambda: len(engine.live) == 6)
        running = engine.live[0].request.sampling.seed
        for seed, task in enumerate(tasks):
            if seed != running:
                task.cancel()
        await until(lambda: len(engine.live) == 1)
        for _ in range(3):
            engine.step()
        assert engine.num_emitted == 3
        assert (await tasks[running]).status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_o50_one_client_chosen_id_names_two_live_requests(stream):
    engine = FakeEngine(interval_s=None)
    async with api(engine) as (_, session):
        headers = {"x-request-id": "same"}
        posts = [
            asyncio.create_task(
                session.post("/v1/completions", json=TEXT | {"stream": stream}, headers=headers)
            )
            for _ in range(2)
        ]
        await until(lambda: len(engine.live) == 2)
        assert len({live.request_id for live in engine.live}) == 2
        for _ in range(3):
            engine.step()
        for response in [await post for post in posts]:
            assert response.headers["x-request-id"] == "same"
            assert "t2 " in await response.text()


async def test_several_prompts_have_choices_in_order_and_one_usage():
    async with api() as (_, session):
        body = {"prompt": [[1, 2], [3]], "max_tokens": 2, "n": 2}
        answer = await whole(session, "/v1/completions", **body)
        [*chunks, _] = await streamed(session, "/v1/completions", **body)
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
        texts = {}
        for choice in (c for chunk in chunks for c in chunk["choices"]):
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        assert texts == {c["index"]: c["text"] for c in answer["choices"]}
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["usage"]["completion_tokens"] == 8


async def test_one_prompt_of_several_that_is_refused_refuses_all_and_leaves_nothing_behind():
    engine = FakeEngine(interval_s=None)
    async with api(engine) as (_, session):
        await whole(session, "/v1/completions", 400, prompt=["abc", ""])
        assert len(engine.requests) == 1
        assert not engine.live
        error = await whole(session, "/v1/completions", 400, prompt=["x"] * 513)
        assert "at most 512" in error["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_one_prompt_of_several_that_fails_ends_the_others(stream):
    engine = FakeEngine(interval_s=None)
    async with api(engine) as (_, session):
        body = {"prompt": ["abc", "d", "ef"], "max_tokens": 5000, "stream": stream}
        post = asyncio.create_task(session.post("/v1/completions", json=body))
        await until(lambda: len(engine.live) == 3)
        engine.step()
        engine.live[1].end("error", RequestFailed("no"))
        response = await post
        assert response.status == (200 if stream else 500)
        assert '"message":"no"' in await response.text()
        await until(lambda: not engine.live)


async def test_the_earlier_one_of_both_time_limits_counts():
    async with api() as (served, session):
        headers = {"x-request-timeout-ms": "2500"}
        for limit, wanted in ((None, 2.5), (1, 1), (9, 2.5), (0, 0)):  # the last: not ignored
            await whole(session, "/v1/completions", **TEXT, headers=headers, timeout=limit)
            assert served.engine.requests[-1].timeout_s == wanted
        for text in ("0", "-1", "soon", "1e3", "9" * 50):
            headers = {"x-request-timeout-ms": text}
            await whole(session, "/v1/completions", 400, headers, **TEXT)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("the queue is full", 2.5), 429, "rate_limit_error"),
        (EngineDead("the engine failed"), 503, "server_error"),
        (RequestFailed("no"), 500, "server_error"),
    ],
)
async def test_what_the_engine_refuses_has_the_status_and_body_that_clients_know(
    error, status, kind
):
    async with api() as (served, session):
        served.engine.submit_error = error
        async with session.post("/v1/completions", json=TEXT) as response:
            assert response.status == status
            assert (await response.json())["error"]["type"] == kind
            if status == 429:
                assert response.headers["retry-after"] == "3"
                assert response.headers["retry-after-ms"] == "2500"


async def test_an_error_quotes_only_the_beginning_of_what_is_wrong():
    async with api() as (_, session):
        error = await whole(session, "/v1/completions", 400, **TEXT | {"seed": "x" * 10**6})
        assert len(error["error"]["message"]) < 1100
        deep = 1
        for _ in range(700):  # deeper than Python's own recursion, once quoted
            deep = [deep]
        await whole(session, "/v1/completions", 400, **TEXT | {"stop": deep})
        error = await whole(session, "/v1/completions", 400, **TEXT | {"x" * 10**6: 1})
        assert len(error["error"]["message"]) < 1100


async def test_what_goes_wrong_inside_is_not_told_to_the_client():
    async with api() as (served, session):
        served.engine.submit_error = ZeroDivisionError("secret")
        error = await whole(session, "/v1/completions", 500, **TEXT)
        assert "secret" not in error["error"]["message"]
        assert "ZeroDivisionError" in error["error"]["message"]


RAW = [
    (b"{", "application/json", 400),
    (b"", "application/json", 400),
    (b"[]", "application/json", 400),
    (b'{"prompt": "\xff"}', "application/json", 400),
    (b'{"prompt": "\\ud800"}', "application/json", 400),
    (b'{"prompt": "x", "temperature": NaN}', "application/json", 400),
    (b'{"prompt": "x", "temperature": -Infinity}', "application/json", 400),
    (b'{"prompt": "x", "temperature": 1e400}', "application/json", 400),
    (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "application/json", 400),
    (b'{"a":' * 100_000, "application/json", 400),
    (
        b'{"prompt": "x", "guided_json": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
        "application/json",
        400,
    ),
    (b'{"prompt": "x"}', "text/plain", 415),
    (b'{"prompt": "x"}', "application/x-www-form-urlencoded", 415),
    (b'{"prompt": "' + b"x" * 2**17 + b'"}', "application/json", 413),
]


@pytest.mark.parametrize(("data", "kind", "status"), RAW)
async def test_o28_o88_a_bad_body_is_the_clients_mistake(data, kind, status):
    async with api(max_message_bytes=2**17 if status == 413 else 2**20) as (_, session):
        for path, _ in BODIES:
            headers = {"content-type": kind}
            async with session.post(path, data=data, headers=headers) as response:
                assert response.status == status
                assert (await response.json())["error"]["message"]
        assert await whole(session, "/v1/completions", **TEXT)


async def test_o88_a_body_without_an_announced_length_is_cut_off_at_the_limit():
    async def endless():
        sent = 0
        while sent < 2**20:
            yield b"x" * 2**12
            sent += 2**12

    async with api(max_message_bytes=2**16) as (_, session):
        headers = {"content-type": "application/json"}
        async with session.post("/v1/completions", data=endless(), headers=headers) as response:
            assert response.status == 413


async def test_calls_beyond_the_limit_get_429_and_health_answers():
    engine = FakeEngine(interval_s=None)
    async with api(engine, max_open_streams=1) as (_, session):
        first = asyncio.create_task(session.post("/v1/completions", json=TEXT))
        await until(lambda: engine.live)
        await whole(session, "/v1/completions", 429, **TEXT)
        async with session.get("/health") as response:
            assert response.status == 200
        first.cancel()
        await until(lambda: not engine.live)


async def test_a_reader_that_takes_nothing_loses_its_connection_and_its_request(monkeypatch):
    monkeypatch.setattr(http_connection, "STALL_LIMIT_S", 0.1)
    engine = FakeEngine(interval_s=None)
    engine.padding = "x" * 2**20
    async with api(engine) as (served, session):
        host, port = served.http.removeprefix("http://").split(":")
        body = json.dumps(TEXT | {"max_tokens": 5000, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n"
        with socket.create_connection((host, int(port))) as reader:
            reader.sendall(f"{head}content-type: application/json\r\n\r\n{body}".encode())
            await until(lambda: engine.live)
            for _ in range(16):  # more than the system's buffers hold
                engine.step()
            await until(lambda: not engine.live)
        assert await whole_text(session, engine)


async def whole_text(session, engine) -> str:
    engine.padding = ""
    post = asyncio.create_task(whole(session, "/v1/completions", **TEXT))
    await until(lambda: engine.live)
    for _ in range(3):
        engine.step()
    return (await post)["choices"][0]["text"]


async def test_other_streams_go_on_while_many_prompts_are_prepared():
    turns, at_submit = [0], []

    def count() -> None:
        turns[0] += 1
        asyncio.get_running_loop().call_soon(count)

    class Watched(FakeEngine):
        async def submit(self, request):
            at_submit.append(turns[0])
            return await super().submit(request)

    async with api(Watched()) as (_, session):
        count()
        await whole(session, "/v1/completions", prompt=["a", "b", "c", "d"], max_tokens=1)
    assert at_submit == sorted(set(at_submit)), "the loop turns between two of them"


@pytest.mark.parametrize("more", [{"logprobs": 2}, {"n": 20}])
async def test_an_answer_that_may_be_long_is_written_while_it_is_taken(more):
    async with api() as (_, session):
        async with session.post("/v1/completions", json=TEXT | more) as response:
            assert response.headers["transfer-encoding"] == "chunked"
            long = await response.json()
        short = await whole(session, "/v1/completions", **TEXT)
        assert long.keys() == short.keys()
        assert long["choices"][0]["text"] == short["choices"][0]["text"]
        assert len(long["choices"]) == more.get("n", 1)
