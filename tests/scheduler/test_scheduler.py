"""The scheduler's single decisions: who gets the step, who starts, who gives way, who is done."""

from __future__ import annotations

import pytest

from scheduler.config import SchedulerConfig
from scheduler.request import FinishReason, Request, RequestStatus, SamplingView
from scheduler.scheduler import Scheduler, StepPlan

PAGE = 4


def make(**changes) -> Scheduler:
    limits = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "prefill_chunk": 8,
        "page_size": PAGE,
        "num_pages": 1 + 20,
        "max_model_len": 64,
        "enable_prefix_cache": False,
    }
    return Scheduler(SchedulerConfig(**(limits | changes)))


def add(s: Scheduler, name: str, num_prompt: int, max_tokens: int = 20, **fields) -> Request:
    prompt = [ord(name[0]) + i for i in range(num_prompt)]
    stop = fields.pop("stop", frozenset())
    fields.setdefault("arrival_time", float(len(s.waiting) + len(s.running)))
    request = Request(name, prompt, SamplingView(max_tokens, stop), **fields)
    s.add(request)
    return request


def rows(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(row.request.request_id, row.start, row.num_tokens) for row in plan.rows]


def turn(s: Scheduler, now: float = 0.0) -> StepPlan:
    """One step without overlap; every sampled token is 7."""
    plan = s.schedule(now)
    s.update(plan, [7] * len(plan.rows))
    s.check_integrity()
    return plan


def test_decode_rows_come_before_chunks_and_chunks_share_what_is_left():
    s = make()
    add(s, "a", 3)
    turn(s)
    add(s, "b", 20)
    add(s, "c", 6)
    assert rows(s.schedule(0.0)) == [("a", 3, 1), ("b", 0, 8), ("c", 0, 6)]


def test_a_step_never_exceeds_its_budget_nor_a_prompt_its_chunk():
    s = make(max_num_batched_tokens=10, prefill_chunk=7)
    for name, length in (("a", 30), ("b", 9), ("c", 1), ("d", 17), ("e", 5)):
        add(s, name, length, 5)
    while s.has_unfinished:
        plan = turn(s)
        assert plan.num_tokens == sum(row.num_tokens for row in plan.rows) <= 10
        assert all(row.num_tokens <= 7 for row in plan.rows)
        assert len({row.request for row in plan.rows}) == len(plan.rows) <= 4


def test_only_a_row_that_reaches_its_last_token_samples():
    s = make()
    add(s, "a", 11)
    assert [row.samples for row in turn(s).rows] == [False]
    plan = turn(s)
    assert rows(plan) == [("a", 8, 3)]
    assert [row.samples for row in plan.rows] == [True]


def test_a_step_in_flight_leaves_its_token_to_the_device():
    s = make()
    a = add(s, "a", 3, max_tokens=3)
    first = s.schedule(0.0)
    second = s.schedule(0.0)
    assert [row.reads_last_token for row in first.rows + second.rows] == [False, True]
    third = s.schedule(0.0)
    assert third.rows, "the third token is wanted"
    assert not s.schedule(0.0).rows, "a token beyond max_tokens was planned"
    for plan in (first, second, third):
        s.update(plan, [7])
    assert (a.output_token_ids, a.finish_reason) == ([7, 7, 7], FinishReason.LENGTH)


def test_requests_start_in_order_and_none_overtakes_one_that_does_not_fit():
    s = make(num_pages=1 + 6, max_num_batched_tokens=32)
    add(s, "a", 15, 4)
    b = add(s, "b", 16, 4)
    add(s, "c", 1, 1)
    assert [name for name, _, _ in rows(turn(s))] == ["a"]
    assert s.waiting.first(0.0) is b


def test_a_newcomer_leaves_one_free_page_for_each_that_runs():
    s = make(num_pages=1 + 5)
    add(s, "a", 5, 4)
    turn(s)  # holds 2 pages of 5
    b = add(s, "b", 3 * PAGE, 4)  # the other 3, but then none is left for a
    turn(s)
    assert b.status == RequestStatus.WAITING
    s.finish(b, FinishReason.ABORT)
    c = add(s, "c", 2 * PAGE, 4)
    turn(s)
    assert c.status == RequestStatus.RUNNING


