"""Embeddings from the real engine: those of transformers, in whatever company and however a prompt
is cut, cached or interrupted; and nothing of them is left."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jserve.build import build_engine
from jserve.engine.engine import MOST_CULPRITS
from jserve.errors import InvalidRequest, RequestFailed
from jserve.llm import LLM, engine_config
from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams
from tests.e2e.real_engine import (
    BUDGET,
    PAGE,
    POISON,
    alone,
    arranged,
    assert_balanced,
    fail_on,
    generate,
    greedy,
    outcomes,
    prompt_of,
    rearranged,
    reference,
    tokens_of,
    value,
)
from tests.models.reference import embeddings_of_transformers, reference_model

POOLINGS = ("last", "mean")
PROMPTS = [prompt_of(length, start=i) for i, length in enumerate((1, 2, 16, 17, 63, 64, 65, 150))]
CLOSE = {"rtol": 0, "atol": 2e-6}  # of float32 numbers below 1, summed in another order


def asking(prompt, pooling: str, **fields) -> GenerateRequest:
    return GenerateRequest(prompt_token_ids=prompt, pooling=pooling, **fields)


def embedded(engine, prompts, pooling: str) -> np.ndarray:
    return np.stack([o.embedding for o in LLM.from_engine(engine).embed(prompts, pooling)])


@pytest.fixture(scope="module")
def solo():
    """Each pooling's embeddings of PROMPTS, one request at a time on an engine of its own."""
    engine = reference()
    return {p: np.concatenate([embedded(engine, [x], p) for x in PROMPTS]) for p in POOLINGS}


# ---- the numbers ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(servable):
    settings = {"max_num_seqs": 3, "max_num_batched_tokens": 32, "page_size": 8}
    engine = build_engine(engine_config(model=servable("llama"), kv_memory_bytes=2**20, **settings))
    yield engine
    engine.close()


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_embeddings_are_those_of_transformers(llama, pooling, chunk):
    prompts = [sequence.ids.tolist() for sequence in reference_model("llama").sequences]
    llm = LLM.from_engine(rearranged(llama, prefill_chunk=chunk))
    found = llm.embed(prompts, pooling)
    for output, expected in zip(found, embeddings_of_transformers("llama", pooling), strict=True):
        assert output.embedding.dtype == np.float32
        np.testing.assert_allclose(output.embedding, expected, rtol=0, atol=2e-5)


ARRANGEMENTS = [
    {},
    {"overlap": False},
    {"prefill_chunk": 1},
    {"prefill_chunk": 7, "max_num_batched_tokens": 23},
    {"enable_prefix_cache": False},
    {"batching": "dynamic", "batch_window_s": 0.002},
    {"batching": "static"},
]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("limits", ARRANGEMENTS, ids=str)
def test_neither_company_nor_chunks_change_an_embedding(limits, pooling, solo):
    engine = arranged(**limits)
    np.testing.assert_allclose(embedded(engine, PROMPTS, pooling), solo[pooling], **CLOSE)
    assert engine.stats()["pages_cached"] == 0
    assert_balanced(engine)


@pytest.mark.parametrize("overlap", [True, False])
def test_embeddings_share_steps_with_every_kind_of_request(overlap, solo):
    others = [greedy(9), greedy(30, logprobs=2, prompt_logprobs=1), greedy(12, min_tokens=5)]
    prompts = [prompt_of(40, start=20 + i) for i in range(len(others))]
    expected = [alone(*both) for both in zip(prompts, others, strict=True)]
    engine = arranged(overlap=overlap)
    messages = []
    for i, prompt in enumerate(PROMPTS):
        messages.append(asking(prompt, POOLINGS[i % 2]))
        if i < len(others):
            messages.append(GenerateRequest(prompt_token_ids=prompts[i], sampling=others[i]))
    found = outcomes(engine, messages)
    assert [x for x in found if isinstance(x, list)] == expected
    for i, vector in enumerate(x for x in found if not isinstance(x, list)):
        np.testing.assert_allclose(vector, solo[POOLINGS[i % 2]][i], **CLOSE)
    assert_balanced(engine)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_preempted_embedding_is_whole(overlap, pooling, solo):
    engine = arranged(overlap=overlap, prefill_chunk=8, max_num_seqs=2)
    preempted = []
    engine.scheduler.preemption.listener = lambda request, why: preempted.append(request)
    messages = [asking(prompt, pooling, priority=5) for prompt in PROMPTS[4:]]
    found = {engine.add(message): None for message in messages}
    for _ in range(4):
        assert engine.step() == []
    for i in range(2):
        engine.add(GenerateRequest(prompt_token_ids=prompt_of(30, start=40 + i)))
    while engine.has_work:
        for update in engine.step():
            if update.request_id in found:
                found[update.request_id] = update.embedding
    assert len(preempted) == 2
    assert all(request.sampling.pooling for request in preempted)
    np.testing.assert_allclose(np.stack(list(found.values())), solo[pooling][4:], **CLOSE)
    assert_balanced(engine)


def test_in_an_invariant_engine_last_is_the_same_to_the_last_bit():
    expected = embedded(arranged("invariant"), PROMPTS[-1:], "last")[0]
    of_mean = embedded(arranged("invariant"), PROMPTS[-1:], "mean")[0]
    for limits in ({"prefill_chunk": 7}, {"prefill_chunk": 1, "overlap": False}):
        engine = arranged("invariant", **limits)
        assert (embedded(engine, PROMPTS, "last")[-1] == expected).all()
        np.testing.assert_allclose(embedded(engine, PROMPTS, "mean")[-1], of_mean, **CLOSE)


