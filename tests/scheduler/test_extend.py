"""Tokens that are certain before they are computed: appended at once, computed like a prompt."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scheduler.config import RequestClass
from scheduler.policy import OUTPUT_WEIGHT
from scheduler.request import FinishReason, Request, RequestStatus
from scheduler.scheduler import Scheduler, StepPlan
from scheduler.step_shape import StepShape
from tests.scheduler.test_scheduler import PAGE, add, make, rows, turn


def state(s: Scheduler, request: Request) -> tuple:
    slot = request.slot
    held = (s.slots.num_computed[slot], s.slots.num_tokens[slot], s.slots.num_pages[slot])
    return (*map(int, held), bool(s.slots.is_decoding[slot]), list(request.output_token_ids))


def collect(s: Scheduler, *plans: StepPlan) -> list[int]:
    """Every sampled token is 9; returns those that count."""
    return [new.token_id for plan in plans for new in s.update(plan, [9] * len(plan.requests))]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_certain_tokens_are_computed_in_one_piece_and_what_is_in_flight_is_dropped(depth):
    s = make()
    a = add(s, "a", 5)
    turn(s)
    plans = [s.schedule(0.0) for _ in range(depth)]
    assert s.extend(a, [1, 2, 3]) == 3
    s.check_integrity()
    assert (a.output_token_ids, a.num_output_tokens) == ([7, 1, 2, 3], 4)
    assert collect(s, *plans) == []
    following = s.schedule(0.0)
    start = 6 if depth else 5  # a step in flight writes the KV of the last token that was known
    assert [row[1:] for row in following.rows] == [(start, 9 - start, True, False)]
    assert rows(s.schedule(0.0)) == [("a", 9, 1)]
    assert collect(s, following) == [9]
    assert a.output_token_ids == [7, 1, 2, 3, 9]


def test_certain_tokens_may_come_before_the_first_sampled_one():
    s = make()
    a = add(s, "a", 5)
    first = s.schedule(0.0)
    assert s.extend(a, [1, 2]) == 2
    assert collect(s, first) == []
    assert rows(turn(s)) == [("a", 5, 2)]
    assert a.output_token_ids == [1, 2, 7]


def test_many_certain_tokens_come_in_chunks_with_all_of_their_pages_held():
    s = make()
    a = add(s, "a", 3, 40)
    turn(s)
    assert s.extend(a, range(20)) == 20
    assert len(s.slots.pages(a)) == 24 // PAGE
    plans = [turn(s) for _ in range(3)]
    assert [rows(plan) for plan in plans] == [[("a", 3, 8)], [("a", 11, 8)], [("a", 19, 5)]]
    assert [plan.rows[0].samples for plan in plans] == [False, False, True]
    assert rows(turn(s)) == [("a", 24, 1)]


def test_neighbours_keep_what_steps_in_flight_sample_for_them():
    s = make()
    a, b = add(s, "a", 3), add(s, "b", 3)
    turn(s)
    plans = [s.schedule(0.0), s.schedule(0.0)]
    s.extend(a, [1])
    plans.append(s.schedule(0.0))
    assert [plan.samples.tolist() for plan in plans] == [[False, True], [False, True], [True, True]]
    assert collect(s, *plans) == [9] * 4
    assert (a.output_token_ids, b.output_token_ids) == ([7, 1, 9], [7, 9, 9, 9])


def test_a_step_whose_sample_is_dropped_ends_nobody():
    s = make()
    a = add(s, "a", 3, max_tokens=3)
    turn(s)
    plans = [s.schedule(0.0), s.schedule(0.0)]
    assert plans[1].ending == [a]
    assert s.extend(a, [1]) == 1
    assert plans[1].ending == []
    assert collect(s, *plans) == []
    last = s.schedule(0.0)
    assert last.ending == [a]
    assert (collect(s, last), a.finish_reason) == ([9], FinishReason.LENGTH)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(
    ("ids", "kept", "reason"),
    [
        ([1, 2, 3, 4], [1, 2, 3], FinishReason.LENGTH),
        ([1, 2, 3], [1, 2, 3], FinishReason.LENGTH),
        ([1, 5, 2], [1, 5], FinishReason.STOP),
        ([1, 2, 5, 4], [1, 2, 5], FinishReason.STOP),
    ],
)
def test_a_stop_token_or_the_last_of_max_tokens_ends_a_request_at_once(depth, ids, kept, reason):
    s = make()
    a = add(s, "a", 3, max_tokens=4, stop=frozenset({5}))
    turn(s)
    plans = [s.schedule(0.0) for _ in range(depth)]
    assert s.extend(a, ids) == len(kept)
    assert (a.finish_reason, a.output_token_ids) == (reason, [7, *kept])
    assert a.num_output_tokens == 1 + len(kept)
    assert collect(s, *plans) == []
    assert s.pool.num_free == s.pool.num_usable
    s.check_integrity()


def test_an_end_needs_no_pages():
    s = make(num_pages=1 + 2)
    a = add(s, "a", 4, 4)
    turn(s)
    s.pool.allocate(s.pool.num_free)
    assert s.extend(a, [1, 2, 3]) == 3
    assert a.is_finished


def test_kv_of_a_dropped_token_does_not_enter_the_cache():
    s = make(enable_prefix_cache=True)
    a = add(s, "a", PAGE + 2, max_tokens=3)
    turn(s)
    for _ in range(2):
        s.schedule(0.0)  # the second writes the last place of a page, with a token that is dropped
    assert int(s.slots.num_computed[a.slot]) == 2 * PAGE
    s.extend(a, [1, 2])
    assert a.is_finished
    assert s.cache.num_cached == 1
    s.check_integrity()


def test_without_enough_pages_nothing_changes_and_the_request_decodes_on():
    s = make(num_pages=1 + 4)
    a, b = add(s, "a", 3, 12), add(s, "b", 2 * PAGE, 4)
    turn(s)  # they hold 3 of 4 pages
    plan = s.schedule(0.0)
    before = state(s, a)
    assert s.extend(a, range(6)) == 0
    assert state(s, a) == before
    assert s.extend(b, [1, 2, 3, 4]) == 3, "it ends, so its pages do not matter"
    assert collect(s, plan) == [9]
    assert s.extend(a, range(6)) == 6
    s.check_integrity()


def test_only_who_decodes_is_extended():
    s = make()
    a = add(s, "a", 20)
    assert s.extend(a, [1]) == 0
    turn(s)
    assert s.extend(a, [1]) == 0, "its prompt is not computed yet"
    turn(s)
    turn(s)
    assert s.extend(a, []) == 0
    assert s.extend(a, [1, 2]) == 2
    assert s.extend(a, [3]) == 0, "those before are not computed yet"
    s._preempt(a, "test")
    assert s.extend(a, [3]) == 0
    s.finish(a, FinishReason.ABORT)
    assert s.extend(a, [3]) == 0
    assert a.output_token_ids == [7, 1, 2]


def test_a_request_that_is_preempted_while_its_certain_tokens_are_computed_keeps_them():
    s = make()
    a = add(s, "a", 3, 40)
    turn(s)
    plan = s.schedule(0.0)
    s.extend(a, range(10))
    s.schedule(0.0)
    s._preempt(a, "test")
    assert (a.status, a.num_inflight_tokens, a.num_output_tokens) == (
        RequestStatus.PREEMPTED,
        0,
        11,
    )
    assert collect(s, plan) == []
    assert rows(s.schedule(0.0)) == [("a", 0, 8)]
    s.check_integrity()


def test_certain_tokens_come_before_prompts_that_are_no_more_urgent():
    s = make(policy="priority", num_pages=1 + 40)
    a = add(s, "a", 3, 30, priority=1)
    turn(s)
    for name, priority in (("u", 0), ("p", 1)):
        add(s, name, 20, priority=priority)
    turn(s)
    s.extend(a, range(9))
    assert [r.request_id for r in s.composer.prefilling] == ["u", "a", "p"]


def test_a_tenant_is_charged_for_each_token_of_output_once():
    s = make(policy="fair")
    a = add(s, "a", 3, tenant="t")
    turn(s)
    plan = s.schedule(0.0)
    s.extend(a, [1, 2, 3, 4])
    collect(s, plan)
    turn(s)
    turn(s)
    assert a.num_output_tokens == 7
    assert s.waiting.queue._served["t"] == 3 + OUTPUT_WEIGHT * 7


def test_steps_are_predicted_by_what_certain_tokens_cost():
    s = make()
    a = add(s, "a", 5)
    turn(s)
    plan = s.schedule(0.0)
    s.extend(a, [1, 2, 3])
    collect(s, plan)
    shape = s.schedule(0.0).shape
    assert (shape.num_rows, shape.decode_rows, shape.prefill_tokens) == (1, 0, 3)
    assert (shape.context_tokens, shape.attended_pairs) == (9, 7 + 8 + 9)


def test_a_first_token_that_was_given_is_not_late():
    s = make(classes=(RequestClass(name="fast", itl_slo_s=1.0, ttft_slo_s=1.0),))
    a = add(s, "a", 3, request_class="fast", arrival_time=0.0)
    turn(s)
    s.extend(a, [1, 2])
    assert s.waiting.ttft_slack_s(99.0, s.composer.prefilling) == math.inf
    add(s, "b", 20, request_class="fast", arrival_time=0.0)
    turn(s)
    assert s.waiting.ttft_slack_s(99.0, s.composer.prefilling) == 1.0 - 99.0


class DecodesAreCheap:
    """A step of decode rows takes 1 s, one with a piece of a prompt 4 s."""

    def predict(self, shape: StepShape) -> float:
        return 4.0 if shape.prefill_tokens else 1.0

    def predict_decodes(self, num_rows, context_tokens):
        return np.ones(len(context_tokens))


def test_certain_tokens_save_time_by_their_number_and_the_rows_that_would_wait():
    s = make()
    s.step_time = DecodesAreCheap()
    alone = add(s, "alone", 3)
    assert not s.saves_time(alone, 9), "it does not decode yet"
    turn(s)
    turn(s)
    assert not s.saves_time(alone, 4)
    assert s.saves_time(alone, 5), "5 steps of its own, for one of 4 s"
    add(s, "b", 3), add(s, "c", 3)
    for _ in range(3):
        turn(s)
    assert not s.saves_time(alone, 9)
    assert s.saves_time(alone, 10), "a third of 10 steps, for 3 s that the others wait"
    s.extend(alone, range(10))
    neighbour = next(r for r in s.running if r.request_id == "b")
    assert s.saves_time(neighbour, 1), "the step has a chunk anyway"
