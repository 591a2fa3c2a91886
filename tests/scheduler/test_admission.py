"""Who may start: classes with caps, the gate for long prompts, groups, bounds of the queue, and
equal prefixes."""

from __future__ import annotations

import pytest

from scheduler.config import RequestClass
from scheduler.request import FinishReason, RequestStatus
from scheduler.scheduler import Scheduler
from tests.scheduler.test_preemption import run_dry
from tests.scheduler.test_scheduler import PAGE, add, make, rows, turn

CAPPED = (RequestClass(name="fast"), RequestClass(name="batch", priority=5, max_num_seqs=1))


def names(s: Scheduler) -> list[str]:
    return [request.request_id for request in s.running]


# ---- classes and gates --------------------------------------------------------------------------


def test_a_class_at_its_cap_blocks_no_other_and_goes_on_when_one_of_it_ends():
    s = make(classes=CAPPED, policy="fcfs")
    first = add(s, "b1", 3, request_class="batch")
    add(s, "c2", 3, request_class="batch")
    add(s, "d3", 3, request_class="batch")
    add(s, "f1", 3, request_class="fast")
    turn(s)
    assert names(s) == ["b1", "f1"]
    assert len(s.waiting) == 2
    assert {r.request_id for r in s.waiting} == {"c2", "d3"}
    s.finish(first, FinishReason.ABORT)
    turn(s)
    assert names(s) == ["f1", "c2"]


def test_what_was_set_aside_can_be_aborted():
    s = make(classes=CAPPED, policy="fcfs")
    running, aside = (add(s, n, 3, request_class="batch") for n in ("a", "b"))
    turn(s)
    s.finish(aside, FinishReason.ABORT)
    assert len(s.waiting) == 0
    s.finish(running, FinishReason.ABORT)
    assert not s.has_unfinished
    s.check_integrity()


def test_short_prompts_pass_long_ones_through_the_gate():
    s = make(long_prompt_tokens=10, max_long_prompts=1, policy="fcfs", num_pages=1 + 40)
    add(s, "L1", 30)
    add(s, "M2", 30)
    add(s, "s", 3)
    turn(s)
    assert names(s) == ["L1", "s"]
    while "M2" not in names(s):
        turn(s)
        assert sum(r in s.composer.prefilling for r in s.waiting.long) <= 1


def test_long_prompts_leave_their_share_to_short_ones_and_take_what_is_left_over():
    s = make(
        long_prompt_tokens=10,
        max_long_prompts=2,
        long_prompt_share=0.25,
        prefill_chunk=16,
        policy="fcfs",
        num_pages=1 + 40,
    )
    add(s, "L", 30)
    add(s, "s", 9)
    assert sorted(rows(s.schedule(0.0))) == [("L", 0, 7), ("s", 0, 9)]  # 4, then what is left
    add(s, "t", 9)
    add(s, "u", 9)
    plan = {name: count for name, _, count in rows(s.schedule(0.0))}
    assert plan["t"] == 9
    assert plan["L"] <= 4, "its share of the budget while others want it"


def test_a_cached_beginning_makes_a_long_prompt_short():
    s = make(long_prompt_tokens=10, enable_prefix_cache=True, num_pages=1 + 40, policy="fcfs")
    first = add(s, "a", 24, 1)
    while not first.is_finished:
        turn(s)
    add(s, "L", 40)
    again = add(s, "a", 24, 1)
    turn(s)
    assert again.status == RequestStatus.RUNNING or again.is_finished
    assert again.num_cached_tokens == 20


# ---- order of a step, groups --------------------------------------------------------------------


def test_prefill_first_lets_prompts_take_the_budget_and_decodes_wait():
    s = make(prefill_first=True, prefill_chunk=16)
    add(s, "a", 3)
    turn(s)
    add(s, "b", 32)
    assert rows(turn(s)) == [("b", 0, 16)]
    assert rows(turn(s)) == [("b", 16, 16)]
    assert rows(turn(s)) == [("a", 3, 1), ("b", 32, 1)]


def test_a_static_group_runs_until_its_last_one_ends():
    s = make(batching="static", max_num_seqs=2)
    short, long = add(s, "a", 2, 1), add(s, "b", 2, 4)
    late = add(s, "c", 2, 1)
    while not long.is_finished:
        assert late.status == RequestStatus.WAITING
        turn(s)
    assert short.is_finished
    turn(s)
    assert late.is_finished


