"""With --invariant a request has the same tokens and the same log-probabilities, bit for bit,
whatever shares its steps and however it is cut, cached or interrupted."""

from __future__ import annotations

import random

import pytest

from jserve.build import build_engine
from jserve.errors import ConfigError
from jserve.llm import LLM, engine_config
from jserve.sampling_params import SamplingParams
from tests.e2e.real_engine import arranged, assert_balanced, generate, model, prompt_of
from tests.e2e.test_mixed_features import CASES, answer_of, logprobs_of

WATCHED = SamplingParams(temperature=0.9, seed=3, max_tokens=20, logprobs=4, prompt_logprobs=1)
PROMPT = prompt_of(75, start=50)
ARRANGEMENTS = [
    {"overlap": False},
    {"prefill_chunk": 1},
    {"prefill_chunk": 7},
    {"prefill_chunk": 16, "max_num_batched_tokens": 16},
    {"num_pages": 20},
    {"num_pages": 14, "overlap": False},
    {"enable_prefix_cache": False, "prefill_chunk": 23},
]


def all_of(output):
    """Everything of an output, log-probabilities to their last bit."""
    return answer_of(output), logprobs_of(output), output.prompt_token_ids


@pytest.fixture(scope="module")
def alone():
    [output] = generate(arranged("invariant"), [PROMPT], WATCHED)
    return all_of(output)


@pytest.mark.parametrize("limits", ARRANGEMENTS, ids=str)
def test_every_bit_is_the_same_in_any_company_and_arrangement(limits, alone):
    engine = arranged("invariant", **limits)
    llm = LLM.from_engine(engine)
    rng = random.Random(str(limits))
    for round_number in range(5):
        others = rng.sample(CASES, rng.randrange(len(CASES)))
        prompts, params = [c.prompt for c in others], [c.params for c in others]
        place = rng.randrange(len(others) + 1)
        prompts.insert(place, PROMPT)
        params.insert(place, WATCHED)
        assert all_of(llm.generate(prompts, params)[place]) == alone, round_number
    assert_balanced(engine)
    if "num_pages" in limits:
        assert engine.scheduler.num_preemptions


def test_every_bit_is_the_same_when_the_prompt_is_found_in_the_cache(alone):
    engine = arranged("invariant")
    sampling = SamplingParams(temperature=0.9, seed=3, max_tokens=20, logprobs=4)
    cold, warm = (generate(engine, [PROMPT], sampling)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 64)
    assert all_of(cold) == all_of(warm)
    assert answer_of(warm) == alone[0]


def test_an_invariant_engine_has_one_shape_of_step():
    programs = arranged("invariant")._runner._built._runner._programs
    assert (len(programs.forward), len(programs.choose)) == (1, 1)


def test_invariance_is_refused_where_attention_cannot_keep_it(monkeypatch):
    folder = str(model("invariant").folder)
    monkeypatch.setattr("jax.default_backend", lambda: "tpu")
    with pytest.raises(ConfigError, match=r"mosaic_tpu .*--attention_backend=xla"):
        build_engine(engine_config(model=folder, invariant=True, attention_backend="mosaic_tpu"))
