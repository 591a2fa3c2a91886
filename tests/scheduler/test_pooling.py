"""Prompts without output: what the scheduler does with a request for an embedding."""

from __future__ import annotations

import pytest

from scheduler.policy import ShortestJob
from scheduler.request import FinishReason, Request, RequestStatus, SamplingView
from scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler import PAGE, add, make, rows, turn


def add_pooled(s: Scheduler, name: str, num_prompt: int, pooling: str = "mean") -> Request:
    prompt = [ord(name[0]) + i for i in range(num_prompt)]
    request = Request(name, prompt, SamplingView(max_tokens=0, pooling=pooling))
    s.add(request)
    return request


def test_a_prompt_alone_samples_nothing_and_waits_for_its_end():
    s = make()
    a = add_pooled(s, "a", 11)
    assert [row.samples for row in turn(s).rows] == [False]
    last = turn(s)
    assert rows(last) == [("a", 8, 3)]
    assert [row.samples for row in last.rows] == [False]
    assert last.ending == [a]
    assert rows(turn(s)) == []
    assert (a.status, a.num_output_tokens) == (RequestStatus.RUNNING, 0)
    s.finish(a, FinishReason.STOP)
    s.check_integrity()
    assert s.pool.num_free == s.pool.num_usable


def test_a_prompt_alone_ends_with_its_last_chunk_where_nobody_reads_it():
    s = make()
    a = add_pooled(s, "a", 5)
    s.update(s.schedule(0.0), None)
    assert a.finish_reason == FinishReason.LENGTH
    assert s.pool.num_free == s.pool.num_usable


def test_a_prompt_may_fill_the_whole_pool():
    s = make(num_pages=1 + 4, max_model_len=4 * PAGE)
    a = add_pooled(s, "a", 4 * PAGE)
    for _ in range(2):
        turn(s)
    assert int(s.slots.num_computed[a.slot]) == 4 * PAGE


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_nobody_finds_or_awaits_pages_of_a_prompt_that_is_pooled(pooling):
    s = make(enable_prefix_cache=True)
    a = add_pooled(s, "a", 12, pooling)
    turn(s)
    b = add(s, "a too", 12)
    assert rows(turn(s)) == [("a", 8, 4), ("a too", 0, 8)]
    s.finish(a, FinishReason.STOP)
    turn(s)
    assert b.num_cached_tokens == 0
    assert s.cache.num_evictable == 0


@pytest.mark.parametrize(("pooling", "num_cached"), [("last", 2 * PAGE), ("mean", 0)])
def test_only_the_last_token_takes_pages_from_the_cache(pooling, num_cached):
    s = make(enable_prefix_cache=True)
    add(s, "a", 12, max_tokens=1)
    for _ in range(2):
        turn(s)
    again = add_pooled(s, "a again", 12, pooling)
    turn(s)
    assert again.num_cached_tokens == num_cached


def test_outputs_of_a_class_are_no_shorter_for_its_embeddings():
    queue = ShortestJob()
    chat = Request("a", [1] * 8, SamplingView(max_tokens=50), request_class="x")
    before = queue.key(chat)
    pooled = Request("b", [1], SamplingView(max_tokens=0, pooling="last"), request_class="x")
    pooled.finish_reason = FinishReason.STOP
    queue.on_finished(pooled)
    assert queue.key(chat) == before
