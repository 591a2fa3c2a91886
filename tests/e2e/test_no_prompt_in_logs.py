"""No log holds what callers write: not the server's, not the access log, whatever fails."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from jserve.config import EngineConfig, ServerSettings
from jserve.engine.async_engine import AsyncEngine
from jserve.engine.engine import Engine
from jserve.server.main import StopSignals, serve
from tests.e2e.real_engine import arranged
from tests.server.conftest import TIMEOUT_S, until

SECRET = "kumquat"  # in every prompt
FAULT = "marmalade"  # in those that no tokenizer can take


def break_tokenizer(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it fail on FAULT with an error and a cause that quote what they were given."""
    encode = type(tokenizer).encode

    def faulty(self: Any, text: str, *args: Any, **kwargs: Any) -> list[int]:
        if FAULT in text:
            try:
                raise KeyError(text)
            except KeyError as error:
                raise ValueError(f"cannot encode {text!r}") from error
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(type(tokenizer), "encode", faulty)


@asynccontextmanager
async def whole_server(
    engine: Engine, log: Path, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[tuple[str, str]]:
    """The server as main runs it; yields its gRPC target and HTTP URL."""
    config = EngineConfig(
        server=ServerSettings(
            port=0, http_port=0, max_message_bytes=2**16, drain_timeout_s=1, access_log=str(log)
        )
    )
    signals = StopSignals()
    serving = asyncio.create_task(serve(config, lambda _: AsyncEngine(engine), signals))
    await until(lambda: serving.done() or "ready:" in caplog.text)
    try:
        target = re.search(r"health answers on (\S+)", caplog.text)[1]
        yield target, re.search(r"HTTP answers on (\S+)", caplog.text)[1]
    finally:
        signals.notify()
        await serving


BODIES: list[tuple[str, dict[str, Any] | str]] = [
    ("/v1/completions", {"prompt": SECRET, "max_tokens": 2}),
    ("/v1/completions", {"prompt": SECRET, "max_tokens": 2, "stream": True}),
    ("/v1/completions", {"prompt": SECRET * 10_000}),
    ("/v1/completions", {"prompt": SECRET * 1000}),
    ("/v1/completions", {"prompt": SECRET + FAULT}),
    ("/v1/completions", {"prompt": SECRET + FAULT, "stream": True}),
    ("/v1/completions", {"prompt": SECRET, "temperature": SECRET}),
    ("/v1/completions", {"prompt": SECRET, SECRET: 1}),
    ("/v1/completions", {"prompt": {SECRET: SECRET}}),
    ("/v1/completions", {"prompt": "x", "stop": [SECRET, 1]}),
    ("/v1/completions", {"prompt": "x", "guided_regex": SECRET + "("}),
    ("/v1/completions", {"prompt": SECRET, "model": SECRET}),
    ("/v1/completions", '{"prompt": "' + SECRET),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [{"role": SECRET, "content": SECRET}], "max_tokens": 2}),
    ("/v1/embeddings", {"input": SECRET}),
    ("/v1/embeddings", {"input": SECRET + FAULT}),
    ("/tokenize", {"prompt": SECRET}),
    ("/tokenize", {"prompt": SECRET + FAULT}),
    ("/detokenize", {"tokens": [SECRET]}),
]


def messages() -> list[tuple[str, bytes]]:
    """Calls that each service takes or refuses, by method."""
    from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

    from jserve.server.proto import generate_pb2 as ours
    from jserve.server.proto import jetstream_pb2 as jetstream

    sampling = ours.SamplingParams(max_tokens=2)
    generate = [
        ours.GenerateRequest(prompt=text, sampling=sampling)
        for text in (SECRET, SECRET + FAULT, SECRET * 1000, SECRET * 10_000)
    ]
    turns = ours.ChatMessages(messages=[ours.ChatMessage(role=SECRET, content=SECRET)])
    generate += [
        ours.GenerateRequest(prompt=SECRET, sampling=sampling, model=SECRET),
        ours.GenerateRequest(chat=turns, sampling=sampling),
    ]
    text = jetstream.DecodeRequest.TextContent(text=SECRET + FAULT)
    calls = [
        *(("jserve.v1.GenerateService/Generate", m) for m in generate),
        *(("jserve.v1.GenerateService/GenerateStream", m) for m in generate),
        ("vllm.grpc.engine.VllmEngine/Generate", vllm.GenerateRequest(text=SECRET + FAULT)),
        (
            "vllm.grpc.engine.VllmEngine/Generate",
            vllm.GenerateRequest(text=SECRET, sampling_params=vllm.SamplingParams(max_tokens=2)),
        ),
        ("jetstream_proto.Orchestrator/Decode", jetstream.DecodeRequest(text_content=text)),
    ]
    junk = ("jserve.v1.GenerateService/Generate", SECRET.encode())
    return [*((method, m.SerializeToString()) for method, m in calls), junk]


async def test_no_log_holds_what_callers_write(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
):
    engine = arranged()
    break_tokenizer(engine.processor.tokenizer, monkeypatch)
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, "jserve")
    log, statuses, codes = tmp_path / "access.log", [], []
    async with whole_server(engine, log, caplog) as (target, url):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(TIMEOUT_S)) as session:
            for path, body in BODIES:
                sent = {"json": body} if isinstance(body, dict) else {"data": body}
                kind = {"content-type": "application/json"}
                async with session.post(url + path, headers=kind, **sent) as response:
                    await response.read()
                    statuses.append(response.status)
        async with grpc.aio.insecure_channel(target) as channel:
            for method, data in messages():
                try:
                    async for _ in channel.unary_stream(f"/{method}")(data, timeout=TIMEOUT_S):
                        pass
                    codes.append("OK")
                except grpc.aio.AioRpcError as error:
                    codes.append(error.code().name)
    assert {200, 400, 404, 413, 500} <= set(statuses)
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "INTERNAL"} <= set(codes)
    captured, access = capfd.readouterr(), log.read_text()
    assert "ValueError, raised at" in caplog.text
    assert "KeyError, raised at" in caplog.text
    assert len(access.splitlines()) >= len(statuses)
    for text in (caplog.text, access, captured.out, captured.err):
        assert SECRET not in text
        assert FAULT not in text
