"""Finding the request that a device cannot compute."""

from __future__ import annotations

import pytest

from scheduler.config import SchedulerConfig
from scheduler.request import FinishReason, Request, SamplingView
from scheduler.scheduler import Scheduler
from scheduler.suspects import Group, Suspects


def named(count: int) -> list[Request]:
    return [Request(f"r{i}", [i + 1], SamplingView(8)) for i in range(count)]


def trial(suspects: Suspects, held: list[Group], requests: list[Request], bad: set[Request]):
    """Runs steps of those that may run until somebody is found; returns him and the failures."""
    for failures in range(1, 100):
        suspects.go_on()
        may_run = [r for r in requests if not any(r in group for group in held)]
        if not bad.intersection(may_run):
            suspects.on_tokens(may_run)
            continue
        culprit = suspects.on_failure(may_run)
        if culprit is not None:
            return culprit, failures
    raise AssertionError("nobody was found")


@pytest.mark.parametrize("count", [1, 2, 3, 8, 31])
def test_the_culprit_is_found_in_a_few_steps_wherever_it_is(count):
    for i in range(count):
        requests, held = named(count), list[Group]()
        suspects = Suspects(held)
        culprit, num_steps = trial(suspects, held, requests, {requests[i]})
        assert culprit is requests[i]
        assert num_steps <= 2 + 2 * count.bit_length()
        culprit.status = culprit.status.FINISHED
        while held:
            suspects.go_on()
            suspects.on_tokens(requests)
        suspects.on_tokens(requests)
        assert not suspects.is_alert


def test_a_step_that_fails_once_accuses_nobody():
    requests, held = named(4), list[Group]()
    suspects = Suspects(held)
    assert suspects.on_failure(requests) is None
    assert not held
    suspects.on_tokens(requests[:2])
    assert suspects.is_alert, "two have still to show that they can be computed"
    suspects.on_tokens(requests[2:])
    assert not suspects.is_alert


def test_who_was_cleared_is_not_accused_of_a_later_step():
    requests, held = named(2), list[Group]()
    suspects = Suspects(held)
    suspects.on_failure(requests)
    suspects.on_tokens(requests[:1])
    assert suspects.on_failure(requests) is requests[1]


def test_held_requests_do_not_start_and_others_pass_them():
    s = Scheduler(
        SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=8,
            prefill_chunk=8,
            page_size=4,
            num_pages=16,
            max_model_len=32,
        )
    )
    requests = named(3)
    for request in requests:
        s.add(request)
    s.waiting.held.append((requests[0], requests[1]))
    assert s.schedule(0.0).requests == [requests[2]]
    assert s.schedule(0.0).requests == [requests[2]]
    s.finish(requests[0], FinishReason.ABORT)
    s.waiting.held.clear()
    assert requests[1] in s.schedule(0.0).requests
    s.check_integrity()
