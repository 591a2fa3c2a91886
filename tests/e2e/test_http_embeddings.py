"""/v1/embeddings over a real engine and a real port, by the unmodified `openai` package and raw."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import openai
import pytest

from jserve.errors import Overloaded
from jserve.server import http_embeddings
from jserve.server.caller import Caller
from jserve.server.quota import CallerQuota, QuotaLimits
from tests.e2e.real_engine import (
    arranged,
    assert_balanced,
    greedy,
    prompt_of,
    reference,
    serving_real,
)
from tests.e2e.test_embeddings import CLOSE, embedded
from tests.server.conftest import TIMEOUT_S, until

TEXTS = ["one", "a somewhat longer text", "x" * 150]
D = 384


@asynccontextmanager
async def served(engine=None, **settings):
    """Yields what is served, and OpenAI's client of it."""
    async with serving_real(engine or arranged(), http=True, **settings) as server:
        at = {"base_url": f"{server.http}/v1", "timeout": TIMEOUT_S}
        async with openai.AsyncOpenAI(api_key="none", max_retries=0, **at) as client:
            yield server, client


async def test_the_openai_package_gets_the_engines_vectors():
    async with served() as (_, client):
        answers = [
            await client.embeddings.create(model="tiny", input=TEXTS),  # asks for base64
            await client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float"),
        ]
        one = await client.embeddings.create(model="tiny", input=TEXTS[1], user="somebody")
        last = await client.embeddings.create(
            model="tiny", input=TEXTS, dimensions=D, extra_body={"pooling": "last"}
        )
        mean = await client.embeddings.create(
            model="tiny", input=TEXTS, extra_body={"pooling": "mean"}
        )
    expected = embedded(reference(), TEXTS, "last")
    for answer in (*answers, last):
        assert [entry.index for entry in answer.data] == [0, 1, 2]
        np.testing.assert_allclose([e.embedding for e in answer.data], expected, **CLOSE)
        assert answer.model == "tiny"
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, TEXTS))
    np.testing.assert_allclose(one.data[0].embedding, expected[1], **CLOSE)
    of_mean = embedded(reference(), TEXTS, "mean")
    np.testing.assert_allclose([e.embedding for e in mean.data], of_mean, **CLOSE)


async def test_ids_are_taken_as_they_are():
    prompts = [prompt_of(9), prompt_of(40, start=3)]
    async with served() as (_, client):
        both = await client.embeddings.create(model="tiny", input=prompts)
        one = await client.embeddings.create(model="tiny", input=prompts[1])
    expected = embedded(reference(), prompts, "last")
    np.testing.assert_allclose([e.embedding for e in both.data], expected, **CLOSE)
    np.testing.assert_allclose(one.data[0].embedding, expected[1], **CLOSE)
    assert (both.usage.prompt_tokens, one.usage.prompt_tokens) == (49, 40)


@pytest.mark.parametrize("limits", [{}, {"batching": "dynamic", "batch_window_s": 0.005}], ids=str)
async def test_more_inputs_than_the_engine_may_queue_come_in_order(limits, monkeypatch):
    monkeypatch.setattr(http_embeddings, "MAX_IN_FLIGHT", 10)
    prompts = [prompt_of(1 + i % 20, start=i) for i in range(60)]
    for max_queued in (1024, 2):  # the second refuses the seventh
        async with served(arranged(max_queued_requests=max_queued, **limits)) as (_, client):
            answer = await client.embeddings.create(model="tiny", input=prompts)
        expected = embedded(arranged(role="reference"), prompts, "last")
        np.testing.assert_allclose([e.embedding for e in answer.data], expected, **CLOSE)


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({"input": ["a", ""]}, 400, "input[1]", "the prompt is empty"),
        ({"input": [[5, 10**9]]}, 400, "input", "prompt_token_ids[1]=1000000000 is not a token id"),
        ({"input": "a", "dimensions": 64}, 400, "dimensions", "this model's embeddings have 384"),
        ({"input": "a", "pooling": "max"}, 400, "pooling", "pooling='max' is none of last, mean"),
        ({"input": "a", "top_k": 3}, 400, "top_k", "unknown or unsupported"),
        ({"input": "a" * 600}, 400, "input", "max_model_len=512"),
        ({"input": "a", "model": "gpt"}, 404, "model", "model='gpt' is not served here"),
        ({}, 400, "input", "must be a text"),
    ],
    ids=str,
)
async def test_what_cannot_be_embedded_is_refused_in_openais_form(body, status, param, message):
    engine = arranged(max_model_len=512)
    async with served(engine) as (server, _), aiohttp.ClientSession(server.http) as session:
        async with session.post("/v1/embeddings", json=body) as response:
            error = (await response.json())["error"]
        assert (response.status, error["param"]) == (status, param)
        assert message in error["message"]