# ---- what it takes, and what it leaves --------------------------------------------------------


def test_last_takes_a_prefix_from_the_cache_and_mean_computes_all():
    prompt = prompt_of(70, start=9)
    expected = {p: embedded(reference(), [prompt], p)[0] for p in POOLINGS}
    engine = arranged()
    generate(engine, [prompt[:-1]], greedy(1))
    for pooling, num_cached in (("last", 4 * PAGE), ("mean", 0)):
        [output] = LLM.from_engine(engine).embed([prompt], pooling)
        assert output.num_cached_tokens == num_cached
        np.testing.assert_allclose(output.embedding, expected[pooling], **CLOSE)
    assert engine.stats()["pages_cached"] == 4  # the chat's
    assert_balanced(engine)


def test_equal_prompts_wait_for_no_page_that_an_embedding_computes():
    engine = arranged()
    prompts = [prompt_of(60)] * 3
    vectors = embedded(engine, prompts, "last")
    np.testing.assert_allclose(vectors[1:], vectors[:1].repeat(2, axis=0), **CLOSE)
    assert tokens_of(generate(engine, prompts[:1], greedy(4))) == [alone(prompts[0], greedy(4))]
    assert_balanced(engine)


def test_a_step_of_embeddings_alone_chooses_no_token():
    engine = arranged()
    steps = []
    dispatch = engine._runner.dispatch
    engine._runner.dispatch = lambda batch: (steps.append(batch), dispatch(batch))[1]
    embedded(engine, PROMPTS[:3], "last")
    assert steps
    assert all(batch.sampling is None for batch in steps)


def test_an_embedding_counts_its_prompt_and_no_output():
    engine = arranged()
    [output] = LLM.from_engine(engine).embed([PROMPTS[4]])
    assert output.outputs == []
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (len(PROMPTS[4]), 0)
    assert output.metrics.ttft_s == output.metrics.e2e_s
    assert output.metrics.itl_s is None
    assert value(engine, "prompt_tokens_total") == len(PROMPTS[4])
    assert value(engine, "output_tokens_total") == 0
    assert value(engine, "requests_finished_total", reason="stop") == 1


def test_a_prompt_may_fill_the_whole_length_and_no_more():
    engine = arranged(max_model_len=40)
    assert embedded(engine, [prompt_of(40)], "mean").shape == (1, 384)
    with pytest.raises(InvalidRequest, match=r"the prompt has 41 tokens; .* max_model_len=40"):
        engine.add(asking(prompt_of(41), "mean"))


def test_one_that_is_aborted_in_the_middle_gives_all_back():
    engine = arranged(prefill_chunk=8)
    request_id = engine.add(asking(PROMPTS[-1], "mean"))
    for _ in range(3):
        assert engine.step() == []
    engine.abort(request_id)
    while engine.has_work:
        assert engine.step() == []
    assert_balanced(engine)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("bad", POISON, ids=map(str, POISON.values()))
def test_hidden_states_that_are_no_numbers_end_their_request_alone(bad, pooling):
    good = [prompt_of(30), prompt_of(9, start=1), prompt_of(BUDGET + 9, start=2)]
    expected = embedded(arranged("poisoned"), good, pooling)
    engine = arranged("poisoned")
    messages = [asking(p, pooling) for p in good]
    messages.insert(1, asking([*prompt_of(17, start=3), bad, 5], pooling))
    found = outcomes(engine, messages)
    error = found.pop(1)
    assert isinstance(error, RequestFailed)
    assert "hidden states" in str(error)
    np.testing.assert_allclose(np.stack(found), expected, **CLOSE)
    assert_balanced(engine)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("overlap", [True, False])
def test_an_embedding_is_whole_after_a_step_that_failed(overlap, pooling, solo):
    engine = arranged(overlap=overlap, prefill_chunk=16)
    numbers = itertools.count()
    fail_on(engine, lambda batch: next(numbers) == 3)
    np.testing.assert_allclose(embedded(engine, PROMPTS, pooling), solo[pooling], **CLOSE)
    assert_balanced(engine)


def test_embeddings_between_requests_that_break_the_device_keep_the_engine_alive(solo):
    engine, bad = arranged(), 383
    fail_on(engine, lambda batch: bad in batch.buffer)
    for _ in range(MOST_CULPRITS + 1):
        vector, error = outcomes(engine, [asking(PROMPTS[3], "last"), asking([5, bad], "last")])
        assert isinstance(error, RequestFailed)
        np.testing.assert_allclose(vector, solo["last"][3], **CLOSE)
    assert_balanced(engine)


# ---- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pooling": "max"}, "pooling='max' is none of last, mean"),
        ({"pooling": None}, "pooling=None is none of last, mean"),
        ({"sampling": SamplingParams(temperature=0)}, "temperature=0.0 has no meaning"),
        ({"sampling": SamplingParams(max_tokens=5)}, "max_tokens=5 has no meaning"),
        ({"sampling": SamplingParams(n=2)}, "n=2 has no meaning"),
        ({"sampling": SamplingParams(stop=("x",))}, r"stop=\('x',\) has no meaning"),
        ({"prompt_token_ids": None, "messages": [{"role": "user"}]}, "messages have no embedding"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt_token_ids": [10**6]}, r"prompt_token_ids\[0\]=1000000 is not a token id"),
    ],
)
def test_what_an_embedding_cannot_have_is_refused_by_name(fields, message):
    request = {"prompt_token_ids": [5, 6], "pooling": "last"} | fields
    with pytest.raises(InvalidRequest, match=message):
        arranged().add(GenerateRequest(**request))
