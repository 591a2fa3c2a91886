"""The unmodified openai package against the real engine, through a real port."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import openai
import pytest

from tests.e2e.real_engine import alone, arranged, greedy, prompt_of, serving_real
from tests.server.conftest import until

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
ASKING = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}


@asynccontextmanager
async def client_of(engine, **settings):
    async with (
        serving_real(engine, http=True, **settings) as served,
        openai.AsyncOpenAI(
            base_url=f"{served.http}/v1", api_key="none", max_retries=0, timeout=30
        ) as client,
    ):
        yield client


@pytest.fixture
async def client():
    async with client_of(arranged()) as client:
        yield client


@pytest.fixture
async def caller():
    """Of a model that thinks, says something, and calls a tool."""
    async with client_of(arranged("caller")) as client:
        yield client


async def test_the_models_are_listed(client):
    [model] = [model async for model in client.models.list()]
    assert model.id == "tiny"
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError, match="use 'tiny'"):
        await client.completions.create(model="gpt", prompt="x")


async def test_the_synchronous_client_gets_the_same_as_the_offline_api():
    prompt = prompt_of(20)
    async with serving_real(arranged(), http=True) as served:

        def ask():
            url = f"{served.http}/v1"
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 12}
                ids = {"return_token_ids": True}
                whole = client.completions.create(**body, extra_body=ids)
                chunks = list(client.completions.create(**body, stream=True, extra_body=ids))
                return whole, chunks

        whole, chunks = await asyncio.to_thread(ask)
    streamed = [i for chunk in chunks for choice in chunk.choices for i in choice.token_ids]
    assert whole.choices[0].token_ids == streamed == alone(prompt, greedy(12))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


async def test_o84_a_stream_of_choices_joins_to_the_whole_answer_with_one_usage(client):
    body = ASKING | {"n": 3, "seed": 5, "temperature": 1, "max_completion_tokens": 9}
    whole = await client.chat.completions.create(**body)
    texts, ends, usages = {}, {}, []
    stream = await client.chat.completions.create(
        **body, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == {c.index: c.message.content for c in whole.choices}
    assert ends == {c.index: c.finish_reason for c in whole.choices}
    assert [u.total_tokens for u in usages] == [whole.usage.total_tokens]


@pytest.mark.parametrize("n", [1, 2])
async def test_o36_streamed_echo_and_logprobs_join_to_those_of_the_whole_answer(client, n):
    body = {"model": "tiny", "prompt": ["Is ABC", "what"], "max_tokens": 6, "temperature": 0}
    body |= {"echo": True, "logprobs": 2, "n": n, "seed": 1, "stop": "zz"}
    whole = await client.completions.create(**body)
    texts, columns = {}, {}
    async for chunk in await client.completions.create(**body, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            joined = columns.setdefault(choice.index, {})
            for name, values in choice.logprobs.model_dump().items():
                joined[name] = joined.get(name, []) + values
    assert texts == {c.index: c.text for c in whole.choices}
    for choice in whole.choices:
        streamed, wanted = columns[choice.index], choice.logprobs.model_dump()
        for name in ("tokens", "text_offset"):
            assert streamed[name] == wanted[name]
        # Steps of other shapes differ in the last bits.
        assert streamed["token_logprobs"] == pytest.approx(wanted["token_logprobs"], abs=1e-3)
        assert len(streamed["top_logprobs"]) == len(wanted["top_logprobs"])
    assert [c.index for c in whole.choices] == list(range(2 * n))
    assert whole.choices[0].text.startswith("Is ABC")
    assert whole.choices[n].text.startswith("what")
    assert whole.usage.prompt_tokens == len("Is ABC") + len("what")


async def test_an_echo_alone_scores_a_prompt_and_generates_nothing(client):
    body = {"model": "tiny", "prompt": "score me", "max_tokens": 0, "echo": True, "logprobs": 1}
    whole = await client.completions.create(**body)
    chunks = [c async for c in await client.completions.create(**body, stream=True)]
    assert whole.choices[0].text == "".join(c.choices[0].text for c in chunks) == "score me"
    scores = whole.choices[0].logprobs.token_logprobs
    assert scores[0] is None
    assert len(scores) == whole.usage.prompt_tokens == len("score me")
    assert whole.usage.completion_tokens == 0


async def test_o35_chat_logprobs_are_streamed_with_their_tokens(client):
    body = ASKING | {"logprobs": True, "top_logprobs": 2, "max_tokens": 8}
    whole = (await client.chat.completions.create(**body)).choices[0].logprobs.content
    streamed = []
    async for chunk in await client.chat.completions.create(**body, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == whole
    assert [len(entry.top_logprobs) for entry in whole] == [2] * 8


async def test_ids_and_extensions_reach_the_engine(client):
    prompt = prompt_of(9)
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 4, "user": "ann"}
    more = {"priority": 3, "min_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    answer = await client.completions.create(**body, extra_body=more)
    assert answer.choices[0].token_ids == alone(prompt, greedy(4))
    headers = {"x-request-id": "mine"}
    raw = await client.completions.with_raw_response.create(**body, extra_headers=headers)
    assert raw.headers["x-request-id"] == "mine"
    assert raw.parse().id.startswith("cmpl-mine-")


async def test_o55_a_cached_prefix_is_counted_within_a_salt_only(client):
    body = {"model": "tiny", "prompt": prompt_of(64), "max_tokens": 2, "temperature": 0}

    async def cached(salt):
        answer = await client.completions.create(**body, extra_body={"cache_salt": salt})
        return answer.usage.prompt_tokens_details.cached_tokens

    assert await cached("a") == 0
    assert await cached("a") > 0
    assert await cached("b") == 0
    assert await cached(None) == 0


async def test_o89_max_completion_tokens_is_the_limit_on_both_endpoints(client):
    chat = await client.chat.completions.create(**ASKING, max_completion_tokens=3)
    assert (chat.usage.completion_tokens, chat.choices[0].finish_reason) == (3, "length")
    body = {"model": "tiny", "prompt": "x", "temperature": 0}
    text = await client.completions.create(**body, extra_body={"max_completion_tokens": 3})
    assert text.usage.completion_tokens == 3
    assert (await client.completions.create(**body)).usage.completion_tokens == 16
    for field in ("max_new_tokens", "n_predict"):
        with pytest.raises(openai.BadRequestError, match=field):
            await client.completions.create(**body, extra_body={field: 3})


async def test_a_response_format_is_kept_in_both_modes(caller):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    body = ASKING | {"response_format": form, "seed": 3, "temperature": 1, "max_tokens": 40}
    whole = await caller.chat.completions.create(**body)
    async with caller.chat.completions.stream(**body) as stream:
        final = await stream.get_final_completion()
    for answer in (whole, final):
        assert set(json.loads(answer.choices[0].message.content)) == {"a"}
        assert answer.choices[0].finish_reason == "stop"


async def test_errors_are_the_clients_own_kinds(client):
    with pytest.raises(openai.BadRequestError, match="temperature=101") as caught:
        await client.completions.create(model="tiny", prompt="x", temperature=101)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="'bogus'"):
        await client.completions.create(model="tiny", prompt="x", extra_body={"bogus": 1})
    late_body = {"model": "tiny", "prompt": "x", "max_tokens": 4000}
    with pytest.raises(openai.InternalServerError, match="the deadline passed") as late:
        await client.completions.create(**late_body, extra_body={"timeout": 0.001})
    assert late.value.status_code == 504


async def test_a_full_queue_is_a_rate_limit_with_advice():
    engine = arranged(max_num_seqs=1, max_queued_requests=1)
    async with client_of(engine) as client:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 4000}
        stream = await client.completions.create(**body, stream=True)
        waiting = asyncio.create_task(client.completions.create(**body))
        await until(lambda: engine.stats()["waiting"] == 1)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**body)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        waiting.cancel()
        await stream.close()


# ---- tools and reasoning ------------------------------------------------------------------------


async def test_o69_a_call_is_streamed_in_increments_that_join_to_the_whole_one(caller):
    whole = (await caller.chat.completions.create(**ASKING, tools=TOOLS)).choices[0]
    reasoning, content, pieces, ends = "", "", [], []
    async for chunk in await caller.chat.completions.create(**ASKING, tools=TOOLS, stream=True):
        delta = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
        pieces += delta.tool_calls or []
        ends.append(chunk.choices[0].finish_reason)
    assert whole.message.reasoning_content == reasoning == "Hm, hm."
    assert whole.message.content == content == "Sure:"
    [call] = whole.message.tool_calls
    first, *later = pieces
    assert (first.index, first.type, first.function.name) == (0, "function", "add")
    assert first.id
    assert later
    assert {(p.index, p.id, p.type, p.function.name) for p in later} == {(0, None, None, None)}
    assert "".join(p.function.arguments for p in pieces) == call.function.arguments == '{"a": 12}'
    assert [end for end in ends if end] == [whole.finish_reason] == ["tool_calls"]


async def test_o67_a_call_that_max_tokens_cuts_ends_by_length_in_both_modes(caller):
    for max_tokens in range(1, 15):
        body = ASKING | {"tools": TOOLS, "max_tokens": max_tokens}
        whole = (await caller.chat.completions.create(**body)).choices[0]
        async with caller.chat.completions.stream(**body) as stream:
            streamed = (await collected(stream)).choices[0]
        assert streamed.finish_reason == whole.finish_reason == "length"
        calls = [
            [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
            for choice in (whole, streamed)
        ]
        assert calls[0] == calls[1]


async def collected(stream):
    """What the client's own accumulator makes of a stream; it refuses cut answers by itself."""
    try:
        async for _ in stream:
            pass
    except openai.LengthFinishReasonError:
        pass
    return stream.current_completion_snapshot


async def test_o68_tool_choice_none_gives_content_only_in_both_modes(caller):
    body = ASKING | {"tools": TOOLS, "tool_choice": "none"}
    whole = (await caller.chat.completions.create(**body)).choices[0]
    content, ends = "", []
    async for chunk in await caller.chat.completions.create(**body, stream=True):
        assert not chunk.choices[0].delta.tool_calls
        content += chunk.choices[0].delta.content or ""
        ends.append(chunk.choices[0].finish_reason)
    assert not whole.message.tool_calls
    assert whole.message.content == content
    assert "<tool_call>" in content
    assert (ends[-1], whole.finish_reason) == ("stop", "stop")


async def test_a_forced_tool_is_called_in_both_modes(caller):
    body = ASKING | {"tools": TOOLS, "tool_choice": "required", "max_tokens": 80}
    whole = (await caller.chat.completions.create(**body)).choices[0]
    async with caller.chat.completions.stream(**body) as stream:
        streamed = (await collected(stream)).choices[0]
    for choice in (whole, streamed):
        assert choice.message.tool_calls[0].function.name == "add"
