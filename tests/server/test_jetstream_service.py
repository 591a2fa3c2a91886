"""JetStream's Orchestrator: its bytes on the wire, and its calls over a real channel."""

from __future__ import annotations

import grpc
import pytest

from jserve.server.jetstream_service import ORCHESTRATOR
from jserve.server.proto import jetstream_pb2 as pb
from jserve.server.rpc import stub_of
from tests.e2e.real_engine import arranged, generate, prompt_of, serving_real, tokens_of
from tests.server.conftest import TIMEOUT_S, serving
from tests.server.fake_engine import text_of
from tests.server.test_grpc_service import status_of


def orchestrator(served):
    return stub_of(served.channel, ORCHESTRATOR)


def test_the_bytes_are_those_of_jetstreams_own_clients():
    """Tags by hand: (field number << 3) | wire type, as JetStream's public proto numbers them."""
    asked = pb.DecodeRequest(
        max_tokens=5,
        token_content=pb.DecodeRequest.TokenContent(token_ids=[1, 2]),
        metadata=pb.DecodeRequest.Metadata(start_time=1.0),
        num_samples=2,
    )
    by_hand = (
        b"\x20\x05" + b"\x32\x04\x0a\x02\x01\x02" + b"\x3a\x05\x0d\x00\x00\x80\x3f" + b"\x40\x02"
    )
    assert asked.SerializeToString(deterministic=True) == by_hand
    text = pb.DecodeRequest(text_content=pb.DecodeRequest.TextContent(text="hi"))
    assert text.SerializeToString() == b"\x2a\x04\x0a\x02hi"
    sample = pb.DecodeResponse.StreamContent.Sample(text="a", token_ids=[3])
    content = pb.DecodeResponse.StreamContent(samples=[sample])
    answer = pb.DecodeResponse(stream_content=content)
    assert answer.SerializeToString() == b"\x1a\x08\x0a\x06\x0a\x01a\x12\x01\x03"
    assert pb.HealthCheckResponse(is_live=True).SerializeToString() == b"\x08\x01"


async def test_decode_streams_text_and_tokens_until_the_limit(served):
    asked = pb.DecodeRequest(text_content=pb.DecodeRequest.TextContent(text="hi"), max_tokens=3)
    got = [m.stream_content.samples async for m in orchestrator(served).Decode(asked)]
    assert [[(s.text, list(s.token_ids)) for s in samples] for samples in got] == [
        [(text_of(token), [token])] for token in range(3)
    ]


async def test_samples_keep_their_places(served):
    content = pb.DecodeRequest.TokenContent(token_ids=[1, 2])
    asked = pb.DecodeRequest(token_content=content, max_tokens=2, num_samples=2)
    tokens: list[list[int]] = [[], []]
    async for message in orchestrator(served).Decode(asked):
        for index, sample in enumerate(message.stream_content.samples):
            tokens[index] += sample.token_ids
    assert tokens == [[0, 1], [100, 101]]


async def test_one_sample_is_greedy_on_the_real_engine():
    async with serving_real(arranged()) as s:
        content = pb.DecodeRequest.TokenContent(token_ids=prompt_of(9))
        call = orchestrator(s).Decode(pb.DecodeRequest(token_content=content, max_tokens=8))
        got = [i async for m in call for i in m.stream_content.samples[0].token_ids]
    assert [got] == tokens_of(generate(arranged(), [prompt_of(9)]))


@pytest.mark.parametrize(
    "asked", [pb.DecodeRequest(), pb.DecodeRequest(max_tokens=-1, token_content={"token_ids": [1]})]
)
async def test_o91_what_cannot_be_served_is_an_invalid_argument(served, asked):
    status = await status_of(orchestrator(served).Decode(asked, timeout=TIMEOUT_S).read())
    assert status.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_o90_health_is_the_engines():
    async with serving(loaded=False) as s:
        assert not (await orchestrator(s).HealthCheck(pb.HealthCheckRequest())).is_live
        s.front.open(s.engine)
        assert (await orchestrator(s).HealthCheck(pb.HealthCheckRequest())).is_live
