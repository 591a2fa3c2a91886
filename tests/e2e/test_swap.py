"""Preempted requests whose pages wait in host memory, on the real engine: everybody gets the tokens
that each would get alone, and all pages are given back."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jserve.build import build_engine
from jserve.engine.engine import Engine
from jserve.llm import LLM, engine_config
from jserve.messages import GenerateRequest
from jserve.runner.compile import on_each_compilation
from scheduler.request import RequestStatus
from tests.e2e.real_engine import (
    PAGE,
    SETTINGS,
    alone,
    arranged,
    assert_balanced,
    greedy,
    model,
    prompt_of,
    rearranged,
    reference,
)
from tests.engine.tiny import joined, run

NUM_HOST_PAGES = 64
LENGTHS = (5, 40, 17, 64, 31, 90)
NUM_TOKENS = 120
TIGHT = 1 + -(-(max(LENGTHS) + NUM_TOKENS) // PAGE) + 4  # the longest, and little else
BOTH = pytest.mark.parametrize("overlap", [True, False])
CACHE = pytest.mark.parametrize("cache", [True, False])


@pytest.fixture(scope="module")
def built():
    """An engine with a swap space, as the composition root makes it."""
    pool = arranged()._runner._built._runner.state.kv_pool
    page_bytes = pool.nbytes // pool.shape[1]
    config = engine_config(
        model=str(model("random").folder),
        swap_space_bytes=NUM_HOST_PAGES * page_bytes + 1,
        **SETTINGS,
    )
    engine = build_engine(config)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def solo():
    """solo(length, count): greedy tokens of the prompt of that length on an engine of its own."""
    known: dict[int, list[int]] = {}

    def tokens(length: int, count: int = NUM_TOKENS) -> list[int]:
        if length not in known:
            known[length] = alone(prompt_of(length, length), greedy(NUM_TOKENS, ignore_eos=True))
        return known[length][:count]

    return tokens


def swapping(built: Engine, **limits) -> Engine:
    """An engine on a tight pool that swaps whenever the host has room."""
    engine = rearranged(built, num_pages=TIGHT, **limits)
    engine.scheduler.preemption.swap_page_s = -1.0  # cheaper than any recomputation
    return engine


def asking(length: int, count: int = NUM_TOKENS, name: str = "", priority: int = 0):
    return GenerateRequest(
        prompt_token_ids=prompt_of(length, length),
        sampling=greedy(count, ignore_eos=True),
        request_id=name or str(length),
        priority=priority,
    )


def assert_given_back(engine: Engine) -> None:
    assert_balanced(engine)
    engine.scheduler.schedule(0.0)
    assert engine.scheduler.preemption.num_host_pages_used == 0


def test_the_swap_space_has_the_pages_that_were_asked_for_and_a_measured_price(built):
    assert built.scheduler.config.num_host_pages == NUM_HOST_PAGES
    assert 0 < built._runner._swap.seconds_per_page < 1
    assert built.scheduler.preemption.swap_page_s == built._runner._swap.seconds_per_page


@pytest.mark.parametrize("pooling", ["last", "mean"])
@BOTH
def test_an_embedding_goes_on_where_it_was_swapped_out(built, overlap, pooling):
    prompts = [prompt_of(length, length) for length in (90, 60)]
    expected = [LLM.from_engine(reference()).embed(p, pooling)[0].embedding for p in prompts]
    engine = swapping(built, overlap=overlap, max_num_seqs=2, prefill_chunk=8)
    found = {
        engine.add(GenerateRequest(prompt_token_ids=p, pooling=pooling, priority=5)): None
        for p in prompts
    }
    for _ in range(4):
        assert engine.step() == []
    for name in ("urgent", "too"):
        engine.add(asking(17, 9, name))
    while engine.has_work:
        found |= {update.request_id: update.embedding for update in engine.step()}
    assert engine.scheduler.preemption.num_swapped_in > 0
    for vector, of_one in zip(found.values(), expected, strict=False):
        np.testing.assert_allclose(vector, of_one, rtol=0, atol=2e-6)
    assert_given_back(engine)


def test_an_engine_without_a_swap_space_has_none():
    assert arranged()._runner._built._runner._swap is None


@CACHE
@BOTH
def test_swapped_requests_get_the_tokens_they_would_get_alone(built, solo, overlap, cache):
    want = {str(length): solo(length) for length in LENGTHS}
    engine = swapping(built, overlap=overlap, enable_prefix_cache=cache)
    compilations: list[int] = []
    on_each_compilation(lambda: compilations.append(1))
    for length in LENGTHS:
        engine.add(asking(length))
    outputs = joined(run(engine, max_turns=5000))
    assert {name: outputs[name].token_ids for name in want} == want
    preemption = engine.scheduler.preemption
    assert engine.scheduler.num_preemptions > 0
    assert preemption.num_swapped_out > 0
    assert cache or preemption.num_swapped_in == preemption.num_swapped_out
    assert not compilations
    assert_given_back(engine)


@BOTH
def test_a_request_aborted_while_its_pages_are_on_the_host_gives_them_back(built, solo, overlap):
    want = {str(length): solo(length) for length in LENGTHS}
    engine = swapping(built, overlap=overlap, enable_prefix_cache=False)
    for length in LENGTHS:
        engine.add(asking(length))
    updates, aborted = [], []
    while engine.has_work:
        updates += engine.step()
        away = [r for r in engine.scheduler.waiting if r.host_pages is not None]
        if away and len(aborted) < 2:
            assert away[0].status == RequestStatus.PREEMPTED
            aborted.append(away[0].request_id)
            engine.abort(aborted[-1])
    outputs = joined(updates)
    assert len(aborted) == 2
    for name in set(want) - set(aborted):
        assert outputs[name].token_ids == want[name]
    assert_given_back(engine)


@pytest.mark.parametrize("num_host_pages", [5, NUM_HOST_PAGES])
@CACHE
@pytest.mark.parametrize("seed", [1, 2])
def test_random_priorities_and_aborts_change_no_output(built, solo, seed, cache, num_host_pages):
    """With few host pages, some requests are swapped and others recomputed."""
    order = random.Random(seed)
    engine = swapping(
        built, overlap=seed == 1, enable_prefix_cache=cache, num_host_pages=num_host_pages
    )
    want, updates, aborted = {}, [], set()
    for i in range(60):
        length, count = order.choice(LENGTHS), order.randint(1, NUM_TOKENS)
        want[f"r{i}"] = solo(length, count)
        engine.add(asking(length, count, f"r{i}", order.randrange(3)))
        for _ in range(order.randrange(20)):
            updates += engine.step()
            engine.scheduler.check_integrity()
            assert engine.scheduler.preemption.num_host_pages_used <= num_host_pages
        if order.random() < 0.2:
            leaving = f"r{order.randrange(i + 1)}"  # wherever it is, or after its end
            engine.abort(leaving)
            aborted.add(leaving)
    outputs = joined(updates + run(engine, max_turns=20_000))
    for name in want.keys() - aborted:
        assert outputs[name].token_ids == want[name], name
    assert engine.scheduler.preemption.num_swapped_in > 0
    assert_given_back(engine)