def test_a_dynamic_group_waits_to_be_full_or_for_its_window():
    s = make(batching="dynamic", max_num_seqs=2, batch_window_s=0.5)
    one = add(s, "a", 2, 1, arrival_time=10.0)
    assert not turn(s, now=10.2).requests
    assert s.next_wake_s(10.2) == pytest.approx(0.3)
    add(s, "b", 2, 1, arrival_time=10.3)
    assert turn(s, now=10.3).requests[0] is one
    add(s, "c", 2, 1, arrival_time=11.0)
    assert not turn(s, now=11.4).requests
    assert turn(s, now=11.5).requests


def test_who_was_set_aside_counts_in_the_window_of_a_dynamic_group():
    s = make(batching="dynamic", batch_window_s=0.5, classes=CAPPED)
    first, aside = (add(s, n, 2, 1, request_class="batch", arrival_time=0.0) for n in "ab")
    assert turn(s, now=0.6).requests == [first]
    late = add(s, "c", 2, 1, arrival_time=0.6)
    assert s.next_wake_s(0.7) == 0.0
    assert turn(s, now=0.7).requests == [aside, late]


def test_a_scheduler_without_deadlines_or_windows_waits_for_events_alone():
    s = make()
    assert s.next_wake_s(0.0) is None
    add(s, "a", 2, deadline=4.0)
    assert s.next_wake_s(1.0) == 3.0
    assert s.next_wake_s(9.0) == 0.0


# ---- bounds -------------------------------------------------------------------------------------


def test_a_queue_deadline_ends_what_has_not_started_and_nothing_else():
    s = make(max_num_seqs=1)
    started = add(s, "a", 3, queue_deadline=2.0)
    waiting = add(s, "b", 3, queue_deadline=2.0)
    turn(s)
    assert s.expire(5.0) == [waiting]
    assert started.status == RequestStatus.RUNNING


def test_the_queue_is_bounded_by_requests_and_by_tokens():
    s = make(max_num_seqs=1, max_queued_requests=2, max_queued_tokens=10)
    assert s.waiting.why_full(99, num_live=0) is None, "alone it may be of any length"
    add(s, "a", 3)
    turn(s)
    add(s, "b", 6)
    assert s.waiting.why_full(4, num_live=2) is None
    limit, why = s.waiting.why_full(5, num_live=2)
    assert limit == "tokens"
    assert "6 prompt tokens are queued; 5 more exceed the limit of 10" in why
    assert s.waiting.why_full(2, num_live=2, num_more_tokens=3)[0] == "tokens"
    add(s, "c", 2)
    limit, why = s.waiting.why_full(1, num_live=3)
    assert (limit, why) == ("requests", "3 requests are running or queued, the limit")


def test_preempted_requests_take_no_room_in_the_queue():
    s = make(num_pages=1 + 6, max_queued_requests=1, max_queued_tokens=5)
    add(s, "b", 8, 16)
    add(s, "s", 3, 16)
    run_dry(s)
    assert len(s.waiting) == s.waiting.num_preempted == 1
    assert s.waiting.why_full(5, num_live=2) is None


def test_the_watermark_stays_free():
    s = make(num_pages=1 + 20, watermark=0.5, max_num_batched_tokens=64, prefill_chunk=64)
    add(s, "a", 20)
    big = add(s, "b", 24)
    turn(s)
    assert big.status == RequestStatus.WAITING, "5 + 6 pages leave 9 of 20"
    assert s.pool.num_free == 15


def test_a_preempted_request_needs_more_room_each_time_unless_it_is_alone():
    s = make(num_pages=1 + 12)
    add(s, "b", 4, 30)
    turn(s)
    again = add(s, "s", 8, 8)  # 2 pages; 1 is in use, 11 are free
    again.num_preemptions = 3
    turn(s)
    assert again.status == RequestStatus.RUNNING, "2 + 8 of 11"
    s.finish(again, FinishReason.ABORT)
    again = add(s, "t", 8, 8)
    again.num_preemptions = 4
    turn(s)
    assert again.status == RequestStatus.WAITING, "2 + 16 of 11"
    s.finish(next(iter(s.running)), FinishReason.ABORT)
    turn(s)
    assert again.status == RequestStatus.RUNNING


# ---- equal prefixes -----------------------------------------------------------------------------


def sharing(**changes) -> Scheduler:
    return make(enable_prefix_cache=True, num_pages=1 + 60, max_num_batched_tokens=64, **changes)


