"""Fault reports about the prefix cache, on the real engine: a hit changes no output, and only what
may be shared is."""

from __future__ import annotations

import random

import pytest

from jserve.messages import GenerateRequest
from tests.e2e.real_engine import (
    PAGE,
    alone,
    arranged,
    assert_balanced,
    generate,
    greedy,
    prompt_of,
    reference,
    serving_real,
    tokens_of,
    value,
)
from tests.engine.tiny import joined, run

LOGPROB_ERROR = 1e-4


def asking(name: str, prompt, max_tokens: int = 4, **fields) -> GenerateRequest:
    return GenerateRequest(
        prompt_token_ids=prompt, sampling=greedy(max_tokens), request_id=name, **fields
    )


def cached_tokens(engine, prompt, tenant: str = "") -> int:
    engine.add(asking("probe", prompt, 1, tenant=tenant))
    return joined(run(engine))["probe"].last.usage.cached_tokens


@pytest.mark.parametrize("length", [31, 32, 33, 48])
def test_O54_page_aligned_prompts_leave_a_token_to_compute(length):
    engine = arranged()
    prompt = prompt_of(length)
    hits = []
    for _ in range(3):
        (output,) = generate(engine, [prompt], greedy(20))
        assert tokens_of([output]) == [alone(prompt, greedy(20))]
        hits.append(output.num_cached_tokens)
    assert hits[0] == 0
    assert hits[1] == hits[2] == (length - 1) // PAGE * PAGE
    assert_balanced(engine)


async def test_O55_tenants_share_no_cached_prefix():
    engine = arranged()
    prompt = prompt_of(3 * PAGE)
    seen = {}
    async with serving_real(engine) as s:
        for tenant in ("X", "Y", "", "X", "Y", ""):
            whole = await s.client.generate(
                GenerateRequest(prompt_token_ids=prompt, sampling=greedy(4), tenant=tenant)
            )
            assert list(whole.token_ids) == alone(prompt, greedy(4))
            seen.setdefault(tenant, []).append(whole.usage.cached_tokens)
    assert seen == {tenant: [0, 2 * PAGE] for tenant in ("X", "Y", "")}


@pytest.mark.parametrize("overlap", [True, False])
def test_O56_logprobs_after_a_hit_are_those_of_a_cold_run(overlap):
    logprobs = greedy(6, logprobs=20)
    engine = arranged(overlap=overlap)
    shared = prompt_of(6 * PAGE)
    generate(engine, [shared], greedy(1))
    for kept in (PAGE + 1, 2 * PAGE, 2 * PAGE + 9, 6 * PAGE):
        for changed_suffix in ([], [249, 3, 17, 5]):
            prompt = shared[:kept] + changed_suffix
            (hit,) = generate(engine, [prompt], logprobs)
            (cold,) = generate(reference(), [prompt], logprobs)
            assert hit.num_cached_tokens >= (kept - 1) // PAGE * PAGE
            assert cold.num_cached_tokens == 0
            assert tokens_of([hit]) == tokens_of([cold])
            pairs = zip(hit.outputs[0].logprobs, cold.outputs[0].logprobs, strict=True)
            for of_hit, of_cold in pairs:
                assert of_hit.logprob == pytest.approx(of_cold.logprob, abs=LOGPROB_ERROR)
                wanted = dict(of_cold.top)
                for token_id, logprob in of_hit.top[:-1]:  # the last may tie with the next one
                    assert logprob == pytest.approx(wanted[token_id], abs=LOGPROB_ERROR)


def test_O56_a_prefix_that_another_request_generated_is_found():
    engine = arranged()
    prompt = prompt_of(PAGE)
    (first,) = generate(engine, [prompt], greedy(2 * PAGE))
    talk = [*prompt, *first.outputs[0].token_ids, 5]
    (second,) = generate(engine, [talk], greedy(4))
    assert second.num_cached_tokens == 2 * PAGE  # the last token of the first one has no KV yet
    assert tokens_of([second]) == [alone(talk, greedy(4))]


def test_O57_pages_found_by_a_look_up_are_pinned_before_anyone_can_take_them():
    order = random.Random(5)
    warm, rival = prompt_of(4 * PAGE, 1), prompt_of(5 * PAGE, 2)
    hits = warm[: 3 * PAGE + 1]
    want = {"hits": alone(hits, greedy(4)), "rival": alone(rival, greedy(4))}
    engine = arranged(num_pages=1 + 7)
    for i in range(200):
        generate(engine, [warm], greedy(1))
        requests = [asking("hits", hits), asking("rival", rival)]
        order.shuffle(requests)
        for request in requests:
            engine.add(request)
        outputs = joined(run(engine, max_turns=200))
        assert {name: output.token_ids for name, output in outputs.items()} == want, i
    assert value(engine, "prefix_cache_hit_tokens_total") > 0
    assert_balanced(engine)


def test_O58_recycled_pages_do_not_keep_their_old_names():
    engine = arranged(num_pages=1 + 8)
    prompt = prompt_of(4 * PAGE)
    look_alike = prompt[: 2 * PAGE] + prompt_of(2 * PAGE, 9)
    for _ in range(3):
        generate(engine, [prompt], greedy(4))
        for start in range(20, 26):  # evicts it
            generate(engine, [prompt_of(6 * PAGE, start)], greedy(4))
        outputs = generate(engine, [prompt, look_alike], greedy(4))
        assert outputs[0].num_cached_tokens == 0
        assert tokens_of(outputs) == [alone(prompt, greedy(4)), alone(look_alike, greedy(4))]
        assert_balanced(engine)


def test_O59_recomputing_after_a_preemption_is_no_hit():
    engine = arranged(num_pages=1 + 12)
    for i in range(6):
        engine.add(asking(f"r{i}", prompt_of(20 + i, i), 100))
    outputs = joined(run(engine, max_turns=5000))
    assert value(engine, "preemptions_total") >= 3
    assert value(engine, "prefix_cache_hit_tokens_total") == 0
    assert value(engine, "prefix_cache_query_tokens_total") == sum(20 + i for i in range(6))
    assert all(output.last.usage.cached_tokens == 0 for output in outputs.values())


async def test_O60_a_reset_during_a_stream_says_that_it_was_not_done():
    engine = arranged()
    prompt = prompt_of(3 * PAGE)
    generate(engine, [prompt], greedy(1))
    engine.add(asking("running", prompt, 40))
    engine.step()
    assert not engine.reset_prefix_cache()
    run(engine)
    assert cached_tokens(engine, prompt) == 2 * PAGE
    assert engine.reset_prefix_cache()
    assert engine.stats()["pages_cached"] == 0
    assert cached_tokens(engine, prompt) == 0


def test_O61_a_prefix_in_constant_use_outlives_newcomers():
    engine = arranged(num_pages=1 + 16)
    used = prompt_of(4 * PAGE + 1, 1)
    generate(engine, [used], greedy(1))
    for start in range(30):
        generate(engine, [prompt_of(5 * PAGE, 10 + start)], greedy(1))
        assert cached_tokens(engine, used) == 4 * PAGE, f"lost after {start} others"
    assert_balanced(engine)
