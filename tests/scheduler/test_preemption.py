"""Who gives way, for whom, and what becomes of its pages: recomputed or swapped, as is cheaper."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.request import FinishReason, Request, RequestStatus, SamplingView
from scheduler.scheduler import Scheduler, StepPlan
from scheduler.step_time import LinearStepTime
from tests.scheduler.test_scheduler import PAGE, add, make, rows, turn

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


# ---- preemption by cost -------------------------------------------------------------------------

SLOW = LinearStepTime(per_prefill_token_s=1.0)


def swapping(swap_page_s: float, num_host_pages: int = 8, **changes) -> Scheduler:
    base = make(num_pages=1 + 6, num_host_pages=num_host_pages, **changes)
    return Scheduler(base.config, SLOW, swap_page_s)


def dry(s: Scheduler):
    """Two requests that outgrow the pool; returns the plan that preempts, and the victim."""
    add(s, "b", 8, 16)
    small = add(s, "s", 3, 16)
    return run_dry(s), small


@pytest.mark.parametrize(("swap_page_s", "swaps"), [(0.0, True), (1.0, True), (3.0, False)])
def test_the_cheaper_of_swapping_and_recomputing_is_done(swap_page_s, swaps):
    s = swapping(swap_page_s)
    plan, small = dry(s)
    num_pages = len(plan.copies_out)
    assert (num_pages > 0) == swaps
    assert (small.host_pages is not None) == swaps
    if swaps:
        assert num_pages == -(-small.num_swapped_tokens // PAGE)
        assert 2 * num_pages * swap_page_s < small.num_swapped_tokens


def test_swapped_pages_come_back_before_the_step_that_reads_them():
    s = swapping(0.0)
    plan, small = dry(s)
    out = plan.copies_out
    tokens = small.num_swapped_tokens
    while small.status != RequestStatus.RUNNING:
        assert s.preemption.num_host_pages_used == len(out)
        plan = turn(s)
    assert plan.copies_in[:, 0].tolist() == out[:, 1].tolist()
    assert plan.copies_in[:, 1].tolist() == s.slots.pages(small)[: len(out)].tolist()
    assert [(start, n) for name, start, n in rows(plan) if name == "s"] == [(tokens, 1)]
    assert s.preemption.num_host_pages_used == 0


@pytest.mark.parametrize("still_cached", [True, False])
def test_only_what_is_not_cached_any_more_is_copied_back(still_cached):
    s = swapping(0.0, enable_prefix_cache=True)
    plan, small = dry(s)
    num_out, num_tokens = len(plan.copies_out), small.num_swapped_tokens
    s.finish(next(iter(s.running)), FinishReason.ABORT)
    if not still_cached:
        s.pool.free(s.cache.allocate(s.cache.num_available))
    while small.status != RequestStatus.RUNNING:
        plan = turn(s)
    num_shared = num_tokens // PAGE if still_cached else 0
    assert len(plan.copies_in) == num_out - num_shared
    assert plan.copies_in[:, 1].tolist() == s.slots.pages(small)[num_shared:num_out].tolist()
    assert rows(plan)[-1] == ("s", num_tokens, 1)


def test_nothing_is_copied_back_where_the_cache_has_it_all():
    s = swapping(0.0, enable_prefix_cache=True)
    small = add(s, "s", 2 * PAGE, 8)
    s.schedule(0.0)
    s._preempt(small, "test")
    assert (len(small.host_pages), small.num_swapped_tokens) == (2, 2 * PAGE)
    s.update(s._in_flight[0], [7])
    plan = s.schedule(0.0)
    assert (len(plan.copies_out), len(plan.copies_in)) == (2, 0)
    assert rows(plan) == [("s", 2 * PAGE, 1)]
    assert s.preemption.num_host_pages_used == 0


@pytest.mark.parametrize("num_host_pages", [0, 1])
def test_a_host_pool_without_room_for_all_means_recomputing(num_host_pages):
    s = swapping(0.0, num_host_pages)
    plan, small = dry(s)
    assert len(plan.copies_out) == 0
    assert small.host_pages is None
    assert s.preemption.host.num_free == num_host_pages


def test_what_is_aborted_while_swapped_out_gives_its_host_pages_back():
    s = swapping(0.0)
    _, small = dry(s)
    s.finish(small, FinishReason.ABORT)
    assert s.preemption.num_host_pages_used == 0
    turn(s)
    assert s.preemption.host.num_free == 8


def test_host_pages_are_used_again_only_after_the_copies_that_read_them_were_handed_over():
    preemption = swapping(0.0, num_host_pages=2).preemption
    first, second = (Request(n, [1] * 8, SamplingView(9)) for n in "ab")
    preemption.on_preempt(first, np.array([3, 4]), 8, "test")
    out, _ = preemption.take_copies()
    preemption.bring_back(first, np.array([5, 6, 7]), 0)
    preemption.on_preempt(second, np.array([8, 9]), 8, "test")
    assert second.host_pages is None, "they would be overwritten before they are read"
    _, back = preemption.take_copies()
    assert back.tolist() == [[out[0, 1], 5], [out[1, 1], 6]]
    preemption.on_preempt(second, np.array([8, 9]), 8, "test")
    assert sorted(second.host_pages) == sorted(out[:, 1])


def test_the_cause_of_each_preemption_is_counted_and_told():
    s = swapping(0.0)
    heard = []
    s.preemption.listener = lambda request, cause: heard.append((request.request_id, cause))
    dry(s)
    assert heard == [("s", "no free page")]
    assert s.preemption.counts == {"no free page": 1}


def test_a_cost_is_asked_for_steps_that_can_exist():
    s = make(num_pages=1 + 6, num_host_pages=8, prefill_chunk=500)
    s.preemption.swap_page_s = 1e9
    dry(s)  # would ask a bucket that no step has
    assert np.isfinite(s.preemption._recompute_s(64))
