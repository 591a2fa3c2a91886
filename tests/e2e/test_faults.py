"""One request's fault, over gRPC and HTTP on the real engine: its client hears of it, no other."""

from __future__ import annotations

import asyncio
import json
import logging
import socket

import aiohttp
import openai
import pytest

from jserve.client import GenerateClient
from jserve.errors import JserveError
from jserve.messages import GenerateRequest
from tests.e2e.real_engine import (
    alone,
    arranged,
    fail_on,
    greedy,
    prompt_of,
    serving_real,
    value,
)
from tests.server.conftest import TIMEOUT_S, until

SECRET = "a prompt that no log may hold"
NUM_TOKENS = 12


class BrokenTokenizer:
    """A tokenizer that fails with one token of outputs, and with one text."""

    def __init__(self, tokenizer, token_id: int) -> None:
        self._tokenizer, self._token_id = tokenizer, token_id

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == self._token_id:
            raise KeyError(SECRET)
        return self._tokenizer.token_bytes(token_id)

    def encode(self, text: str, **options):
        if text == SECRET:
            raise RuntimeError("the tokenizer is at its wit's end")
        return self._tokenizer.encode(text, **options)


@pytest.fixture
def broken(monkeypatch):
    """An engine whose tokenizer fails at the fifth token of the first prompt's answer, which none
    of the others has; and the prompts with their right answers."""
    prompts = [prompt_of(9 + i, i) for i in range(4)]
    answers = [alone(prompt, greedy(NUM_TOKENS)) for prompt in prompts]
    engine = arranged()
    bad = answers[0][4]
    kept = [pair for pair in zip(prompts, answers, strict=True) if bad not in pair[1]]
    assert len(kept) >= 2, "the other answers have to do without the token"
    assert bad not in answers[0][:4]
    monkeypatch.setattr(
        engine.processor, "tokenizer", BrokenTokenizer(engine.processor.tokenizer, bad)
    )
    return engine, prompts[0], answers[0][:4], kept


def asking(prompt: list[int]) -> GenerateRequest:
    return GenerateRequest(prompt_token_ids=prompt, sampling=greedy(NUM_TOKENS))


async def ids_of(client: GenerateClient, prompt: list[int], found: list[int]) -> list[int]:
    async for update in client.stream(asking(prompt)):
        found += update.token_ids
    return found


async def test_a_token_that_cannot_be_made_text_ends_one_request_over_grpc(broken, caplog):
    caplog.set_level(logging.INFO)
    engine, prompt, head, others = broken
    async with serving_real(engine) as served:
        seen: list[int] = []
        good = [asyncio.create_task(ids_of(served.client, p, [])) for p, _ in others]
        with pytest.raises(JserveError, match=r"INTERNAL: .*RequestFailed"):
            await ids_of(served.client, prompt, seen)
        assert seen == head
        assert await asyncio.gather(*good) == [answer for _, answer in others]
        assert served.front.is_ready
    assert value(engine, "requests_finished_total", reason="error") == 1
    assert SECRET not in caplog.text
    assert "cannot be dealt with: KeyError" in caplog.text


async def test_a_text_that_cannot_be_made_tokens_ends_one_request_over_http(broken, caplog):
    caplog.set_level(logging.INFO)
    engine, prompt, _, others = broken
    async with (
        serving_real(engine, http=True) as served,
        aiohttp.ClientSession(served.http) as http,
    ):
        good = [asyncio.create_task(ids_of(served.client, p, [])) for p, _ in others]
        for body in ({"prompt": SECRET}, {"prompt": prompt, "max_tokens": NUM_TOKENS}):
            async with http.post("/v1/completions", json=body | {"temperature": 0}) as answer:
                assert answer.status == 500
                assert (await answer.json())["error"]["type"] == "server_error"
        assert await asyncio.gather(*good) == [answer for _, answer in others]
        assert served.front.is_ready
    assert SECRET not in caplog.text


async def test_a_client_that_does_not_read_loses_its_request_and_is_told_when_it_does():
    engine = arranged()
    body = {"prompt": [1, 2, 3], "max_tokens": 4000, "temperature": 0, "ignore_eos": True}
    text = json.dumps(body | {"stream": True, "n": 2, "logprobs": 20})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(text)}\r\n"
    head += "content-type: application/json\r\nconnection: close\r\n\r\n"
    async with serving_real(engine, http=True, max_unread_updates=64) as served:
        lazy = socket.socket()
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that little is on its way
        lazy.setblocking(False)
        where = served.http.removeprefix("http://").split(":")
        await asyncio.get_running_loop().sock_connect(lazy, (where[0], int(where[1])))
        reader, writer = await asyncio.open_connection(sock=lazy, limit=1024)
        writer.write((head + text).encode())
        await until(lambda: value(engine, "slow_readers_total") == 1)
        await until(lambda: not engine.has_work)
        async with asyncio.timeout(TIMEOUT_S):
            answer = (await reader.read()).decode()
        writer.close()
    error = json.loads(answer.split("data: ")[-1].splitlines()[0])["error"]
    assert "max_unread_updates=64" in error["message"]


async def test_a_request_that_breaks_the_device_may_be_tried_again_by_openais_client():
    """Three times, as it does by default; and nobody else asks meanwhile."""
    engine, bad = arranged(), 249
    fail_on(engine, lambda batch: bad in batch.buffer)
    async with (
        serving_real(engine, http=True) as served,
        openai.AsyncOpenAI(api_key="none", base_url=f"{served.http}/v1") as client,
    ):
        asked = {"model": "tiny", "max_tokens": 3, "temperature": 0}
        with pytest.raises(openai.InternalServerError, match="the device failed twice"):
            await client.completions.create(prompt=[5, bad], **asked)
        assert value(engine, "requests_finished_total", reason="error") == 3
        answer = await client.completions.create(prompt=[5, 6], **asked)
        assert answer.usage.completion_tokens == 3
        assert served.front.is_ready
