"""Who gives way, for whom, and how it comes back."""

from __future__ import annotations

import pytest

from scheduler.config import RequestClass
from scheduler.request import FinishReason, RequestStatus
from scheduler.scheduler import Scheduler, StepPlan
from tests.scheduler.test_scheduler import PAGE, add, make, rows, turn

ONE = (RequestClass(name="one", max_num_seqs=1),)


# ---- the pool is dry ---------------------------------------------------------------------------


def run_dry(s: Scheduler) -> StepPlan:
    """Steps until the first preemption; returns that step's plan."""
    for _ in range(100):
        plan = turn(s)
        if s.num_preemptions:
            return plan
    raise AssertionError("no preemption")


def test_when_the_pool_is_dry_the_request_that_loses_the_least_work_gives_way():
    s = make(num_pages=1 + 6)
    big, small = add(s, "b", 8, 16), add(s, "s", 3, 16)
    plan = run_dry(s)
    assert (big.status, small.status) == (RequestStatus.RUNNING, RequestStatus.PREEMPTED)
    assert small not in [row.request for row in plan.rows]
    assert (small.slot, small.prefix) == (-1, None)


def test_the_least_urgent_request_gives_way_before_the_one_with_the_least_work():
    s = make(num_pages=1 + 6)
    big, small = add(s, "b", 8, 16, priority=1), add(s, "s", 3, 16, priority=0)
    run_dry(s)
    assert (big.status, small.status) == (RequestStatus.PREEMPTED, RequestStatus.RUNNING)


def test_O41_a_victim_that_was_planned_in_the_same_step_is_taken_out_of_it():
    s = make(num_pages=1 + 5)
    planned_first = add(s, "p", 3, 13, priority=1)
    urgent = add(s, "u", 7, 13, priority=0)
    plan = run_dry(s)
    assert planned_first.status == RequestStatus.PREEMPTED
    assert [row.request for row in plan.rows] == [urgent]


def test_nobody_starts_in_the_step_of_a_preemption():
    s = make(num_pages=1 + 6)
    big = add(s, "b", 8, 16)
    add(s, "s", 3, 16)
    newcomer = add(s, "n", 8, 1)
    plan = run_dry(s)
    assert s.pool.num_free >= len(newcomer.prompt_token_ids) // PAGE, "there was room"
    assert [row.request for row in plan.rows] == [big]


def test_a_preempted_request_keeps_its_tokens_and_recomputes_them():
    s = make(num_pages=1 + 6)
    add(s, "b", 8, 12)
    small = add(s, "s", 3, 12)
    run_dry(s)
    tokens = list(small.token_ids)
    while small.status != RequestStatus.RUNNING:
        plan = turn(s)
    assert [(row.start, row.num_tokens) for row in plan.rows if row.request is small] == [
        (0, min(len(tokens), s.config.prefill_chunk))
    ]
    while s.has_unfinished:
        turn(s)
    assert small.token_ids[: len(tokens)] == tokens
    assert small.num_output_tokens == 12


def test_a_preempted_request_with_a_token_in_flight_waits_for_it():
    s = make(num_pages=1 + 5)
    a, b = add(s, "a", 7, 13), add(s, "b", 3, 13)
    plans = [s.schedule(0.0)]
    while True:
        plans.append(s.schedule(0.0))
        if s.num_preemptions:
            break
        plan = plans.pop(0)
        s.update(plan, [7] * len(plan.rows))
    assert b.status == RequestStatus.PREEMPTED
    known = len(b.token_ids)
    in_flight = b.num_inflight_tokens
    assert in_flight == 1
    for plan in plans:
        s.update(plan, [9] * len(plan.rows))
    assert b.num_inflight_tokens == 0
    assert len(b.token_ids) == known + in_flight
    assert a.status == RequestStatus.RUNNING
    s.check_integrity()


def test_a_preempted_request_starts_again_only_when_its_tokens_in_flight_are_known():
    s = make()
    a = add(s, "a", 3)
    plans = [s.schedule(0.0), s.schedule(0.0)]
    s._preempt(a, "test")
    for plan in plans:
        assert not s.schedule(0.0).requests
        s.update(plan, [9])
    assert rows(s.schedule(0.0)) == [("a", 0, 5)]


def test_pages_of_a_preempted_request_are_found_again_in_the_cache():
    s = make(num_pages=1 + 8, enable_prefix_cache=True)
    big, small = add(s, "b", 12, 16), add(s, "s", 9, 16)
    run_dry(s)
    assert small.status == RequestStatus.PREEMPTED
    s.finish(big, FinishReason.ABORT)
    plan = turn(s)
    assert [row.request for row in plan.rows] == [small]
    assert plan.rows[0].start >= 2 * PAGE
    assert small.num_cached_tokens == 0, "O59: recomputing is no hit of the prompt"


# ---- urgency ------------------------------------------------------------------------------------