def test_equal_prompts_of_one_batch_are_computed_once():
    s = sharing()
    requests = [add(s, "same", 24, 2) for _ in range(4)]
    computed = 0
    while s.has_unfinished:
        plan = turn(s)
        computed += sum(count for _, _, count in rows(plan)) - plan.num_decodes
    assert computed == 24 + 3 * PAGE, "the others compute their last page"
    assert [r.num_cached_tokens for r in requests] == [0, 20, 20, 20]


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_who_waits_for_another_ones_prefix_goes_on_when_that_one_leaves(end):
    s = sharing()
    first, second = add(s, "same", 24, 2), add(s, "same", 24, 2)
    turn(s)
    assert second.status == RequestStatus.WAITING
    if end == "abort":
        s.finish(first, FinishReason.ABORT)
    else:
        s._preempt(first, "test")
    while s.has_unfinished:
        turn(s)
    assert second.finish_reason == FinishReason.LENGTH
    assert not s.pages._in_work


def test_different_prompts_and_other_tenants_wait_for_nobody():
    s = sharing()
    add(s, "a", 24, 2)
    add(s, "b", 24, 2)
    add(s, "a", 24, 2, cache_keys=(("tenant", "x"),))
    turn(s)
    turn(s)
    assert len(s.running) == 3


def test_the_next_turn_of_a_conversation_finds_what_was_generated():
    s = sharing()
    first = add(s, "a", 10, 11)
    while not first.is_finished:
        turn(s)
    talk = first.token_ids + [9] * 6
    second = add(s, "z", 1, 2)
    second.prompt_token_ids = talk
    while not second.is_finished:
        turn(s)
    assert second.num_cached_tokens == 20, "all full pages but that of the last token"


def test_a_static_group_of_equal_prompts_starts_together():
    s = make(batching="static", enable_prefix_cache=True, num_pages=1 + 60, long_prompt_tokens=2)
    for _ in range(4):
        add(s, "same", 12, 3)
    turn(s)
    assert len(s.running) == 4


def test_a_dynamic_group_starts_when_its_window_is_over_to_the_last_bit():
    s = make(batching="dynamic", batch_window_s=0.05)
    add(s, "a", 2, 1, arrival_time=0.3)
    wake = s.next_wake_s(0.3)
    assert turn(s, now=0.3 + wake).requests


def test_an_urgent_prompt_is_computed_before_less_urgent_ones_that_began():
    s = make(num_pages=1 + 60)
    for name in "abc":
        add(s, name, 40, 2, priority=9)
    turn(s)
    urgent = add(s, "u", 6, 2, priority=0)
    assert ("u", 0, 6) in rows(turn(s))
    assert urgent.num_output_tokens == 1


def test_no_back_off_asks_for_more_pages_than_there_are():
    s = make(num_pages=1 + 60, watermark=0.1)
    add(s, "a", 4, 8)
    turn(s)
    again = add(s, "b", 4, 8)
    again.num_preemptions = 50
    assert s._spare_for(again) <= 60 - 1


def test_a_crowd_that_waits_for_one_prefix_holds_back_nobody_else():
    s = sharing(prefill_chunk=PAGE)
    for _ in range(300):
        add(s, "same", 40, 2)
    other = add(s, "z", 6, 2, arrival_time=1e6)
    for _ in range(8):
        if not other.num_output_tokens:
            turn(s)
    assert other.num_output_tokens
    assert s.composer.prefilling, "the first of the crowd is not done yet"


def test_who_shares_less_than_all_waits_no_longer_than_that():
    s = sharing()
    add(s, "a", 40, 2)
    short = add(s, "z", 1, 2)
    short.prompt_token_ids = [ord("a") + i for i in range(9)] + [7] * 5  # two pages of a's ten
    for _ in range(2):
        turn(s)
    assert short.status == RequestStatus.RUNNING
    assert short.num_cached_tokens == 2 * PAGE


def test_an_urgent_prompt_does_not_wait_for_a_less_urgent_ones_prefix():
    s = sharing()
    add(s, "same", 24, 2, priority=9)
    urgent = add(s, "same", 24, 2, priority=0)
    add(s, "same", 24, 2, priority=9)
    turn(s)
    turn(s)
    assert urgent.status == RequestStatus.RUNNING


def test_a_laxer_class_keeps_to_its_own_target_and_not_to_the_engines():
    kinds = (RequestClass(name="batch", itl_slo_s=0.5), RequestClass(name="fast"))
    s = make(itl_slo_s=0.05, classes=kinds)
    assert s.waiting.strictest_itl_slo_s() == 0.05, "while nobody runs"
    add(s, "b", 3, request_class="batch")
    turn(s)
    assert s.waiting.strictest_itl_slo_s() == 0.5
    add(s, "f", 3, request_class="fast")
    turn(s)
    assert s.waiting.strictest_itl_slo_s() == 0.05
