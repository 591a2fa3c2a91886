"""NaN and infinity in logits end the request that has them, with an error, and touch no other."""

from __future__ import annotations

import pytest

from jserve.errors import RequestFailed
from jserve.llm import LLM
from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams
from tests.e2e.real_engine import (
    POISON,
    arranged,
    assert_balanced,
    generate,
    greedy,
    outcomes,
    prompt_of,
)

SETTINGS = [
    {},
    {"temperature": 0.8, "seed": 3, "top_k": 9},
    {"presence_penalty": 1.0, "logit_bias": {5: 2.0}},
    {"logprobs": 3, "min_tokens": 5},
]


def asking(prompt, **settings) -> GenerateRequest:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 12} | settings)
    return GenerateRequest(prompt_token_ids=prompt, sampling=sampling)


@pytest.mark.parametrize("bad", POISON, ids=map(str, POISON.values()))
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_with_bad_logits_ends_alone(bad, settings, overlap):
    good = [prompt_of(30), prompt_of(9, start=1), prompt_of(40, start=2)]
    expected = outcomes(arranged("poisoned"), [asking(p, **settings) for p in good])
    engine = arranged("poisoned", overlap=overlap)
    poisoned = [*prompt_of(17, start=3), bad, 5]
    messages = [asking(p, **settings) for p in good]
    messages.insert(1, asking(poisoned, **settings))
    found = outcomes(engine, messages)
    assert isinstance(found.pop(1), RequestFailed)
    assert found == expected
    assert_balanced(engine)
    assert engine.metrics.registry.get_sample_value(
        "jserve_requests_finished_total", {"reason": "error"}
    )


def test_pages_of_a_failed_request_serve_nobody():
    """Whoever gets its pages next, and whoever shares its prefix, reads none of its NaN."""
    prefix = prompt_of(48)
    before = outcomes(arranged("poisoned"), [asking([*prefix, 7])])
    engine = arranged("poisoned", num_pages=9)  # so few that each request gets old pages
    for _ in range(3):
        [error] = outcomes(engine, [asking([*prefix[:33], 251, *prefix[33:], 7])])
        assert isinstance(error, RequestFailed)
        assert outcomes(engine, [asking([*prefix, 7])]) == before
    assert_balanced(engine)


def test_the_offline_api_raises_what_ended_a_request_and_goes_on():
    engine = arranged("poisoned")
    llm = LLM.from_engine(engine)
    with pytest.raises(RequestFailed, match="not numbers"):
        llm.generate([[251]], greedy(4))
    assert generate(engine, [[5, 6, 7]], greedy(4))[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("n", [1, 3])
def test_no_page_of_a_failed_prompt_stays_in_the_cache_with_any_number_of_choices(n):
    engine = arranged("poisoned")
    [error] = outcomes(engine, [asking([*prompt_of(20), 251, *prompt_of(20)], n=n)])
    assert isinstance(error, RequestFailed)
    assert engine.stats()["pages_cached"] == 0
    assert_balanced(engine)
