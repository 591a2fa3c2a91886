"""Bad input on the real engine, over gRPC and offline: each is refused with a code and words that
help, the next request gets its recorded answer, and no page is lost."""

from __future__ import annotations

import json
import math

import grpc
import pytest

from jserve.batch import BatchOptions, run_batch
from jserve.errors import InvalidRequest, Overloaded
from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams
from jserve.server.grpc_service import SERVICE
from jserve.server.proto import generate_pb2 as pb
from tests.e2e.chain_model import VOCAB
from tests.e2e.real_engine import (
    GREEDY,
    alone,
    arranged,
    assert_balanced,
    generate,
    greedy,
    prompt_of,
    serving_real,
    tokens_of,
)

LIMIT = 128
CANARY = prompt_of(21)
HUGE = 10**400  # an integer that no float holds
NOT_FINITE = [math.nan, math.inf, -math.inf]


def ids(*token_ids: int, **fields) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids), **fields)


def text(**sampling) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(**sampling))


def extended(message, field_number: int, value: int):
    """`message` with a varint field that its definition does not have, or not as a varint."""
    data = message.SerializeToString() + bytes([field_number << 3, value])
    return type(message).FromString(data)


ON_THE_WIRE = [
    (pb.GenerateRequest(), "no input; give one of prompt, token_ids or chat"),
    (pb.GenerateRequest(prompt=""), "the prompt is empty; give at least one token"),
    (ids(), "the prompt is empty; give at least one token"),
    (pb.GenerateRequest(chat=pb.ChatMessages()), "at least one"),
    (ids(1, VOCAB), rf"prompt_token_ids\[1\]={VOCAB} .* 0 to {VOCAB - 1}"),
    (ids(-1), rf"prompt_token_ids\[0\]=-1 .* 0 to {VOCAB - 1}"),
    (ids(2**40), rf"={2**40} .* 0 to {VOCAB - 1}"),
    (ids(*prompt_of(LIMIT)), f"has {LIMIT} tokens.*max_model_len={LIMIT}: use at most {LIMIT - 1}"),
    (ids(*prompt_of(LIMIT + 1)), f"max_model_len={LIMIT}: use at most {LIMIT - 1}"),
    (text(max_tokens=0), "max_tokens=0 is out of range; use 1 or more"),
    (text(max_tokens=-5), "max_tokens=-5 is out of range; use 1 or more"),
    (text(max_tokens=LIMIT), f"max_tokens={LIMIT} .* use max_tokens of at most {LIMIT - 1}"),
    (text(max_tokens=2**31 - 1), f"max_tokens of at most {LIMIT - 1}"),
    (text(max_tokens=2**62), f"max_tokens={2**62} is out of range"),
    (text(top_k=-2), "top_k=-2 is out of range; use k >= 1, or 0 or -1 for all"),
    (text(top_p=0), r"top_p=0\.0 is out of range; use a number above 0"),
    (text(temperature=-1), r"temperature=-1\.0 is out of range; use 0 to 100"),
    (text(logprobs=21), "logprobs=21 is out of range; use 0 to 20"),
    (text(stop=[""]), "stop has 1 strings; use at most 16, each of 1 to 1024"),
    (text(stop_token_ids=[-1]), "stop_token_ids=-1 is out of range; use ids of 0 or more"),
    *(
        (text(**{name: value}), f"{name}={value!r} is not a finite number; use ")
        for name in ("temperature", "top_p", "min_p")
        for value in NOT_FINITE
    ),
    *((ids(1, timeout_s=value), "timeout_s=.*seconds above 0") for value in (*NOT_FINITE, -1, 0)),
    (ids(1, tenant="t" * 300), "tenant must be a string of at most 256"),
    (ids(1, request_id="r" * 300), "request_id must have 1 to 256"),
    (ids(1, priority=2**40), f"priority={2**40} is out of range; use a 32-bit integer"),
    (extended(ids(1), 11, 1), "GenerateRequest has field number 11"),  # one of a later version
    (extended(ids(1), 1, 1), "GenerateRequest has field number 1.* with that type"),
]


@pytest.mark.parametrize(("message", "remedy"), ON_THE_WIRE, ids=lambda value: str(value)[:40])
async def test_a_bad_message_is_an_invalid_argument_that_says_what_to_use(message, remedy):
    async with serving_real(arranged(max_model_len=LIMIT)) as s:
        for call in (s.stub.Generate(message), s.stub.GenerateStream(message).read()):
            with pytest.raises(grpc.aio.AioRpcError, match=remedy) as caught:
                await call
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "\n" not in caught.value.details()
        canary = await s.client.generate(GenerateRequest(prompt_token_ids=CANARY, sampling=GREEDY))
        assert list(canary.token_ids) == alone(CANARY)