async def test_a_client_that_leaves_ends_all_of_its_inputs():
    engine = arranged(batching="dynamic", batch_window_s=60.0)  # so that they wait
    async with served(engine) as (_, client):
        task = asyncio.create_task(client.embeddings.create(model="tiny", input=["a", "b", "c"]))
        await until(lambda: engine.stats()["waiting"] == 3)
        task.cancel()
        await until(lambda: engine.stats()["waiting"] == 0)
    assert_balanced(engine)


async def test_the_time_limit_is_that_of_the_whole_call():
    engine = arranged(batching="dynamic", batch_window_s=60.0)
    async with served(engine) as (_, client):
        with pytest.raises(openai.APIStatusError) as caught:
            await client.embeddings.create(
                model="tiny", input=["a", "b"], extra_headers={"x-request-timeout-ms": "30"}
            )
    assert caught.value.status_code == 504


async def test_embeddings_and_chats_are_served_side_by_side():
    async with served() as (_, client):
        completion = client.completions.create(
            model="tiny", prompt=prompt_of(20), max_tokens=30, temperature=0
        )
        embeddings = client.embeddings.create(model="tiny", input=TEXTS)
        answers = await asyncio.gather(completion, embeddings)
    assert answers[0].usage.completion_tokens == greedy(30).max_tokens
    expected = embedded(reference(), TEXTS, "last")
    np.testing.assert_allclose([e.embedding for e in answers[1].data], expected, **CLOSE)


async def test_a_call_is_one_request_of_its_callers_quota_and_all_of_its_tokens():
    quota = CallerQuota(QuotaLimits(requests_per_minute=2, max_concurrent_requests=1))
    async with served() as (server, client):
        server.front.gate.admit = lambda key, certificate: Caller(name="k", quota=quota)
        for _ in range(2):
            answer = await client.embeddings.create(model="tiny", input=TEXTS)
            assert len(answer.data) == len(TEXTS)
        with pytest.raises(openai.RateLimitError, match="used up its requests"):
            await client.embeddings.create(model="tiny", input=TEXTS[0])
        quota.set_limits(QuotaLimits(tokens_per_minute=sum(map(len, TEXTS)) - 1))
        await client.embeddings.create(model="tiny", input=TEXTS)
        with pytest.raises(openai.RateLimitError, match="used up its tokens"):
            await client.embeddings.create(model="tiny", input=TEXTS[0])


async def test_a_call_that_finds_no_room_is_none_of_its_callers_quota():
    quota = CallerQuota(QuotaLimits(requests_per_minute=1, max_concurrent_requests=1))
    async with served() as (server, client):
        server.front.gate.admit = lambda key, certificate: Caller(name="k", quota=quota)
        submit, server.front.engine.submit = server.front.engine.submit, full
        with pytest.raises(openai.RateLimitError, match="the queue is full"):
            await client.embeddings.create(model="tiny", input=TEXTS)
        server.front.engine.submit = submit
        answer = await client.embeddings.create(model="tiny", input=TEXTS)
        assert len(answer.data) == len(TEXTS)


async def full(request):
    raise Overloaded("the queue is full")


async def test_inputs_that_wait_for_room_are_no_refused_requests():
    quota, records = CallerQuota(QuotaLimits(requests_per_minute=10)), []
    async with served(arranged(max_queued_requests=1)) as (server, client):
        server.front.gate.admit = lambda key, certificate: Caller(name="k", quota=quota)
        server.front._observers = [records.append]
        answer = await client.embeddings.create(model="tiny", input=[[i + 1] for i in range(20)])
        assert len(answer.data) == len(records) == 20
        assert not any(record.error for record in records)
        assert quota.headers()["x-ratelimit-remaining-requests"] == "9"
