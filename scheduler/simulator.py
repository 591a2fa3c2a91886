"""The same Scheduler against a clock of its own and a model of step times, instead of a device.

A discrete-event simulation: steps that only decode, between two events, are taken in one go, so the
cost follows the events and not the tokens. Knows requests and times: not files, not pictures.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from scheduler.config import SchedulerConfig
from scheduler.plan import StepPlan
from scheduler.request import Request, RequestStatus
from scheduler.scheduler import Scheduler
from scheduler.step_time import StepTime

# Taken in one go while a request waits for pages. A policy whose order changes with time or service
# might put another, smaller one first before that; so much does the simulation simplify.
MOST_STEPS_WHILE_WAITING = 64


class Recorder(Protocol):
    """What is told of a simulation. Times are seconds; `durations_s` and `gaps_s` are f64[n]."""

    def on_steps(
        self,
        start_s: float,
        durations_s: np.ndarray,
        decode_rows: int,
        prefill_tokens: int,
        num_chunks: int,
        context_tokens: int,
        pages_used: int,
        pages_cached: int,
        num_waiting: int,
        num_running: int,
        /,
    ) -> None:
        """Steps of equal rows, one after another; `context_tokens` is the first one's."""

    def on_gaps(self, gaps_s: np.ndarray, count: int) -> None:
        """In each of n steps, `count` requests got a token so long after the one before."""

    def on_first_token(self, request: Request, ttft_s: float) -> None: ...

    def on_preemption(self, request: Request, cause: str) -> None: ...

    def on_finish(
        self, request: Request, finish_s: float, ttft_s: float | None, last_token_s: float | None
    ) -> None: ...


@dataclass(slots=True)
class SimTotals:
    """What a simulation came to. `busy_s` is the time in which the device worked."""

    num_steps: int = 0
    num_finished: int = 0
    num_refused: int = 0  # by the bounds of the queue, or larger than the pool
    busy_s: float = 0.0
    end_s: float = 0.0


class _Running(NamedTuple):
    """A step in flight; one without a plan was taken together with others."""

    plan: StepPlan | None
    num_decodes: int
    end_s: float


def simulate(
    config: SchedulerConfig,
    step_time: StepTime,
    requests: Iterable[Request],
    recorder: Recorder,
    *,
    overlap: bool = True,
    closed_loop: int = 0,
    swap_page_s: float = 0.0,
) -> SimTotals:
    """Runs requests, in order of arrival and taken as they come, to their end.

    Each generates max_tokens tokens. With `overlap` a step is planned while the one before it runs.
    With `closed_loop`, so many requests are kept in the system, each next one arriving when one
    ends, whatever its arrival time says.
    """
    scheduler = Scheduler(config, step_time, swap_page_s)
    simulation = Simulation(scheduler, step_time, iter(requests), recorder, overlap, closed_loop)
    return simulation.run()