def test_O40_a_prompt_gets_all_of_its_pages_at_once_or_none():
    s = make(num_pages=1 + 12, prefill_chunk=PAGE, max_num_batched_tokens=8)
    a, b = add(s, "a", 8 * PAGE, 1), add(s, "b", 8 * PAGE, 1)
    turn(s)
    assert (len(s.slots.pages(a)), b.slot) == (8, -1)
    for _ in range(20):
        turn(s)
    assert a.is_finished
    assert b.is_finished


def test_a_stop_token_ends_a_request_and_what_is_still_in_flight_is_dropped():
    s = make()
    a = add(s, "a", 3, stop=frozenset({7}))
    first, second = s.schedule(0.0), s.schedule(0.0)
    (new,) = s.update(first, [7])
    assert (new.token_id, a.finish_reason) == (7, FinishReason.STOP)
    assert s.update(second, [8]) == []
    assert a.output_token_ids == [7]
    s.check_integrity()


@pytest.mark.parametrize("turns", range(4))
def test_finishing_in_any_state_frees_everything_and_twice_is_once(turns):
    s = make()
    a = add(s, "a", 20)
    for _ in range(turns):
        turn(s)
    s.finish(a, FinishReason.ABORT)
    s.finish(a, FinishReason.DEADLINE)
    assert a.finish_reason == FinishReason.ABORT
    assert not s.has_unfinished
    assert s.pool.num_free == s.pool.num_usable
    s.check_integrity()


def test_deadlines_end_what_is_late_in_the_queue_and_on_the_device():
    s = make(max_num_seqs=1)
    running = add(s, "r", 3, deadline=5.0)
    queued = add(s, "q", 3, deadline=4.0)
    calm = add(s, "c", 3)
    turn(s)
    assert s.expire(3.9) == []
    assert s.expire(4.0) == [queued]
    assert s.expire(9.0) == [running]
    assert {running.finish_reason, queued.finish_reason} == {FinishReason.DEADLINE}
    assert rows(turn(s)) == [("c", 0, 3)]
    s.finish(calm, FinishReason.ABORT)
    assert s.expire(99.0) == []


def test_O39_what_can_never_fit_is_told_before_it_is_queued():
    s = make(num_pages=1 + 5)
    assert s.why_too_large(20) is None
    assert "21 tokens need 6 KV pages; the whole pool holds 20 tokens" in s.why_too_large(21)
    with pytest.raises(AssertionError, match="the whole pool holds 20"):
        add(s, "a", 10, 11)


def test_O54_a_wholly_cached_prompt_leaves_its_last_token_to_compute():
    s = make(enable_prefix_cache=True)
    for _ in range(2):
        a = add(s, "a", 2 * PAGE, 1)
        plan = turn(s)
    assert a.num_cached_tokens == PAGE
    assert rows(plan) == [("a", PAGE, PAGE)]


def test_O55_requests_of_other_tenants_or_adapters_find_nothing():
    s = make(enable_prefix_cache=True)
    hits = {}
    for keys in (("tenant", "X"), ("adapter", "X"), ("tenant", "Y"), None, ("tenant", "X"), None):
        a = add(s, "a", 3 * PAGE, 1, cache_keys=(keys,) if keys else ())
        turn(s)
        hits.setdefault(keys, []).append(a.num_cached_tokens)
    assert hits.pop(("tenant", "X")) == hits.pop(None) == [0, 2 * PAGE]
    assert set(map(tuple, hits.values())) == {(0,)}


def test_times_of_the_first_admission_are_kept():
    s = make()
    a = add(s, "a", 3)
    turn(s, now=5.0)
    turn(s, now=6.0)
    assert a.first_scheduled_time == 5.0


def test_live_tokens_are_those_in_pages():
    s = make()
    add(s, "a", 11)
    turn(s)
    assert s.num_live_tokens == 8
    turn(s)
    assert s.num_live_tokens == 11


def test_ended_requests_are_let_go_long_before_their_deadline():
    s = make()
    for i in range(500):
        request = add(s, f"r{i}", 2, 1, deadline=1e9)
        s.finish(request, FinishReason.ABORT)
    assert len(s._deadlines) < 50
