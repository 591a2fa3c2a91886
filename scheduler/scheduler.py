"""Decides, once per device step, which requests run and on which pages. Knows requests, pages and
counts: not arrays on devices, not text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from scheduler.admission import Admission
from scheduler.bucket import make_buckets
from scheduler.budget import StepBudgeter
from scheduler.composition import Composer
from scheduler.config import SchedulerConfig
from scheduler.deadlines import Deadlines
from scheduler.pages import RequestPages
from scheduler.plan import NewToken, StepPlan
from scheduler.preemption import Preemption
from scheduler.request import FinishReason, Request, RequestStatus
from scheduler.slots import Slots
from scheduler.step_time import FittedStepTime, StepTime
from scheduler.victims import Victims

MAX_BACKOFF = 4  # a request preempted so often needs 2 ** MAX_BACKOFF times the usual spare pages


class Scheduler:
    """The whole life of a request: add, schedule, update, and abort at any point between.

    Steps may overlap: `schedule` may be called while earlier steps have not been passed to
    `update`. Devices run steps in order, so pages freed here may be handed out at once: whoever
    gets them writes them in a later step than any write still in flight. For the same reason a
    page counts as computed once its step is planned.

    Args:
      step_time: predicts steps, and learns from those observed if it can; by default one that is
        fitted while serving.
      swap_page_s: seconds that copying one page to the host, or back, takes.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        step_time: StepTime | None = None,
        swap_page_s: float = 0.0,
    ) -> None:
        self.config = config
        self.slots = Slots(config.max_num_seqs, config.max_pages_per_seq, config.page_size)
        if step_time is None:
            buckets = make_buckets(config.max_num_seqs, config.max_num_batched_tokens)
            step_time = FittedStepTime(buckets)
        self.step_time = step_time
        self.budgeter = StepBudgeter(config, step_time)
        self.preemption = Preemption(config, step_time, swap_page_s)
        self.pages = RequestPages(config, self.slots, self.preemption)
        self.pool, self.cache = self.pages.pool, self.pages.cache
        self.waiting = Admission(config, self.pages)
        self.running: dict[Request, None] = {}  # in order of admission
        self.composer = Composer(config, self.slots, self.pages, self.waiting, self.budgeter)
        self.victims = Victims(config, self.slots, self.running)
        self._in_flight: deque[StepPlan] = deque()
        self._deadlines = Deadlines()
        self._started_now: set[Request] = set()  # by the step being planned: pages may be coming in
        self.is_blocked = False  # nobody can start until a request comes, leaves or is computed

    # ---- in and out -------------------------------------------------------------------------

    def why_too_large(self, num_tokens: int) -> str | None:
        """Returns why a request of `num_tokens` in all could never run, or None if it can."""
        pages = self.pages.pages_for(num_tokens)
        if pages <= self.pool.num_usable:
            return None
        capacity = self.pool.num_usable * self.config.page_size
        return f"{num_tokens} tokens need {pages} KV pages; the whole pool holds {capacity} tokens"

    def add(self, request: Request) -> None:
        """Queues a request that `why_too_large` has nothing against."""
        total = request.num_prompt_tokens + request.sampling.max_tokens
        assert request.num_prompt_tokens > 0, f"request {request.request_id} has no prompt"
        assert not self.why_too_large(total), self.why_too_large(total)
        self.waiting.push(request)
        self.is_blocked = False
        self._deadlines.add(request, len(self.running) + len(self.waiting))

    def finish(self, request: Request, reason: FinishReason, *, is_poisoned: bool = False) -> None:
        """Ends a request in any state and frees all it holds; a second call does nothing.

        What it computed stays in the prefix cache, unless it is poisoned: its KV may hold what is
        no number.
        """
        if request.is_finished:
            return
        is_poisoned = is_poisoned and request.status != RequestStatus.WAITING
        if request.status == RequestStatus.RUNNING:
            self._leave_device(request)
        else:
            self.waiting.remove(request)
            self.preemption.drop(request)
        if is_poisoned:
            self.pages.forget(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self.waiting.queue.on_finished(request)

    def expire(self, now: float) -> list[Request]:
        """Ends and returns the requests that are past their deadline, or past their queue deadline
        without having started."""
        expired = []
        for request in self._deadlines.take_late(now):
            self.finish(request, FinishReason.DEADLINE)
            expired.append(request)
        return expired

    def restart(self) -> list[Request]:
        """Puts all that runs back into the queue, because the device has lost what it held: pages,
        cached prefixes, tokens in flight. Returns the requests of the steps in flight."""
        lost = list(dict.fromkeys(r for plan in self._in_flight for r in plan.requests))
        for request in list(self.running):
            self._leave_device(request)
            request.status = RequestStatus.PREEMPTED
            self.waiting.push(request)
        for request in self.waiting:
            request.num_inflight_tokens = 0
            self.preemption.drop(request)
        self._in_flight.clear()
        self.preemption.take_copies()  # none is to be made
        is_empty = self.cache.reset()
        assert is_empty, "a cached page is in use though nobody runs"
        return lost

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    def next_wake_s(self, now: float) -> float | None:
        """Returns the seconds after which a scheduler that planned nothing has to be asked again
        though nothing happened meanwhile; None if never."""
        deadline, oldest = self._deadlines.first(), self.waiting.oldest()
        times = [] if deadline is None else [deadline]
        if oldest is not None and self.config.batching == "dynamic":
            times.append(oldest.arrival_time + self.config.batch_window_s)
        return max(min(times) - now, 0.0) if times else None

    # ---- one step ---------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Plans the next step: decode rows, then chunks of running prompts, then new requests."""
        self._started_now.clear()
        num_preemptions = self.num_preemptions
        decodes = self._ensure_decode_pages()
        limits = self.composer.limits(now, decodes)
        chunks: dict[Request, int] = {}  # tokens of each prompt
        budget = limits.prefill_tokens
        may_admit = self.num_preemptions == num_preemptions  # else what was freed is spoken for
        if may_admit and self._is_urgent_waiting(now):
            budget = self._admit(now, chunks, budget, limits.max_running)
        budget = self.composer.plan_chunks(chunks, budget, self.composer.for_long(budget))
        if may_admit:
            budget = self._admit(now, chunks, budget, limits.max_running)
        if budget > 0 and self.waiting.long:  # nobody else wants it
            self.composer.plan_chunks(chunks, budget, budget)
        decodes = decodes[self.slots.is_decoding[decodes]]  # some gave way to urgent requests
        if self.config.prefill_first and chunks:
            room = self.config.max_num_batched_tokens - sum(chunks.values())
            decodes = decodes if len(decodes) <= room else decodes[:0]
        plan = self.composer.commit(decodes, chunks)
        if chunks:
            self.is_blocked = False  # others may wait for what these computed
        if plan.requests:
            plan.copies_out, plan.copies_in = self.preemption.take_copies()
            plan.predicted_s = self.step_time.predict(plan.shape)
            self._in_flight.append(plan)
        return plan

    def _ensure_decode_pages(self) -> np.ndarray:
        """Returns the slots that decode, each with a page for its token; preempts if it must."""
        while True:
            rows = self.slots.decoding()
            if self.pages.grow(rows):
                return rows
            self._preempt(self.victims.choose(), "no free page")

    def update(self, plan: StepPlan, token_ids: Sequence[int] | None) -> list[NewToken]:
        """Takes in what the oldest step in flight sampled, row by row, and ends the requests that
        are complete, or have failed: BAD_TOKEN, like any negative id, becomes part of no output.
        None stands for tokens that end no request and that nobody reads, as in a simulation.

        Returns the tokens that count: not those of requests that ended while the step ran.
        """
        if not plan.requests:
            return []
        oldest = self._in_flight.popleft()
        assert plan is oldest, "steps are collected in order"
        if token_ids is None:
            self._update_counts(plan)
            return []
        new_tokens = []
        for row, (request, samples) in enumerate(plan.sampling()):
            if not samples or request.status == RequestStatus.FINISHED:
                continue
            if request.status != RequestStatus.RUNNING:
                request.num_inflight_tokens -= 1
            token_id = int(token_ids[row])
            new_tokens.append(NewToken(request, token_id, row))
            if token_id < 0:
                self.finish(request, FinishReason.ERROR, is_poisoned=True)
                request.num_output_tokens = len(request.output_token_ids)
                continue
            request.output_token_ids.append(token_id)
            request.num_output_tokens += 1
            if token_id in request.sampling.stop_token_ids:
                self.finish(request, FinishReason.STOP)
            elif request.num_output_tokens >= request.sampling.max_tokens:
                self.finish(request, FinishReason.LENGTH)
        return new_tokens

    def extend(self, request: Request, token_ids: Sequence[int]) -> int:
        """Appends ids that are certain, such as those that a grammar leaves no choice about, to the
        output of a request that decodes. What steps in flight sample for it counts no more, and the
        KV of the ids is computed like that of a prompt, which gives the token after them.

        A stop token among the ids, or the last one of max_tokens, ends the request at once; those
        behind it are dropped. Returns how many were appended: 0, and no change, while the request
        does not decode or the pool has too few pages; it then goes on token by token.
        """
        if request.status != RequestStatus.RUNNING or request in self.composer.prefilling:
            return 0
        ids, reason = request.cut(token_ids)
        num_tokens = request.num_known_tokens + len(ids)
        if not ids or (reason is None and not self.pages.reserve(request, num_tokens)):
            return 0
        num_void = sum(plan.void(request) for plan in self._in_flight)
        self.waiting.queue.on_served(request, 0, max(len(ids) - num_void, 0))  # counts only rise
        self.slots.extend(request, len(ids))
        request.output_token_ids += ids
        request.num_output_tokens += len(ids)
        if reason is None:
            self.composer.enlist(request, is_next=True)
        else:
            self.finish(request, reason)
        return len(ids)

    def saves_time(self, request: Request, num_tokens: int) -> bool:
        """Whether so many tokens, appended by `extend`, take the device less than their share of
        the steps in which they would be decoded: alone on the device yes, among many rarely, as a
        chunk makes a step of all rows longer."""
        if request.status != RequestStatus.RUNNING or not self.slots.is_decoding[request.slot]:
            return False
        return self.composer.saves_time(request, num_tokens, self.step_time)

    def _update_counts(self, plan: StepPlan) -> None:
        if self.waiting.num_preempted:
            for request, samples in plan.sampling():
                if samples and request.status == RequestStatus.PREEMPTED:
                    request.num_inflight_tokens -= 1
                    request.num_output_tokens += 1
        for request in plan.ending:
            self.finish(request, FinishReason.LENGTH)

    def on_step_time(self, plan: StepPlan, seconds: float) -> None:
        """Learns how long a step took."""
        self.budgeter.observe(plan.shape, seconds)

    # ---- admission and preemption -----------------------------------------------------------

    def _admit(self, now: float, chunks: dict[Request, int], budget: int, max_running: int) -> int:
        """Starts waiting requests, and plans their first pieces; returns the budget left."""
        self.is_blocked = False
        in_groups = self.config.batching != "continuous"
        if in_groups and not self._may_start_group(now):
            return budget
        for_long = self.composer.for_long(budget)
        while budget > 0 or in_groups:
            request = self._admit_next(now, chunks, max_running)
            if request is None:
                break
            is_long = request in self.waiting.long
            most = min(budget, for_long) if is_long else budget
            count = self.composer.plan_chunk(chunks, request, most)
            budget -= count
            for_long -= count if is_long else 0
        return budget

    def _is_urgent_waiting(self, now: float) -> bool:
        """Whether a request waits that is more urgent than a prompt that would use the step."""
        if not (self.waiting.queue.preempts and self.composer.prefilling and self.waiting):
            return False
        last = next(reversed(self.composer.prefilling))  # the least urgent one
        return any(r.priority < last.priority for r in self.waiting.candidates(now))

    def _may_start_group(self, now: float) -> bool:
        """A group starts when the one before it has ended; a dynamic one also waits to be full."""
        if self.running or not self.waiting:
            return False
        if self.config.batching == "static" or len(self.waiting) >= self.config.max_num_seqs:
            return True
        oldest = self.waiting.oldest()
        return oldest is None or now >= oldest.arrival_time + self.config.batch_window_s

    def _admit_next(
        self, now: float, chunks: dict[Request, int], max_running: int
    ) -> Request | None:
        """Starts the first waiting request if there is room, or if less urgent ones can make it."""
        most = min(max_running, self.config.max_num_seqs)
        is_full = len(self.running) >= most
        if is_full and not any(map(self.victims.is_any_less_urgent, self.waiting.candidates(now))):
            self.is_blocked = True
            return None
        request = self.waiting.first(now)
        if request is None or request.num_inflight_tokens:
            self.is_blocked = request is None
            return None
        while len(self.running) >= most or not self.pages.start(request, self._spare_for(request)):
            lacking = self.pages.pages_for(request.num_tokens) + self._spare_for(request)
            lacking -= self.cache.num_available
            victim = self.victims.less_urgent_than(request, now, lacking, self._started_now)
            if victim is None:
                self.is_blocked = True
                return None
            self._preempt(victim, "a more urgent request")
            chunks.pop(victim, None)
        slot = request.slot
        self.waiting.start(
            request, int(self.slots.num_tokens[slot] - self.slots.num_computed[slot])
        )
        self.running[request] = None
        self._started_now.add(request)
        self.composer.enlist(request)
        self.victims.on_start(request)
        request.status = RequestStatus.RUNNING
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            request.num_cached_tokens = request.num_prefix_pages * self.config.page_size
        return request

    def _spare_for(self, request: Request) -> int:
        """The pages to leave free: one for each that runs, so that a newcomer does not preempt at
        once, and the watermark; more for a request that was preempted, so that it does not come
        back into the state that preempted it."""
        if not self.running:
            return 0
        spare = len(self.running) << min(request.num_preemptions, MAX_BACKOFF)
        spare += int(self.config.watermark * self.pool.num_usable)
        return min(spare, self.pool.num_usable - self.pages.pages_for(request.num_tokens))

    def _preempt(self, request: Request, why: str) -> None:
        """Sends a running request back to the queue; all of its tokens will be recomputed, those
        in flight included, except what the prefix cache or the host's memory still holds then."""
        num_computed = int(self.slots.num_computed[request.slot])
        self.preemption.on_preempt(request, self.slots.pages(request), num_computed, why)
        request.num_inflight_tokens = self._leave_device(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.waiting.push(request)

    def _leave_device(self, request: Request) -> int:
        """Takes a request off the device; returns how many of its tokens are in flight."""
        num_tokens = int(self.slots.num_tokens[request.slot])
        in_flight = sum(plan.samples_for(request) for plan in self._in_flight)
        request.num_output_tokens = num_tokens - request.num_prompt_tokens - in_flight
        self.pages.leave(request)
        del self.running[request]
        self.is_blocked = False
        self.composer.prefilling.pop(request, None)
        self.victims.on_leave(request)
        self.waiting.stop(request)
        return in_flight

    # ---- what others look at ----------------------------------------------------------------

    @property
    def num_preemptions(self) -> int:
        return self.preemption.counts.total()

    @property
    def num_live_tokens(self) -> int:
        """Tokens of running requests whose KV is in pages."""
        return int(self.slots.num_computed.sum())

    def check_integrity(self) -> None:
        """Asserts that pages, slots and request states agree."""
        self.pages.check_integrity()
        owners = [owner for owner in self.slots.owners.tolist() if owner is not None]
        assert set(owners) == set(self.running), "slots and running requests disagree"
        assert len(owners) + self.slots.num_free == self.config.max_num_seqs, "slots leak"
        assert self.victims.priorities.total() == len(owners), "priorities are miscounted"
        for request in owners:
            assert request.status == RequestStatus.RUNNING, f"{request.request_id} is not running"
        on_host = [r.host_pages for r in self.waiting if r.host_pages is not None]
        assert self.preemption.num_host_pages_used == sum(map(len, on_host)), "host pages leak"
        for request in self.waiting:
            assert request.status != RequestStatus.RUNNING, f"{request.request_id} runs and waits"
