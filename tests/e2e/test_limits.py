"""What no caller may exceed, each over HTTP and gRPC, with the error that names it; and that the
server serves the next call as if nothing had been."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import grpc
import pytest

from jserve.server.proto import generate_pb2 as pb
from tests.e2e.real_engine import arranged, serving_real
from tests.server.conftest import Served

HEADER_BYTES, MESSAGE_BYTES, LENGTH = 4096, 2**19, 64
BIG_SCHEMA = '{"type":"string","description":"' + "x" * 2**17 + '"}'
INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED

# What is too much: fields of an HTTP body, the same as a message, and what the error says.
TOO_MUCH: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "prompt tokens": (
        {"prompt": [1] * LENGTH},
        {"token_ids": pb.TokenIds(ids=[1] * LENGTH)},
        f"{LENGTH}",
    ),
    "output tokens": (
        {"max_tokens": LENGTH},
        {"sampling": pb.SamplingParams(max_tokens=LENGTH)},
        f"{LENGTH}",
    ),
    "stop strings": (
        {"stop": ["x"] * 17},
        {"sampling": pb.SamplingParams(stop=["x"] * 17)},
        "at most 16",
    ),
    "characters of a stop string": (
        {"stop": "x" * 1025},
        {"sampling": pb.SamplingParams(stop=["x" * 1025])},
        "1024 characters",
    ),
    "stop token ids": (
        {"stop_token_ids": [1] * 65},
        {"sampling": pb.SamplingParams(stop_token_ids=[1] * 65)},
        "at most 64",
    ),
    "logprobs": (
        {"logprobs": 21},
        {"sampling": pb.SamplingParams(logprobs=21)},
        "0 to 20",
    ),
    "prompt logprobs": (
        {"prompt_logprobs": 21},
        {"sampling": pb.SamplingParams(prompt_logprobs=21)},
        "0 to 20",
    ),
    "choices": ({"n": 129}, {"sampling": pb.SamplingParams(n=129)}, "1 to 128"),
    "best of": ({"best_of": 129}, {"sampling": pb.SamplingParams(best_of=129)}, "1 to 128"),
    "logit bias": (
        {"logit_bias": {str(i): 1 for i in range(1025)}},
        {
            "sampling": pb.SamplingParams(
                logit_bias=[pb.LogitBias(token_id=i, bias=1) for i in range(1025)]
            )
        },
        "at most 1024",
    ),
    "bad words": (
        {"bad_words": ["x"] * 257},
        {"sampling": pb.SamplingParams(bad_words=[pb.BadWord(text="x")] * 257)},
        "at most 256",
    ),
    "bytes of a schema": (
        {"guided_json": BIG_SCHEMA},
        {
            "sampling": pb.SamplingParams(
                structured=pb.StructuredOutput(kind="json_schema", value=BIG_SCHEMA)
            )
        },
        "131072",
    ),
    "characters of a request id": (
        {},
        {"request_id": "x" * 257},
        "256",
    ),
}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving_real(
        arranged("sixteen", max_model_len=LENGTH),
        http=True,
        max_header_bytes=HEADER_BYTES,
        max_message_bytes=MESSAGE_BYTES,
    ) as s:
        yield s
        await assert_well(s)


async def assert_well(s: Served) -> None:
    assert (await post(s, {}))[0] == 200
    assert (await s.stub.Generate(message_of({}))).finish_reason in ("length", "stop")


async def post(s: Served, fields: Mapping[str, Any]) -> tuple[int, str]:
    body = {"prompt": [1, 2, 3], "max_tokens": 2} | fields
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{s.http}/v1/completions", json=body) as response,
    ):
        answer = await response.json()
        return response.status, answer.get("error", {}).get("message", "")


def message_of(fields: Mapping[str, Any]) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=2)
    sampling.MergeFrom(fields.get("sampling", pb.SamplingParams()))
    ids = fields.get("token_ids", pb.TokenIds(ids=[1, 2, 3]))
    rest = {name: value for name, value in fields.items() if name not in ("sampling", "token_ids")}
    return pb.GenerateRequest(token_ids=ids, sampling=sampling, **rest)


async def refused(call: grpc.aio.UnaryUnaryCall) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def get(s: Served, path: str, headers: Mapping[str, str] | None = None) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.get(s.http + path, headers=headers) as response,
    ):
        return response.status


@pytest.mark.parametrize("what", [what for what in TOO_MUCH if TOO_MUCH[what][0]])
async def test_too_much_of_a_field_is_refused_over_http(served: Served, what: str):
    fields, _, named = TOO_MUCH[what]
    status, message = await post(served, fields)
    assert status == 400
    assert named in message


@pytest.mark.parametrize("what", TOO_MUCH)
async def test_too_much_of_a_field_is_refused_over_grpc(served: Served, what: str):
    _, fields, named = TOO_MUCH[what]
    code, details = await refused(served.stub.Generate(message_of(fields)))
    assert code is INVALID
    assert named in details


async def test_a_message_that_is_too_large_is_refused(served: Served):
    text = "x" * MESSAGE_BYTES
    status, message = await post(served, {"prompt": text})
    assert (status, str(MESSAGE_BYTES) in message) == (413, True)
    code, details = await refused(served.stub.Generate(pb.GenerateRequest(prompt=text)))
    assert (code, str(MESSAGE_BYTES) in details) == (EXHAUSTED, True)


@pytest.mark.parametrize(
    "headers", [{"x-one": "x" * HEADER_BYTES}, {f"x-{i}": "x" * 40 for i in range(99)}]
)
async def test_headers_that_are_too_large_are_refused(served: Served, headers: dict[str, str]):
    # 400 where it comes in pieces: uvicorn's word for it
    assert await get(served, "/v1/models", headers) in (400, 431)
    code, _ = await refused(served.stub.Generate(message_of({}), metadata=tuple(headers.items())))
    assert code is EXHAUSTED


async def test_a_path_that_is_too_long_is_refused(served: Served):
    assert await get(served, f"/v1/models/{'x' * HEADER_BYTES}") in (400, 431)


async def test_headers_that_never_end_are_cut_off(served: Served):
    host, port = served.http.removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /health HTTP/1.1\r\nx-endless: ")
    async with asyncio.timeout(20):
        while not reader.at_eof() and not writer.is_closing():
            writer.write(b"x" * 1000)
            try:
                await asyncio.wait_for(reader.read(1000), 0.01)
            except TimeoutError:
                continue
            except ConnectionError:
                break
    writer.close()
