"""Decides, once per device step, which requests run and on which pages. Knows requests, pages and
counts: not arrays, not text, not devices."""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.config import SchedulerConfig
from scheduler.page_pool import PagePool
from scheduler.policy import POLICIES, PolicySettings
from scheduler.prefix_cache import PrefixCache, page_digest, root_digest
from scheduler.request import FinishReason, Request, RequestStatus

log = logging.getLogger(__name__)


class PlanRow(NamedTuple):
    """One request's place in a step: tokens [start, start + num_tokens) of its sequence."""

    request: Request
    start: int
    num_tokens: int
    samples: bool  # the row reaches the last token there is, so it yields the next one
    reads_last_token: bool  # its input id is known to the device only: a step in flight samples it


@dataclass(slots=True)
class StepPlan:
    """What one step computes. Rows of one token come first, then longer chunks."""

    rows: list[PlanRow] = field(default_factory=list)
    num_tokens: int = 0


class NewToken(NamedTuple):
    """One token that a step gave one request; `row` is its row in that step's plan."""

    request: Request
    token_id: int
    row: int


class Scheduler:
    """The whole life of a request: add, schedule, update, and abort at any point between.

    Steps may overlap: `schedule` may be called while earlier steps have not been passed to
    `update`. Devices run steps in order, so pages freed here may be handed out at once: whoever
    gets them writes them in a later step than any write still in flight.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = PagePool(config.num_pages)
        self.cache = PrefixCache(self.pool, config.enable_prefix_cache)
        settings = PolicySettings(
            config.max_starvation_s, config.tenant_weights, self._num_cached_tokens
        )
        self.waiting = POLICIES[config.policy](settings)
        self.running: list[Request] = []  # in order of admission
        self.num_preemptions = 0
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._deadlines: list[tuple[float, int, Request]] = []
        self._sequence = itertools.count()

    # ---- in and out -------------------------------------------------------------------------

    def why_too_large(self, num_tokens: int) -> str | None:
        """Returns why a request of `num_tokens` in all could never run, or None if it can."""
        pages = self._pages_for(num_tokens)
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
        if request.deadline is not None:
            self._forget_finished_deadlines()
            entry = (request.deadline, next(self._sequence), request)
            heapq.heappush(self._deadlines, entry)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request in any state and frees all it holds; a second call does nothing."""
        if request.is_finished:
            return
        if request.status == RequestStatus.RUNNING:
            self._offer_full_pages(request)
            self._leave_device(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self.waiting.on_finished(request)

    def _forget_finished_deadlines(self) -> None:
        """Lets go of ended requests whose deadline is far, before they outnumber the live ones."""
        if len(self._deadlines) > 2 * (len(self.running) + len(self.waiting)) + 16:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].is_finished]
            heapq.heapify(self._deadlines)

    def expire(self, now: float) -> list[Request]:
        """Ends and returns the requests whose deadline has passed."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if not request.is_finished:
                self.finish(request, FinishReason.DEADLINE)
                expired.append(request)
        return expired

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    # ---- one step ---------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Plans the next step: decode rows, then chunks of running prompts, then new requests."""
        planned: dict[Request, int] = {}  # tokens per request; a victim is taken out again
        preemptions_before = self.num_preemptions
        self._plan_decodes(planned)
        budget = self.config.max_num_batched_tokens - len(planned)
        for request in self.running:
            if budget > 0 and request not in planned and self._wants_tokens(request):
                budget -= self._plan_chunk(planned, request, budget)
        if self.num_preemptions == preemptions_before:  # what was just freed is spoken for
            while budget > 0:
                admitted = self._admit_next(now)
                if admitted is None:
                    break
                budget -= self._plan_chunk(planned, admitted, budget)
        return self._commit(planned)

    def _wants_tokens(self, request: Request) -> bool:
        """False while all of its tokens are computed or it waits for its last one in flight."""
        num_output = request.num_output_tokens + request.num_inflight_tokens
        return request.num_uncomputed_tokens > 0 and num_output < request.sampling.max_tokens

    def _plan_decodes(self, planned: dict[Request, int]) -> None:
        for request in list(self.running):
            is_decode = request.num_uncomputed_tokens == 1 and self._wants_tokens(request)
            while is_decode and request.status == RequestStatus.RUNNING:
                if self._ensure_pages(request, request.num_tokens):
                    planned[request] = 1
                    break
                victim = self._choose_victim()
                self._preempt(victim)
                planned.pop(victim, None)

    def _plan_chunk(self, planned: dict[Request, int], request: Request, budget: int) -> int:
        """Plans the next piece of a prompt, whose pages it holds since its admission."""
        count = min(request.num_uncomputed_tokens, self.config.prefill_chunk, budget)
        planned[request] = count
        return count

    def _commit(self, planned: dict[Request, int]) -> StepPlan:
        plan = StepPlan(num_tokens=sum(planned.values()))
        for request, count in sorted(planned.items(), key=lambda item: item[1] > 1):
            start = request.num_computed_tokens
            samples = start + count == request.num_tokens
            reads = start >= len(request.token_ids)
            plan.rows.append(PlanRow(request, start, count, samples, reads))
            request.num_computed_tokens = start + count
            request.num_inflight_tokens += samples
            of_prompt = count if start < request.num_prompt_tokens else 0
            self.waiting.on_served(request, of_prompt, samples)
        return plan

    def update(self, plan: StepPlan, token_ids: Sequence[int]) -> list[NewToken]:
        """Takes in what a step sampled, row by row, and ends the requests that are complete.

        Returns the tokens that count: not those of requests that ended while the step ran.
        """
        new_tokens = []
        for row, (request, _, _, samples, _) in enumerate(plan.rows):
            if not samples:
                if not request.is_finished:
                    self._offer_full_pages(request)
                continue
            request.num_inflight_tokens -= 1
            if request.is_finished:
                continue
            token_id = int(token_ids[row])
            request.token_ids.append(token_id)
            new_tokens.append(NewToken(request, token_id, row))
            if token_id in request.sampling.stop_token_ids:
                self.finish(request, FinishReason.STOP)
            elif request.num_output_tokens >= request.sampling.max_tokens:
                self.finish(request, FinishReason.LENGTH)
            else:
                self._offer_full_pages(request)
        return new_tokens

    # ---- admission and preemption -----------------------------------------------------------

    def _admit_next(self, now: float) -> Request | None:
        """Starts the first waiting request if a slot and pages for all of its tokens are free.

        Taking all of a prompt's pages at once keeps two half-prefilled prompts from blocking each
        other; one free page for each running request keeps a newcomer from preempting at once.
        """
        request = self.waiting.first(now)
        if request is None or not self._free_slots or request.num_inflight_tokens:
            return None
        matched = self.cache.match(self._reusable_digests(request))
        num_new = self._pages_for(request.num_tokens) - len(matched)
        num_idle = sum(self.pool.ref_count(page) == 1 for page in matched)
        if self.cache.num_available - num_idle - num_new < len(self.running):
            return None
        pages = self.cache.acquire(matched, num_new)
        assert pages is not None, "the pages were counted just before"
        self.waiting.remove(request)
        self.running.append(request)
        request.page_ids = pages
        request.slot = self._free_slots.pop()
        request.num_cached_pages = len(matched)
        request.num_computed_tokens = len(matched) * self.config.page_size
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            request.num_cached_tokens = request.num_computed_tokens
        request.status = RequestStatus.RUNNING
        return request

    def _reusable_digests(self, request: Request) -> list[bytes]:
        """The full pages that may come from the cache: at least one token must be computed."""
        if not self.cache.enabled:
            return []
        num_pages = (len(request.token_ids) - 1) // self.config.page_size
        self._extend_digests(request, num_pages)
        return request.page_digests[:num_pages]

    def _num_cached_tokens(self, request: Request) -> int:
        """How many of a request's tokens the prefix cache would spare, were it admitted now."""
        return len(self.cache.match(self._reusable_digests(request))) * self.config.page_size

    def _extend_digests(self, request: Request, num_pages: int) -> None:
        digests, size = request.page_digests, self.config.page_size
        for page in range(len(digests), num_pages):
            parent = digests[-1] if digests else root_digest(request.cache_keys)
            digests.append(page_digest(parent, request.token_ids[page * size : (page + 1) * size]))

    def _offer_full_pages(self, request: Request) -> None:
        """Enters the pages that are full, and whose ids are known, in the prefix cache."""
        if not self.cache.enabled or request.status != RequestStatus.RUNNING:
            return
        num_known = min(request.num_computed_tokens, len(request.token_ids))
        num_full = num_known // self.config.page_size
        if num_full > request.num_cached_pages:
            self._extend_digests(request, num_full)
            for page in range(request.num_cached_pages, num_full):
                self.cache.insert(request.page_digests[page], request.page_ids[page])
            request.num_cached_pages = num_full

    def _ensure_pages(self, request: Request, num_tokens: int) -> bool:
        missing = self._pages_for(num_tokens) - len(request.page_ids)
        if missing > 0:
            pages = self.cache.acquire((), missing)
            if pages is None:
                return False
            request.page_ids += pages
        return True

    def _choose_victim(self) -> Request:
        """The least urgent running request, and of those the one that loses the least work.

        The one with the most work is never chosen before the others, so it ends: no livelock.
        """
        return max(
            self.running,
            key=lambda r: (r.priority, -r.num_computed_tokens, r.arrival_time),
        )

    def _preempt(self, request: Request) -> None:
        """Sends a running request back to the queue; all of its tokens will be recomputed, those
        in flight included, except what the prefix cache still holds then."""
        self._offer_full_pages(request)
        self._leave_device(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(request)
        log.info(
            "preempted %s after %d tokens: no free page", request.request_id, request.num_tokens
        )

    def _leave_device(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.release(request.page_ids)
        self._free_slots.append(request.slot)
        request.page_ids = []
        request.slot = -1
        request.num_computed_tokens = 0
        request.num_cached_pages = 0

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

    # ---- what others look at ----------------------------------------------------------------

    @property
    def num_live_tokens(self) -> int:
        """Tokens of running requests whose KV is in pages."""
        return sum(request.num_computed_tokens for request in self.running)

    def check_integrity(self) -> None:
        """Asserts that pages, slots and request states agree."""
        self.cache.check_integrity()
        assert len(self._free_slots) + len(self.running) == self.config.max_num_seqs, "slots leak"
        held: dict[int, int] = {}
        for request in self.running:
            assert request.status == RequestStatus.RUNNING, f"{request.request_id} is not running"
            for page in request.page_ids:
                held[page] = held.get(page, 0) + 1
        for page in range(1, self.pool.num_pages):
            expected = held.get(page, 0) + self.cache.holds(page)
            actual = self.pool.ref_count(page)
            assert actual == expected, f"page {page}: {actual} references, {expected} users"
