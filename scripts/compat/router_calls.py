#!/usr/bin/env python3
"""Asks a router and the server behind it the same, with OpenAI's client, and compares the answers:
router_calls.py ROUTER_URL SERVER_URL; both get OPENAI_API_KEY. Then leaves a stream, which must end
the request behind it. The exit code is 1 if anything is not as it should be."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import openai

READY_S = 60.0
SOON_S = 5.0
PROMPT = "The capital of France is"
TURNS = [{"role": "user", "content": "Name three colours."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def completion(client: openai.OpenAI, model: str, **fields: Any) -> Any:
    asked = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0} | fields
    answer = client.completions.create(model=model, **asked)
    ends = [(choice.text, choice.finish_reason) for choice in answer.choices]
    return ends, answer.usage.prompt_tokens, answer.usage.completion_tokens


def chat(client: openai.OpenAI, model: str, **fields: Any) -> Any:
    asked = {"messages": TURNS, "max_tokens": 16, "temperature": 0} | fields
    answer = client.chat.completions.create(model=model, **asked)
    ends = [(choice.message.content, choice.finish_reason) for choice in answer.choices]
    return ends, answer.usage.prompt_tokens, answer.usage.completion_tokens


def streamed(client: openai.OpenAI, model: str, **fields: Any) -> Any:
    asked = {"max_tokens": 16, "temperature": 0, "stream": True} | fields
    asked["stream_options"] = {"include_usage": True}
    create = client.completions.create if "prompt" in fields else client.chat.completions.create
    text, reasons, usage = "", [], None
    for chunk in create(model=model, **asked):
        for choice in chunk.choices:
            text += (choice.text if "prompt" in fields else choice.delta.content) or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
        usage = chunk.usage or usage
    return text, reasons, usage.prompt_tokens, usage.completion_tokens


def logprobs(client: openai.OpenAI, model: str) -> Any:
    answer = client.chat.completions.create(
        model=model, messages=TURNS, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    )
    return [
        (entry.token, round(entry.logprob, 2), [top.token for top in entry.top_logprobs])
        for entry in answer.choices[0].logprobs.content
    ]


def schema(client: openai.OpenAI, model: str) -> Any:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    (text, _), *_ = chat(client, model, response_format=wanted, max_tokens=40)[0]
    return json.loads(text)


def tool(client: openai.OpenAI, model: str) -> Any:
    function = {"name": "greet", "parameters": SCHEMA}
    answer = client.chat.completions.create(
        model=model,
        messages=TURNS,
        max_tokens=60,
        temperature=0,
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
    )
    (call,) = answer.choices[0].message.tool_calls
    return call.function.name, sorted(json.loads(call.function.arguments))


def embedding(client: openai.OpenAI, model: str) -> Any:
    vector = client.embeddings.create(model=model, input=PROMPT).data[0].embedding
    return len(vector), round(sum(x * x for x in vector), 3)


def refusal(client: openai.OpenAI, model: str) -> Any:
    try:
        client.completions.create(model=model, prompt="word " * 100_000, max_tokens=1)
    except openai.APIStatusError as error:
        return error.status_code
    return None


CALLS: dict[str, Callable[[openai.OpenAI, str], Any]] = {
    "completion": completion,
    "chat": chat,
    "completion, streamed": lambda c, m: streamed(c, m, prompt=PROMPT),
    "chat, streamed": lambda c, m: streamed(c, m, messages=TURNS),
    "choices": lambda c, m: len(completion(c, m, n=3, temperature=1, seed=5)[0]),
    "stop string": lambda c, m: completion(c, m, prompt="One, two, three,", stop=[" six"]),
    "log-probabilities": logprobs,
    "schema": schema,
    "embedding": embedding,
    "a prompt that is too long": refusal,
}


# The router has the tool's grammar made whatever the model's template knows of tools; over HTTP it
# passes bodies on.
ALONE_OVER_GRPC = {"tool": tool}


def leave(router: openai.OpenAI, server: openai.OpenAI, model: str) -> Any:
    """Reads the head of a long answer; returns how many requests run then, and how many soon."""
    turns = [{"role": "user", "content": "Tell me a long story."}]
    with router.chat.completions.create(
        model=model, messages=turns, max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        for _ in range(4):
            next(stream)
        before = num_running(server)
    give_up = time.monotonic() + SOON_S
    while (after := num_running(server)) and time.monotonic() < give_up:
        time.sleep(0.05)
    return before, after


def num_running(server: openai.OpenAI) -> float:
    text = server.get(str(server.base_url.join("/metrics")), cast_to=str)
    found = re.search(r"^jserve_requests_running (\S+)", text, re.MULTILINE)
    return float(found[1]) if found else -1.0


def wait_for_model(client: openai.OpenAI) -> str:
    give_up = time.monotonic() + READY_S
    while True:
        try:
            if models := client.models.list().data:
                # The tokenizer comes after the model's name.
                client.completions.create(model=models[0].id, prompt="a", max_tokens=1)
                return models[0].id
        except openai.OpenAIError:
            if time.monotonic() > give_up:
                raise
        time.sleep(0.2)


def answer_of(call: Callable[[openai.OpenAI, str], Any], client: openai.OpenAI, model: str) -> Any:
    try:
        return call(client, model)
    except Exception as error:  # whatever it is, it is the finding
        return f"{type(error).__name__}: {error}"[:300]


def main() -> int:
    router_url, server_url = sys.argv[1:3]
    router, server = (
        openai.OpenAI(base_url=url, max_retries=0) for url in (router_url, server_url)
    )
    model = wait_for_model(router)
    num_bad = 0
    for name, call in CALLS.items():
        ours, own = (answer_of(call, client, model) for client in (router, server))
        is_same = ours == own and not (isinstance(ours, str) and "Error" in ours)
        num_bad += not is_same
        print(f"{'same' if is_same else 'DIFFERS'}: {name}: {ours!r}")
        if not is_same:
            print(f"  the server itself: {own!r}")
    is_http = server_url.startswith("https:")
    for name, call in ({} if is_http else ALONE_OVER_GRPC).items():
        answer = answer_of(call, router, model)
        num_bad += isinstance(answer, str)
        print(f"router alone: {name}: {answer!r}")
    before, after = leave(router, server, model)
    num_bad += (before, after) != (1.0, 0.0)
    print(f"requests that run while a stream is read: {before:g}, after it was left: {after:g}")
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
