"""What becomes of a preempted request's pages: recomputed or swapped, as is cheaper."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.bucket import make_buckets
from scheduler.config import RequestClass
from scheduler.packer import Packer
from scheduler.request import FinishReason, Request, RequestStatus, SamplingView
from scheduler.scheduler import Scheduler
from scheduler.step_time import LinearStepTime
from tests.fakes import FakeRunner, expected_output
from tests.scheduler.test_preemption import run_dry
from tests.scheduler.test_scheduler import PAGE, add, make, rows, turn

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


def test_pages_are_copied_out_before_others_are_copied_into_them():
    """A request comes back, in the same step, into the pages of the one that gives way to it."""
    one = (RequestClass(name="one", max_num_seqs=1),)
    base = make(max_num_seqs=2, num_pages=1 + 40, num_host_pages=20, classes=one)
    s = Scheduler(base.config, SLOW, swap_page_s=0.0)
    packer, runner = Packer(s.config, make_buckets(2, 16)), FakeRunner(s.config)

    def step():
        plan = s.schedule(0.0)
        s.update(plan, runner.run(packer.pack(plan)).tolist())
        return plan

    back = add(s, "m", 8, priority=3, request_class="one")
    filler = add(s, "b", 3, priority=0)
    step()
    urgent = add(s, "u", 3, priority=0)
    step()
    assert back.host_pages is not None
    holds_the_cap, low = add(s, "d", 3, priority=1, request_class="one"), add(s, "l", 8, priority=5)
    for request in (urgent, filler):
        s.finish(request, FinishReason.ABORT)
    step()
    assert set(s.running) == {holds_the_cap, low}
    step()
    s.finish(holds_the_cap, FinishReason.ABORT)
    add(s, "e", 3, priority=0)  # takes the slot that is free
    plan = step()
    assert set(plan.copies_out[:, 0]) & set(plan.copies_in[:, 1]), "else the order would not matter"
    while s.has_unfinished:
        step()
    for request in (back, low):
        assert request.output_token_ids == expected_output(request.prompt_token_ids, 20)


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