async def test_bytes_that_are_no_message_are_an_invalid_argument():
    async with serving_real(arranged()) as s:
        for data in (b"\xff\xff\xff", b"\x0a\x05\xff\xfe\xfd\xfc\xfb", b"{}"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await s.channel.unary_unary(f"/{SERVICE}/Generate")(data)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        canary = await s.client.generate(GenerateRequest(prompt_token_ids=CANARY, sampling=GREEDY))
        assert list(canary.token_ids) == alone(CANARY)


async def test_a_message_of_50_mb_names_both_sizes_and_harms_nobody():
    async with serving_real(arranged()) as s:
        other = s.client.stream(GenerateRequest(prompt_token_ids=CANARY, sampling=greedy(100)))
        head = (await anext(other)).token_ids
        with pytest.raises(Overloaded, match=r"larger than max \(50\d{6} vs. 4194304\)"):
            await s.client.generate(GenerateRequest(prompt="x" * 50_000_000))
        rest = [i async for update in other for i in update.token_ids]
        assert [*head, *rest] == alone(CANARY, greedy(100))


async def test_what_is_just_allowed_is_served():
    async with serving_real(arranged(max_model_len=LIMIT)) as s:
        for message, num_tokens in (
            (ids(*prompt_of(LIMIT - 1), sampling=pb.SamplingParams(max_tokens=1)), 1),
            (ids(VOCAB - 1, sampling=pb.SamplingParams(max_tokens=LIMIT - 1)), LIMIT - 1),
            (ids(0, sampling=pb.SamplingParams(ignore_eos=True)), LIMIT - 1),  # no max_tokens
            (ids(1, model="tiny", priority=-(2**31) + 1, tenant="t" * 256), LIMIT - 1),
            (ids(1, sampling=pb.SamplingParams(max_tokens=3, top_k=-1, min_p=1, top_p=1)), 3),
        ):
            assert len((await s.stub.Generate(message)).token_ids) == num_tokens


OFFLINE_PROMPTS = [
    ("", "empty"),
    ([], "empty"),
    ([[]], "empty"),
    ([[1], [VOCAB]], rf"prompt 1: prompt_token_ids\[0\]={VOCAB} .* 0 to {VOCAB - 1}"),
    ([[-1]], "prompt 0: .*-1"),
    ([[2**40]], f"prompt 0: .*{2**40}"),
    ([[HUGE]], "prompt 0: .* is not a token id"),
    ([[1.5]], "prompt 0 is neither a text nor a list of token ids"),
    ([None], "prompt 0 is neither"),
    ([{"text": "x"}], "prompt 0 is neither"),
    ("\ud800", "prompt 0: "),
    (prompt_of(LIMIT), f"max_model_len={LIMIT}: use at most {LIMIT - 1}"),
    (["x" * 50_000_000], f"max_model_len={LIMIT}"),
]


@pytest.mark.parametrize(("prompts", "remedy"), OFFLINE_PROMPTS, ids=lambda value: str(value)[:30])
def test_a_bad_prompt_is_refused_offline_before_anything_runs(prompts, remedy):
    engine = arranged(max_model_len=LIMIT)
    with pytest.raises(InvalidRequest, match=remedy):
        generate(engine, prompts)
    assert not engine.has_work
    assert tokens_of(generate(engine, [CANARY])) == [alone(CANARY)]
    assert_balanced(engine)


@pytest.mark.parametrize("value", [*NOT_FINITE, HUGE, "1", None, True])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_O28_a_float_that_is_none_is_refused_offline(name, value):
    with pytest.raises(InvalidRequest, match=f"{name}=.* is not a finite number; use "):
        SamplingParams(**{name: value})


def test_O28_junk_in_a_batch_file_is_an_error_record_and_the_rest_is_answered(tmp_path):
    engine = arranged(max_model_len=LIMIT)
    junk = ["NaN", "Infinity", "-Infinity", "1e400", "1" + "0" * 400, "1" + "0" * 5000, '"1"']
    fields = ("temperature", "top_p", "min_p", "timeout_s", "max_tokens", "seed", "logprobs")
    bad = [f'{{"prompt": "x", "{name}": {value}}}' for name in fields for value in junk]
    good = json.dumps({"prompt_token_ids": CANARY, "temperature": 0, "max_tokens": 8})
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([*bad, good]) + "\n")
    summary = run_batch(engine, source, target, BatchOptions())
    assert (summary.num_ok, summary.num_errors) == (1, len(bad))
    *errors, answered = [json.loads(line) for line in target.read_text().splitlines()]
    for line, record in zip(bad, errors, strict=True):
        assert 0 < len(record["error"]["message"]) < 10_000, line
    assert answered["response"]["body"]["choices"][0]["token_ids"] == alone(CANARY)
    assert_balanced(engine)


async def test_an_unknown_model_is_not_found_and_the_one_that_is_served_is_named():
    async with serving_real(arranged(max_model_len=LIMIT)) as s:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.stub.Generate(ids(1, model="gpt-5"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert "model='gpt-5' is not served here; use 'tiny'" in caught.value.details()
