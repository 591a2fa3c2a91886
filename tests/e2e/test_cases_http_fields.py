"""O32 over HTTP: a field of a body that is accepted has its effect, on the real engine. Those of
sampling have their probes in test_cases_sampling_fields."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
import pytest

from jserve.openai_fields import ALIASES, LABELS, NEUTRAL, SAMPLING
from jserve.openai_format import Endpoint
from jserve.server.openapi import document
from tests.e2e.real_engine import arranged, serving_real, value
from tests.server.conftest import until

TEXT = {"prompt": "what is it", "max_tokens": 8, "temperature": 0}
USER = {"role": "user", "content": "what"}
CHAT = {"messages": [USER], "max_tokens": 8, "temperature": 0}
ENDLESS = {"prompt": "x", "max_tokens": 4000, "stream": True, "priority": -99}
NUMBER = {"type": "integer", "minimum": 10, "maximum": 99}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def text(answer) -> str:
    [choice] = answer["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def prompt_tokens(answer) -> int:
    return answer["usage"]["prompt_tokens"]


def differs(plain, changed) -> bool:
    return text(plain) != text(changed)


def is_number(_, changed) -> bool:
    return 10 <= json.loads(text(changed)) <= 99


def is_refused(_, changed) -> bool:
    return changed["error"]["type"] == "invalid_request_error"


# The field's value, what is asked beside it, and how the answer must differ from one without it.
BOTH = {
    "model": ("another", {}, lambda p, c: c["error"]["code"] == "model_not_found"),
    "request_class": ("none such", {}, is_refused),
    "timeout_s": (0.001, {"max_tokens": 4000}, lambda p, c: c["error"]["code"] == "timeout"),
    "response_format": (
        {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}},
        {},
        is_number,
    ),
    "guided_json": (NUMBER, {}, is_number),
    "guided_regex": ("[0-9]{4}", {}, lambda p, c: text(c).isdecimal() and len(text(c)) == 4),
    "guided_choice": (["yes", "no"], {}, lambda p, c: text(c) in ("yes", "no")),
    "guided_grammar": ('start: "a" | "b"', {}, lambda p, c: text(c) in ("a", "b")),
    "structured_outputs": ({"choice": ["yes", "no"]}, {}, lambda p, c: text(c) in ("yes", "no")),
    "return_token_ids": (True, {}, lambda p, c: len(c["choices"][0]["token_ids"]) == 8),
    "stream": (True, {}, lambda p, c: c["events"][-1] == "[DONE]"),
    "stream_options": (
        {"include_usage": True},
        {"stream": True},
        lambda p, c: "usage" not in p["events"][-2] and '"usage"' in c["events"][-2],
    ),
}
OF_TEXT = BOTH | {
    "prompt": ("who was it", {}, differs),
    "echo": (True, {}, lambda p, c: text(c) == TEXT["prompt"] + text(p)),
}
# Of the model that calls tools, whose template renders a "T" to begin an answer.
OF_CHAT = BOTH | {
    "messages": ([USER, USER], {}, lambda p, c: prompt_tokens(c) > prompt_tokens(p)),
    "tools": (TOOLS, {}, lambda p, c: prompt_tokens(c) > prompt_tokens(p) + 10),
    "tool_choice": (
        "required",
        {"tools": TOOLS, "max_tokens": 60},
        lambda p, c: text(c) in (None, "") and c["choices"][0]["message"]["tool_calls"],
    ),
    "top_logprobs": (
        3,
        {"logprobs": True},
        lambda p, c: (
            [len(t["top_logprobs"]) for t in c["choices"][0]["logprobs"]["content"]] == [3] * 8
        ),
    ),
    "add_generation_prompt": (
        False,
        {},
        lambda p, c: prompt_tokens(c) == prompt_tokens(p) - 1,
    ),
    "continue_final_message": (
        True,
        {"messages": [USER, {"role": "assistant", "content": "T"}]},
        lambda p, c: prompt_tokens(c) == prompt_tokens(p) - 1,
    ),
    "chat_template_kwargs": ({"not_read_by_the_template": 1}, {}, is_refused),
}
# What these do shows in what other requests get, or needs a model that calls twice.
ELSEWHERE = {
    "priority": "below",
    "queue_timeout_s": "below",
    "tenant": "below",
    "parallel_tool_calls": "tests/test_openai_stream.py",
}


@pytest.mark.parametrize(
    ("path", "probes"), [(Endpoint.COMPLETIONS, OF_TEXT), (Endpoint.CHAT, OF_CHAT)]
)
def test_o32_every_field_of_a_body_has_a_probe(path, probes):
    schema = document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    probed = {*probes, *ELSEWHERE, *SAMPLING, *ALIASES, *LABELS, *NEUTRAL, "logprobs"}
    assert set(schema["schema"]["properties"]) - {"logit_bias", "prompt_logprobs"} <= probed


@asynccontextmanager
async def session_of(kind: str, **limits):
    engine = arranged(kind, **limits)
    async with (
        serving_real(engine, http=True) as served,
        aiohttp.ClientSession(served.http) as session,
    ):
        yield engine, session


async def answer(session, path: str, body: dict) -> dict:
    async with session.post(path, json=body) as response:
        if response.content_type == "application/json":
            return await response.json()
        return {
            "events": [
                e.removeprefix("data: ") for e in (await response.text()).strip().split("\n\n")
            ]
        }


@pytest.mark.parametrize(
    ("kind", "path", "plain", "probes"),
    [
        ("sixteen", Endpoint.COMPLETIONS, TEXT, OF_TEXT),
        ("caller", Endpoint.CHAT, CHAT, OF_CHAT),
    ],
)
async def test_o32_a_field_of_a_body_has_its_effect(kind, path, plain, probes):
    async with session_of(kind) as (_, session):
        for name, (given, beside, has_effect) in probes.items():
            without = await answer(session, path, plain | beside)
            changed = await answer(session, path, plain | beside | {name: given})
            assert has_effect(without, changed), (name, without, changed)


async def test_o32_priority_and_the_limit_of_waiting_decide_who_of_the_queue_runs():
    async with session_of("random", max_num_seqs=1) as (engine, session):
        busy = await session.post(Endpoint.COMPLETIONS, json=ENDLESS)
        ends = []

        async def ask(name: str, **fields) -> None:
            ends.append((name, (await answer(session, Endpoint.COMPLETIONS, TEXT | fields))))

        tasks = [asyncio.create_task(ask("last", priority=9))]
        await until(lambda: engine.stats()["waiting"] == 1)
        tasks.append(asyncio.create_task(ask("first", priority=-9)))
        tasks.append(asyncio.create_task(ask("never", queue_timeout_s=0.05)))
        await until(lambda: ends)
        busy.close()
        await asyncio.gather(*tasks)
    assert [name for name, _ in ends] == ["never", "first", "last"]
    assert ends[0][1]["error"]["code"] == "timeout"


async def test_o32_a_tenant_shares_cached_prefixes_with_itself_only():
    async with session_of("random") as (engine, session):
        body = TEXT | {"prompt": [*range(64)]}
        cached = [
            (await answer(session, Endpoint.COMPLETIONS, body | {"tenant": tenant}))["usage"]
            for tenant in ("a", "b", "a")
        ]
        assert [u["prompt_tokens_details"]["cached_tokens"] > 0 for u in cached] == [
            False,
            False,
            True,
        ]
        assert value(engine, "requests_running") == 0
