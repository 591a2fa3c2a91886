"""O28: numbers that are none, in every float field of every protocol, on the real engine."""

from __future__ import annotations

import json
import math

import aiohttp
import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from jserve.server.openapi import document
from jserve.server.proto import generate_pb2 as pb
from tests.e2e.real_engine import alone, arranged, greedy, serving_real
from tests.server.conftest import TIMEOUT_S

JUNK = ("NaN", "Infinity", "-Infinity", "1e400")
CHAT = '"messages": [{"role": "user", "content": "x"}]'
NEEDED = {
    "/v1/completions": '"prompt": "x"',
    "/v1/chat/completions": CHAT,
    "/v1/embeddings": '"input": "x"',
}
CANARY = [4, 5]


def float_fields(path: str) -> list[str]:
    """What may be given, with %s in place of a number, for each field that takes one."""
    post = document()["paths"][path]["post"]
    fields = post["requestBody"]["content"]["application/json"]["schema"]["properties"]
    kinds = {name: [one.get("type") for one in s.get("anyOf", [s])] for name, s in fields.items()}
    found = [f'"{name}": %s' for name, types in kinds.items() if "number" in types]
    return found + ['"logit_bias": {"1": %s}'] * ("logit_bias" in fields)


@pytest.mark.parametrize("path", NEEDED)
async def test_o28_a_float_that_is_none_is_refused_in_every_field_over_http(path):
    fields = float_fields(path)
    assert len(fields) >= (2 if "embeddings" in path else 9)
    headers = {"content-type": "application/json"}
    async with (
        serving_real(arranged(), http=True) as served,
        aiohttp.ClientSession(served.http) as session,
    ):
        for body in [f"{{{NEEDED[path]}, {field % junk}}}" for field in fields for junk in JUNK]:
            async with session.post(path, data=body, headers=headers) as response:
                assert response.status == 400, body
                assert (await response.json())["error"]["type"] == "invalid_request_error"
        canary = {"prompt": CANARY, "max_tokens": 3, "temperature": 0, "return_token_ids": True}
        async with session.post("/v1/completions", data=json.dumps(canary), headers=headers) as r:
            assert (await r.json())["choices"][0]["token_ids"] == alone(CANARY, greedy(3))


def with_floats(message, sampling, value: float):
    """Copies of `message`, each with one float field of it or of its `sampling` set."""
    kinds = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)
    for part in ("", sampling):
        inner = getattr(message, part) if part else message
        for field in inner.DESCRIPTOR.fields:
            if field.cpp_type in kinds and not field.is_repeated:
                copy = type(message).FromString(message.SerializeToString())
                setattr(getattr(copy, part) if part else copy, field.name, value)
                yield field.name, copy


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_o28_a_float_that_is_none_is_refused_in_every_field_over_grpc(value):
    ours = pb.GenerateRequest(token_ids=pb.TokenIds(ids=CANARY))
    vllms = vllm_engine_pb2.GenerateRequest(stream=True)
    vllms.tokenized.input_ids[:] = CANARY
    async with serving_real(arranged()) as s:
        vllm = vllm_engine_pb2_grpc.VllmEngineStub(s.channel)
        found = list(with_floats(ours, "sampling", value))
        calls = [(name, s.stub.Generate(m, timeout=TIMEOUT_S)) for name, m in found]
        calls += [(n, s.stub.GenerateStream(m, timeout=TIMEOUT_S).read()) for n, m in found]
        found = list(with_floats(vllms, "sampling_params", value))
        calls += [(name, vllm.Generate(m, timeout=TIMEOUT_S).read()) for name, m in found]
        assert len(calls) >= 2 * 8 + 6
        for name, call in calls:
            with pytest.raises(grpc.aio.AioRpcError, match=name) as caught:
                await call
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        answer = await s.stub.Generate(
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=CANARY),
                sampling=pb.SamplingParams(temperature=0, max_tokens=3),
            )
        )
        assert list(answer.token_ids) == alone(CANARY, greedy(3))
