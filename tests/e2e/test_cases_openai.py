"""Fault reports about OpenAI bodies and several choices, on the real engine: batch and gRPC."""

from __future__ import annotations

import json

import grpc
import pytest

from jserve.batch import BatchOptions, run_batch
from jserve.errors import InvalidRequest
from jserve.messages import GenerateRequest, joined
from jserve.sampling_params import SamplingParams
from jserve.server.proto import generate_pb2 as pb
from tests.e2e.chain_model import VOCAB
from tests.e2e.real_engine import (
    alone,
    arranged,
    assert_balanced,
    generate,
    greedy,
    prompt_of,
    serving_real,
)

THREE = SamplingParams(temperature=1.0, seed=11, n=3, max_tokens=10, stop_token_ids=(50, 60, 70))


@pytest.fixture
def answers(tmp_path):
    """Answers the lines of a batch file on the "random" model."""

    def run(*lines):
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        target.unlink(missing_ok=True)
        engine = arranged()
        run_batch(engine, source, target, BatchOptions())
        assert_balanced(engine)
        return [json.loads(line) for line in target.read_text().splitlines()]

    return run


async def test_o31_choices_are_all_there_reproducible_and_unlike_each_other_in_both_modes():
    prompt = prompt_of(37)
    request = GenerateRequest(prompt_token_ids=prompt, sampling=THREE)
    (offline,) = generate(arranged(), [prompt], THREE)
    async with serving_real(arranged()) as s:
        whole = await s.client.choices(request)
        streamed = joined([update async for update in s.client.stream(request)])
    wanted = [c.token_ids for c in offline.outputs]
    assert len({tuple(ids) for ids in wanted}) == 3
    for choices in (offline.outputs, whole, streamed):
        assert [c.index for c in choices] == [0, 1, 2]
        assert [list(c.token_ids) for c in choices] == wanted
        assert [c.finish_reason for c in choices] == [c.finish_reason for c in offline.outputs]
    assert offline.usage.completion_tokens == sum(map(len, wanted))
    assert sum(c.usage.completion_tokens for c in streamed) == sum(map(len, wanted))


def test_o31_the_usage_of_a_body_is_the_prompt_once_and_the_sum_of_the_choices(answers):
    line = {"prompt_token_ids": prompt_of(20), "n": 4, "seed": 1, "max_tokens": 5}
    (record,) = answers(line)
    body = record["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (20, 20)


@pytest.mark.parametrize(
    "bias", [{"191222": 1}, {"-1": 1}, {"abc": 1}, {"5": 1e9}, {str(VOCAB): 1}]
)
def test_o30_a_bad_bias_is_an_error_record_that_names_the_field(answers, bias):
    bad, good = answers({"prompt": "a", "logit_bias": bias}, {"prompt": "a", "max_tokens": 2})
    assert bad["error"]["code"] == "invalid_argument"
    assert "logit_bias" in bad["error"]["message"]
    assert good["response"]["status_code"] == 200


async def test_o30_a_bad_bias_is_an_invalid_argument_and_the_next_request_is_served():
    async with serving_real(arranged()) as s:
        for token_id, bias in ((191_222, 1.0), (-1, 1.0), (5, 1e9)):
            entry = pb.LogitBias(token_id=token_id, bias=bias)
            message = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[5]), sampling=pb.SamplingParams(logit_bias=[entry])
            )
            with pytest.raises(grpc.aio.AioRpcError, match="logit_bias") as caught:
                await s.stub.Generate(message)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        request = GenerateRequest(prompt_token_ids=[5], sampling=greedy(4))
        whole = await s.client.generate(request)
        assert list(whole.token_ids) == alone([5], greedy(4))


def test_o36_echo_with_logprobs_has_one_entry_per_token_and_right_offsets(answers):
    prompt = "The sea is wide, the sea is deep: "  # more than two pages
    line = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 6, "temperature": 0}
    cold, warm = (record["response"]["body"]["choices"][0] for record in answers(line, line))
    columns = cold["logprobs"]
    assert cold["text"].startswith(prompt)
    assert "".join(columns["tokens"][: len(prompt)]) == prompt
    assert columns["text_offset"][: len(prompt) + 1] == list(range(len(prompt) + 1))
    assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
    assert all(value < 0 for value in columns["token_logprobs"][1:])
    assert {len(column) for column in columns.values()} == {len(prompt) + 6}
    assert warm["logprobs"]["token_logprobs"][1:] == pytest.approx(
        columns["token_logprobs"][1:], abs=1e-4
    )


def test_o32_a_form_without_which_nothing_would_fit_is_refused_and_not_ignored(answers):
    """The model has no EOS id, so no output of a grammar could end."""
    (record,) = answers({"prompt": "a", "guided_regex": "[0-9]+"})
    assert "EOS" in record["error"]["message"]


def test_o37_a_count_out_of_range_is_refused_wherever_it_is_written(answers):
    counts = (2_000_000_000, VOCAB + 1, -1, 21)
    lines = [{"prompt": "a", "logprobs": count} for count in counts]
    lines += [{"prompt": "a", "prompt_logprobs": count} for count in counts]
    lines += [
        {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": count}
        for count in counts
    ]
    for record in answers(*lines):
        assert "logprobs" in record["error"]["message"]
    with pytest.raises(InvalidRequest, match="prompt_logprobs=21"):
        SamplingParams(prompt_logprobs=21)
