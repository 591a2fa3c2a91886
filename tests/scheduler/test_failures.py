"""Requests whose logits are no numbers: they end, and nobody meets what they computed."""

from __future__ import annotations

import pytest

from scheduler.kv_events import Removed, Stored
from scheduler.request import BAD_TOKEN, FinishReason, Request, RequestStatus
from scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler import PAGE, add, make, rows, turn


def caching(**changes) -> Scheduler:
    return make(enable_prefix_cache=True, **changes)


def num_cached(s: Scheduler, request: Request) -> int:
    tokens = request.known_bytes()
    return s.cache.match(request.cache_keys, tokens, len(request.token_ids) // PAGE)[0]


@pytest.mark.parametrize("bad", [BAD_TOKEN, -7])
def test_a_bad_token_ends_its_request_and_becomes_no_output(bad):
    s = make()
    a, b = add(s, "a", 3), add(s, "b", 3)
    turn(s)
    new = s.update(s.schedule(0.0), [bad, 8])
    assert [(n.request, n.token_id, n.row) for n in new] == [(a, bad, 0), (b, 8, 1)]
    assert (a.finish_reason, a.output_token_ids, a.num_output_tokens) == (
        FinishReason.ERROR,
        [7],
        1,
    )
    assert (b.status, b.output_token_ids) == (RequestStatus.RUNNING, [7, 8])
    s.check_integrity()


def test_what_is_in_flight_behind_a_bad_token_is_dropped():
    s = make()
    a = add(s, "a", 3)
    first, second = s.schedule(0.0), s.schedule(0.0)
    assert len(s.update(first, [BAD_TOKEN])) == 1
    assert s.update(second, [8]) == []
    assert (a.output_token_ids, a.num_output_tokens) == ([], 0)
    assert s.pool.num_free == s.pool.num_usable


def test_pages_of_a_failed_request_leave_the_cache_at_once_and_routers_hear_of_it():
    s = caching()
    heard: list = []
    s.cache.events = heard.append
    a = add(s, "a", 6 * PAGE)
    for _ in range(3):
        plan = s.schedule(0.0)
        s.update(plan, [BAD_TOKEN])
    assert a.finish_reason == FinishReason.ERROR
    assert s.pool.num_free == s.pool.num_usable
    stored = [d for event in heard if isinstance(event, Stored) for d in event.digests]
    removed = [d for event in heard if isinstance(event, Removed) for d in event.digests]
    assert len(stored) == 6
    assert sorted(stored) == sorted(removed)
    add(s, "a", 6 * PAGE)
    assert rows(s.schedule(0.0)) == [("a", 0, 8)]


def test_full_pages_of_output_do_not_enter_the_cache_when_their_request_fails():
    s = caching()
    a = add(s, "a", PAGE - 1)
    for _ in range(2 * PAGE):
        turn(s)
    s.finish(a, FinishReason.ERROR, is_poisoned=True)
    assert s.cache.num_cached == 0
    s.check_integrity()


def test_pages_that_others_hold_stay_until_they_fail_too():
    s = caching()
    a = add(s, "a", 2 * PAGE + 1)
    turn(s)
    b = add(s, "a", 2 * PAGE + 2)
    turn(s)
    assert b.num_cached_tokens == 2 * PAGE
    s.finish(a, FinishReason.ERROR, is_poisoned=True)
    assert num_cached(s, a) == 2
    s.finish(b, FinishReason.ERROR, is_poisoned=True)
    assert s.cache.num_cached == 0
    s.check_integrity()


def test_pages_computed_behind_those_of_a_failed_request_leave_with_them():
    s = caching()
    a = add(s, "a", 2 * PAGE)
    turn(s)
    longer = add(s, "a", 4 * PAGE, 1)
    turn(s)
    turn(s)
    assert longer.is_finished
    assert num_cached(s, longer) == 4
    s.finish(a, FinishReason.ERROR, is_poisoned=True)
    assert s.cache.num_cached == 0


def test_the_cache_forgets_a_request_that_fails_while_preempted():
    s = caching()
    a = add(s, "a", 2 * PAGE)
    plans = [s.schedule(0.0), s.schedule(0.0)]
    s._preempt(a, "test")
    assert num_cached(s, a) == 2
    assert len(s.update(plans[0], [BAD_TOKEN])) == 1
    assert (a.finish_reason, a.num_output_tokens) == (FinishReason.ERROR, 0)
    assert (s.cache.num_cached, s.has_unfinished) == (0, False)
    assert s.update(plans[1], [8]) == []
    s.check_integrity()


def test_a_request_that_fails_before_it_starts_costs_the_cache_nothing():
    s = caching()
    add(s, "a", 2 * PAGE, 1)
    turn(s)
    waiting = add(s, "a", 2 * PAGE, 1)
    s.finish(waiting, FinishReason.ERROR, is_poisoned=True)
    assert num_cached(s, waiting) == 2


def test_who_waits_for_pages_of_a_request_that_fails_computes_them():
    s = caching(prefill_chunk=PAGE)
    a = add(s, "a", 3 * PAGE, 1)
    b = add(s, "a", 3 * PAGE, 1)
    turn(s)
    assert b.status == RequestStatus.WAITING
    s.finish(a, FinishReason.ERROR, is_poisoned=True)
    assert rows(turn(s)) == [("a", 0, PAGE)]
    assert (b.status, b.num_cached_tokens) == (RequestStatus.RUNNING, 0)


def test_an_error_that_is_not_the_models_leaves_the_cache_as_it_is():
    """Else one caller's bad settings would make a prefix cold that all share."""
    s = caching()
    a = add(s, "a", 2 * PAGE + 1, 4)
    turn(s)
    s.finish(a, FinishReason.ERROR)
    again = add(s, "a", 2 * PAGE + 1, 4)
    turn(s)
    assert again.num_cached_tokens == 2 * PAGE
    s.check_integrity()
