"""Fault reports about log-probabilities, on the real engine."""

from __future__ import annotations

import math

import grpc
import pytest

from jserve.errors import InvalidRequest
from jserve.messages import GenerateRequest
from jserve.sampling_params import MAX_LOGPROBS, SamplingParams
from jserve.server.proto import generate_pb2 as pb
from tests.e2e.chain_model import VOCAB
from tests.e2e.real_engine import (
    alone,
    arranged,
    generate,
    greedy,
    prompt_of,
    reference,
    serving_real,
)

ERROR = 1e-5


def logprobs_of(prompt, params):
    return generate(arranged(), [prompt], params)[0].outputs[0]


def test_O34_logprobs_0_gives_the_chosen_tokens_value_and_no_alternatives():
    output = logprobs_of([1, 2, 3], greedy(6, logprobs=0))
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    assert all(entry.top == () and entry.logprob < 0 for entry in output.logprobs)
    assert logprobs_of([1, 2, 3], greedy(6)).logprobs is None


async def test_O34_logprobs_0_and_none_differ_on_the_wire():
    async with serving_real(arranged()) as s:
        for count, num_entries in ((0, 5), (None, 0)):
            request = GenerateRequest(prompt_token_ids=[1, 2], sampling=greedy(5, logprobs=count))
            whole = await s.client.generate(request)
            assert len(whole.logprobs) == num_entries
            assert all(entry.top == () for entry in whole.logprobs)


@pytest.mark.parametrize("bad", [2_000_000_000, VOCAB + 1, -1, MAX_LOGPROBS + 1])
async def test_O37_a_count_out_of_range_is_refused_and_the_next_request_is_served(bad):
    with pytest.raises(InvalidRequest, match=f"logprobs={bad} .*0 to {MAX_LOGPROBS}"):
        greedy(1, logprobs=bad)
    async with serving_real(arranged()) as s:
        message = pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(logprobs=bad))
        for call in (s.stub.Generate(message), s.stub.GenerateStream(message).read()):
            with pytest.raises(grpc.aio.AioRpcError, match=f"logprobs={bad}") as caught:
                await call
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        most = greedy(4, logprobs=MAX_LOGPROBS)
        whole = await s.client.generate(GenerateRequest(prompt_token_ids=[5], sampling=most))
        assert list(whole.token_ids) == alone([5], greedy(4))
        assert all(len(entry.top) == MAX_LOGPROBS for entry in whole.logprobs)


def test_O38_the_chosen_tokens_value_is_its_own():
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=40, logprobs=3, ignore_eos=True)
    output = logprobs_of(prompt_of(12), params)
    in_top = 0
    for entry, token_id in zip(output.logprobs, output.token_ids, strict=True):
        assert entry.token_id == token_id
        top = dict(entry.top)
        assert list(top.values()) == sorted(top.values(), reverse=True)
        if token_id in top:
            in_top += 1
            assert entry.logprob == pytest.approx(top[token_id], abs=ERROR)
        else:
            assert entry.logprob <= min(top.values())
    assert 0 < in_top < len(output.logprobs), "both kinds should come up"


def test_O38_every_value_equals_that_of_one_pass_over_the_same_tokens():
    prompt = prompt_of(12)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=8, logprobs=0, ignore_eos=True)
    output = logprobs_of(prompt, params)
    for i, entry in enumerate(output.logprobs):
        so_far = prompt + output.token_ids[:i]
        whole = logprobs_of(so_far, greedy(1, logprobs=MAX_LOGPROBS))
        top = dict(whole.logprobs[0].top)
        if entry.token_id in top:
            assert entry.logprob == pytest.approx(top[entry.token_id], abs=1e-4)
        else:
            assert entry.logprob <= min(top.values()) + 1e-4


def test_rows_that_ask_for_logprobs_and_rows_that_do_not_share_steps():
    prompts = [prompt_of(9, i) for i in range(4)]
    params = [greedy(6, logprobs=i if i % 2 else None) for i in range(4)]
    outputs = generate(arranged(), prompts, params)
    for prompt, settings, output in zip(prompts, params, outputs, strict=True):
        assert output.outputs[0].token_ids == alone(prompt, greedy(6))
        entries = output.outputs[0].logprobs
        if settings.logprobs is None:
            assert entries is None
        else:
            assert all(len(entry.top) == settings.logprobs for entry in entries)
            assert all(math.isfinite(entry.logprob) for entry in entries)


def test_O33_prompt_logprobs_are_whole_and_equal_with_a_cold_and_a_warm_cache():
    prompt = prompt_of(33)
    params = greedy(4, prompt_logprobs=1, logprobs=0)
    engine = arranged()
    generate(engine, [[*prompt[:20], 9, 9]], greedy(2))  # a warm prefix of another prompt
    runs = [generate(engine, [prompt], params)[0] for _ in range(2)]
    runs.append(generate(engine, [prompt], greedy(4))[0])
    assert runs[2].num_cached_tokens == 32, "the plain request finds what the others left"
    assert runs[2].outputs[0].token_ids == runs[0].outputs[0].token_ids
    cold = generate(reference(), [prompt], params)[0]
    for run in runs[:2]:
        assert len(run.prompt_logprobs) == len(prompt)
        assert run.prompt_logprobs[0] is None
        assert [e.token_id for e in run.prompt_logprobs[1:]] == prompt[1:]
        found = [e.logprob for e in run.prompt_logprobs[1:]]
        assert found == pytest.approx([e.logprob for e in cold.prompt_logprobs[1:]], abs=ERROR)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_prompt_logprobs_do_not_depend_on_chunks_preemption_or_company(chunk):
    prompts = [prompt_of(75), prompt_of(40, start=1), prompt_of(64, start=2)]
    params = greedy(20, prompt_logprobs=2, n=2)
    expected = [generate(reference(), [p], params)[0] for p in prompts]
    engine = arranged(prefill_chunk=chunk, num_pages=14)
    for _ in range(2):
        for found, solo in zip(generate(engine, prompts, params), expected, strict=True):
            assert found.prompt_logprobs[0] is None
            pairs = zip(found.prompt_logprobs[1:], solo.prompt_logprobs[1:], strict=True)
            for mine, theirs in pairs:
                assert (mine.token_id, mine.rank) == (theirs.token_id, theirs.rank)
                assert mine.logprob == pytest.approx(theirs.logprob, abs=ERROR)
                assert [i for i, _ in mine.top] == [i for i, _ in theirs.top]
    assert engine.scheduler.num_preemptions or chunk == 1


def test_prompt_logprobs_are_those_that_generation_gives():
    """The model's own continuation, given back as a prompt."""
    prompt = prompt_of(20)
    [output] = generate(arranged(), [prompt], greedy(12, logprobs=0))
    choice = output.outputs[0]
    [again] = generate(arranged(), [prompt + choice.token_ids], greedy(1, prompt_logprobs=0))
    found = [e.logprob for e in again.prompt_logprobs[20:]]
    assert found == pytest.approx([e.logprob for e in choice.logprobs], abs=1e-4)
    assert all(e.rank == 1 for e in again.prompt_logprobs[20:])