class Simulation:
    """The state of one simulation; `simulate` is the way in."""

    def __init__(
        self,
        scheduler: Scheduler,
        step_time: StepTime,
        requests: Iterator[Request],
        recorder: Recorder,
        overlap: bool,
        closed_loop: int,
    ) -> None:
        self.scheduler = scheduler
        self.totals = SimTotals()
        self._step_time = step_time
        self._requests = requests
        self._recorder = recorder
        self._depth = 1 if overlap else 0
        self._closed_loop = closed_loop
        self._now = 0.0
        self._device_free_s = 0.0
        self._last_decode_s = 0.0  # when the last step with decode rows ended
        self._in_flight: deque[_Running] = deque()
        self._first_token_s: dict[Request, float] = {}
        self._last_token_s: dict[Request, float] = {}  # of those whose next gap is not regular
        self._next: Request | None = next(self._requests, None)
        scheduler.preemption.listener = self._on_preemption

    def run(self) -> SimTotals:
        scheduler = self.scheduler
        while True:
            self._take_arrivals()
            for request in scheduler.expire(self._now):
                self._on_finish(request)
            if self._take_quiet_steps():
                continue
            plan = scheduler.schedule(self._now)
            if plan.requests:
                self._dispatch(plan)
            if self._in_flight and (len(self._in_flight) > self._depth or not plan.requests):
                self._collect(self._in_flight.popleft())
            elif not self._in_flight:
                wake = self._next_event_s()
                if wake == math.inf:
                    break
                self._now = max(wake, self._now)
        self.totals.end_s = self._now
        return self.totals

    def _take_arrivals(self) -> None:
        while self._next is not None:
            request = self._next
            if self._closed_loop:
                live = len(self.scheduler.running) + len(self.scheduler.waiting)
                if live >= self._closed_loop:
                    return
                request.arrival_time = self._now
            elif request.arrival_time > self._now:
                return
            total = request.num_prompt_tokens + request.sampling.max_tokens
            live = len(self.scheduler.running) + len(self.scheduler.waiting)
            is_full = self.scheduler.waiting.why_full(request.num_prompt_tokens, live) is not None
            if is_full or self.scheduler.why_too_large(total):
                self.totals.num_refused += 1
            else:
                self.scheduler.add(request)
            self._next = next(self._requests, None)

    def _next_event_s(self) -> float:
        """When something happens to a scheduler that has planned nothing."""
        wake = self.scheduler.next_wake_s(self._now)
        times = [math.inf if wake is None else self._now + wake]
        if self._next is not None and not self._closed_loop:
            times.append(self._next.arrival_time)
        return min(times)

    # ---- one step ---------------------------------------------------------------------------

    def _dispatch(self, plan: StepPlan) -> None:
        start = max(self._device_free_s, self._now)
        copies = len(plan.copies_out) + len(plan.copies_in)
        duration = plan.predicted_s + copies * self.scheduler.preemption.swap_page_s
        self._device_free_s = start + duration
        self._record_steps(
            start,
            np.array([duration]),
            plan.num_decodes,
            plan.num_tokens - plan.num_decodes,
            plan.num_chunks,
            plan.shape.context_tokens,
        )
        self._in_flight.append(_Running(plan, plan.num_decodes, self._device_free_s))

    def _record_steps(
        self, start: float, durations: np.ndarray, decodes: int, tokens: int, chunks: int, ctx: int
    ) -> None:
        scheduler = self.scheduler
        cached = scheduler.cache.num_evictable
        self._recorder.on_steps(
            start,
            durations,
            decodes,
            tokens,
            chunks,
            ctx,
            scheduler.pool.num_usable - scheduler.pool.num_free - cached,
            cached,
            len(scheduler.waiting),
            len(scheduler.running),
        )
        self.totals.num_steps += len(durations)
        self.totals.busy_s += float(durations.sum())

    def _collect(self, step: _Running) -> None:
        now = self._now = max(step.end_s, self._now)
        if step.plan is not None:
            self._on_tokens(step.plan, now)
        elif step.num_decodes:
            self._recorder.on_gaps(np.array([now - self._last_decode_s]), step.num_decodes)
        if step.num_decodes or not self.scheduler.config.prefill_first:
            self._last_decode_s = now

    def _on_tokens(self, plan: StepPlan, now: float) -> None:
        regular = plan.num_decodes
        if self._last_token_s and regular:
            for request in plan.requests[: plan.num_decodes]:
                last = self._last_token_s.pop(request, None)
                if last is not None:
                    self._recorder.on_gaps(np.array([now - last]), 1)
                    regular -= 1
                if request.status == RequestStatus.PREEMPTED:
                    self._last_token_s[request] = now
        if regular:
            self._recorder.on_gaps(np.array([now - self._last_decode_s]), regular)
        for row in range(plan.num_decodes, len(plan.requests)):
            if plan.samples[row]:
                self._on_token_of_prompt(plan.requests[row], now)
        self.scheduler.update(plan, None)
        for request in plan.ending:
            if request.is_finished:
                self._on_finish(request)

    def _on_token_of_prompt(self, request: Request, now: float) -> None:
        """The first token, or the first one after a preemption."""
        if request.is_finished:
            return
        if request in self._first_token_s:
            last = self._last_token_s.pop(request, self._first_token_s[request])
            self._recorder.on_gaps(np.array([now - last]), 1)
        else:
            self._first_token_s[request] = now
            self._recorder.on_first_token(request, now - request.arrival_time)
        if self.scheduler.config.prefill_first:  # its next token may not come with the next step
            self._last_token_s[request] = now

    def _on_preemption(self, request: Request, cause: str) -> None:
        if request in self._first_token_s:
            last = self._last_decode_s
            if self._in_flight and self._in_flight[-1].plan is None:
                last = self._in_flight[-1].end_s  # steps taken in one go have given their tokens
            self._last_token_s[request] = last
        self._recorder.on_preemption(request, cause)

    def _on_finish(self, request: Request) -> None:
        first = self._first_token_s.pop(request, None)
        self._last_token_s.pop(request, None)
        self.totals.num_finished += 1
        ttft = None if first is None else first - request.arrival_time
        self._recorder.on_finish(request, self._now, ttft, None if first is None else self._now)

    # ---- many steps at once -----------------------------------------------------------------

    def _take_quiet_steps(self) -> bool:
        """Takes all steps up to the next event in one go; False if that is no more than one."""
        if len(self._in_flight) != self._depth or self._last_token_s:
            return False
        most = num_quiet_steps(self.scheduler)
        if self.scheduler.waiting:
            most = min(most, MOST_STEPS_WHILE_WAITING)
        if most < 2:
            return False
        rows = len(self.scheduler.running)
        context = self.scheduler.num_live_tokens + rows
        durations = self._step_time.predict_decodes(rows, context + rows * np.arange(most))
        ends = max(self._device_free_s, self._now) + np.cumsum(durations)
        planned = np.concatenate([[self._now, self._device_free_s][: 1 + self._depth], ends])
        count = int(np.searchsorted(planned[:most], self._next_event_s()))
        if count < 2:
            return False
        if self._in_flight:
            self._collect(self._in_flight.popleft())
        skip(self.scheduler, count)
        start = max(self._device_free_s, self._now)
        self._record_steps(start, durations[:count], rows, 0, 0, context)
        done = count - self._depth
        self._recorder.on_gaps(durations[:done], rows)
        self._device_free_s = float(ends[count - 1])
        self._now = self._last_decode_s = float(ends[done - 1])
        if self._depth:
            self._in_flight.append(_Running(None, rows, self._device_free_s))
        return True


def num_quiet_steps(scheduler: Scheduler) -> int:
    """Returns for how many steps from now on the same rows decode and nothing else happens, if no
    request comes, ends or expires meanwhile."""
    slots = scheduler.slots
    rows = slots.decoding()
    if scheduler.composer.prefilling or not rows.size or len(rows) != len(scheduler.running):
        return 0
    if scheduler.waiting and not scheduler.is_blocked:
        return 0
    most = int((slots.end[rows] - slots.num_tokens[rows]).min()) - 1
    while most > 0 and int(slots.lacking(rows, most).sum()) > scheduler.cache.num_available:
        most //= 2
    return most


def skip(scheduler: Scheduler, num_steps: int) -> None:
    """Does what so many quiet steps would do, in one go."""
    slots, rows = scheduler.slots, scheduler.slots.decoding()
    counts = slots.lacking(rows, num_steps)
    pages = scheduler.cache.allocate(int(counts.sum()))
    assert pages is not None, "more steps are skipped than are quiet"
    slots.add_pages(rows, counts, pages)
    slots.advance(rows, num_steps)
    if scheduler.waiting.queue.counts_decodes:
        scheduler.waiting.queue.on_decoded(slots.owners[rows].tolist(), num_steps)