def test_O42_an_urgent_request_takes_a_slot_from_the_least_urgent():
    s = make(max_num_seqs=2)
    low, lower = add(s, "a", 3, priority=2), add(s, "b", 3, priority=3)
    turn(s)
    urgent = add(s, "u", 3, priority=0)
    plan = turn(s)
    assert urgent in plan.requests
    assert (low.status, lower.status) == (RequestStatus.RUNNING, RequestStatus.PREEMPTED)
    assert lower not in plan.requests


def test_O42_an_urgent_request_takes_pages_from_as_many_as_it_must():
    s = make(num_pages=1 + 11, prefill_chunk=16, max_num_batched_tokens=32)
    low, lower, lowest = (add(s, n, 9, 8, priority=p) for n, p in (("a", 1), ("b", 2), ("c", 3)))
    turn(s)  # 3 pages each, 2 are free
    urgent = add(s, "u", 16, 4, priority=0)  # 4 pages, and one to spare for each that stays
    plan = turn(s)
    assert plan.requests == [low, urgent]
    assert (lower.status, lowest.status) == (RequestStatus.PREEMPTED,) * 2
    assert s.preemption.counts == {"a more urgent request": 2}


@pytest.mark.parametrize("lane", ["long", "prefix"])
def test_O42_an_urgent_request_that_was_set_aside_takes_a_slot_once_it_may(lane):
    """It waited for another one's prompt, not for the less urgent one that still runs."""
    gate = {"long_prompt_tokens": 10} if lane == "long" else {"enable_prefix_cache": True}
    s = make(max_num_seqs=2, num_pages=1 + 40, **gate)
    low, _ = add(s, "a", 3, 40, priority=5), add(s, "b", 3, 40, priority=5)
    turn(s)
    first = add(s, "u", 12, 40, priority=0)
    second = add(s, "v" if lane == "long" else "u", 12, 40, priority=0)
    plan = turn(s)
    assert (low in plan.requests, first in plan.requests) == (True, True)
    assert second.status == RequestStatus.WAITING
    turn(s)
    turn(s)
    assert list(s.running) == [first, second]


def test_who_starts_in_a_step_does_not_give_way_in_it():
    """Its pages may be on their way in: what is copied out first would be what they held before."""
    s = make(
        max_num_seqs=3, num_pages=1 + 60, prefill_chunk=4, max_num_batched_tokens=32, classes=ONE
    )
    add(s, "p", 40, priority=9)
    add(s, "v", 3, priority=8, request_class="one")
    turn(s)
    urgent = add(s, "y", 3, priority=0, request_class="one")  # waits for v, who gives way to x
    started = [add(s, name, 3, priority=p) for name, p in (("w", 1), ("z", 3), ("x", 4))]
    turn(s)
    assert list(s.running) == started
    turn(s)
    assert list(s.running) == [*started[:2], urgent]


def test_who_gives_way_leaves_the_step_though_its_piece_was_planned():
    s = make(max_num_seqs=2, max_starvation_s=10.0, prefill_chunk=4, num_pages=1 + 40)
    prompt = add(s, "p", 40, priority=5, arrival_time=5.0)
    turn(s, now=5.0)
    starved = add(s, "z", 3, priority=9, arrival_time=0.0)  # first, so nobody urgent is seen yet
    urgent = add(s, "u", 3, priority=0, arrival_time=11.0)
    plan = turn(s, now=11.0)
    assert prompt.status == RequestStatus.PREEMPTED
    assert plan.requests == [starved, urgent]


def test_nobody_gives_way_where_nothing_is_said_of_urgency():
    s = make(max_num_seqs=1, policy="fcfs")
    running = add(s, "a", 3, priority=2)
    turn(s)
    add(s, "u", 3, priority=0)
    turn(s)
    assert running.status == RequestStatus.RUNNING


@pytest.mark.parametrize(
    ("now", "status"), [(9.0, RequestStatus.PREEMPTED), (10.0, RequestStatus.RUNNING)]
)
def test_who_came_as_long_ago_as_any_may_wait_is_spared(now, status):
    s = make(max_num_seqs=1, max_starvation_s=10.0)
    running = add(s, "a", 3, priority=2, arrival_time=0.0)
    turn(s, now=8.0)
    add(s, "u", 3, priority=0, arrival_time=8.0)
    turn(s, now=now)
    assert running.status == status


def test_equals_do_not_give_way_to_each_other():
    s = make(max_num_seqs=1)
    running = add(s, "a", 3, priority=1)
    turn(s)
    add(s, "u", 3, priority=1)
    turn(s)
    assert running.status == RequestStatus.RUNNING


def test_nobody_gives_way_where_that_would_not_be_enough():
    s = make(max_num_seqs=3, num_pages=1 + 10)
    add(s, "a", 24, 4, priority=0)  # 6 of 10 pages
    low = add(s, "b", 4, 8, priority=5)
    turn(s)
    turn(s)
    add(s, "u", 20, 4, priority=0)  # needs 5; 2 are free, the low one holds 2
    turn(s)
    assert low.status == RequestStatus.RUNNING
    assert s.num_preemptions == 0
