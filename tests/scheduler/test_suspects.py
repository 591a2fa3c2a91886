"""Finding the request that a device cannot compute."""

from __future__ import annotations

import pytest

from scheduler.config import SchedulerConfig
from scheduler.request import FinishReason, Request, RequestStatus, SamplingView
from scheduler.scheduler import Scheduler
from scheduler.suspects import Group, Suspects


def named(count: int) -> list[Request]:
    return [Request(f"r{i}", [i + 1], SamplingView(8)) for i in range(count)]


class Line:
    """Where requests wait."""

    def __init__(self) -> None:
        self.on_trial: dict[Request, None] = {}
        self.held: list[Group] = []
        self.alone: Request | None = None

    def may_run(self, requests: list[Request]) -> list[Request]:
        if self.alone is not None:
            return [self.alone]
        return [r for r in requests if not any(r in group for group in self.held)]


def trial(suspects: Suspects, line: Line, requests: list[Request], bad: Request) -> int:
    """Runs steps of those that may run until the bad one is found; returns how many that took."""
    for num_steps in range(1, 100):
        suspects.go_on()
        step = line.may_run(requests)
        if bad not in step:
            suspects.on_tokens(step)
            continue
        culprit = suspects.on_failure(step)
        if culprit is not None:
            assert culprit is bad
            return num_steps
    raise AssertionError("nobody was found")


@pytest.mark.parametrize("count", [1, 2, 3, 8, 31])
def test_the_culprit_is_found_in_a_few_steps_wherever_it_is(count):
    for i in range(count):
        requests, line = named(count), Line()
        suspects = Suspects(line)
        assert trial(suspects, line, requests, requests[i]) <= 3 + 2 * count.bit_length()
        requests[i].status = RequestStatus.FINISHED
        while suspects.is_alert:  # the others show that they can be computed
            suspects.go_on()
            suspects.on_tokens(line.may_run(requests))
        assert (line.held, line.alone) == ([], None)


def test_a_step_that_fails_once_accuses_nobody():
    requests, line = named(4), Line()
    suspects = Suspects(line)
    assert suspects.on_failure(requests) is None
    assert (line.held, line.alone) == ([], None)
    suspects.on_tokens(requests[:2])
    assert suspects.is_alert, "two have still to show that they can be computed"
    suspects.on_tokens(requests[2:])
    assert not suspects.is_alert


def test_who_was_cleared_is_not_accused_of_a_later_step_and_the_last_is_tried_alone():
    requests, line = named(2), Line()
    suspects = Suspects(line)
    suspects.on_failure(requests)
    suspects.on_tokens(requests[:1])
    assert suspects.on_failure(requests) is None
    assert line.alone is requests[1]
    assert suspects.on_failure([requests[1]]) is requests[1]
    assert line.alone is None


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
