"""Gathers what a simulation meets, in memory that does not grow with it. Knows requests' times and
counts: not the scheduler, not how results are shown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jserve.sim.histogram import Histogram
from jserve.sim.timeline import Timeline
from scheduler.request import FinishReason, Request

MAX_TENANTS = 256  # told apart at the end; twice as many on the way
_BUFFERED_CALLS, _BUFFERED_GAPS = 4096, 1 << 18  # between two flushes
_COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)


class Targets(NamedTuple):
    """What a good request keeps: its TTFT, its mean ITL, its E2E."""

    ttft_s: float = math.inf
    itl_s: float = math.inf
    e2e_s: float = math.inf

    def in_ms(self) -> dict[str, float]:
        """Returns those that there are, as --goodput names them."""
        return {
            f"{name[:-2]}_ms": 1e3 * limit
            for name, limit in self._asdict().items()
            if limit < math.inf
        }


@dataclass(slots=True)
class Group:
    """Some requests' figures. Times are of complete requests only, TTFT of all that got a token.

    `tpot` is a request's time per token after its first: its mean ITL.
    """

    num_complete: int = 0
    num_incomplete: int = 0
    num_good: int = 0  # complete and within their targets
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    num_preempted: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)

    @property
    def num_requests(self) -> int:
        return self.num_complete + self.num_incomplete

    @property
    def served_tokens(self) -> int:
        """Tokens that were computed for these requests."""
        return self.prompt_tokens - self.cached_tokens + self.output_tokens

    def merge(self, other: Group) -> None:
        for name in ("num_complete", "num_incomplete", "num_good", "num_preempted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("ttft", "tpot", "e2e", "queue"):
            getattr(self, name).merge(getattr(other, name))


class Recorder:
    """What `simulate` tells its results to.

    `targets` are by request class, `default_targets` those of every other class.
    """

    def __init__(
        self,
        targets: Mapping[str, Targets] | None = None,
        default_targets: Targets = Targets(),  # noqa: B008 (it is immutable)
        timeline: Timeline | None = None,
    ) -> None:
        self.targets = dict(targets or {})
        self.default_targets = default_targets
        self.timeline = timeline or Timeline()
        self.total = Group()
        self.classes: dict[str, Group] = {}
        self.tenants: dict[str, Group] = {}
        self.other_tenants = Group()  # those beyond MAX_TENANTS, smallest first
        self.preemptions: Counter[str] = Counter()  # by cause
        self.finish_reasons: Counter[str] = Counter()
        self.first_arrival_s = math.inf
        self.last_end_s = 0.0
        self.load_end_s: float | None = None
        self.served_under_load: dict[str, int] = {}  # by tenant, until load_end_s
        self._itl = Histogram()
        self._gaps: list[np.ndarray] = []
        self._gap_counts: list[tuple[int, int]] = []
        self._num_gaps = 0
        self._new_preemptions = 0

    def on_steps(self, start_s: float, durations_s: np.ndarray, *counts: float) -> None:
        """Hears of n steps of equal rows, one after another: of each the first of
        `timeline.COUNTS`, up to those that run. Shape: durations_s f64[n]."""
        self.timeline.add(start_s, durations_s, *counts, 0.0, self._new_preemptions)
        self._new_preemptions = 0

    def on_gaps(self, gaps_s: np.ndarray, count: int) -> None:
        """Hears of n steps in each of which `count` requests got a token so long after their last.

        Shape: gaps_s f64[n].
        """
        self._gaps.append(gaps_s.copy())  # it may be a piece of something large
        self._gap_counts.append((count, len(gaps_s)))
        self._num_gaps += len(gaps_s)
        if len(self._gaps) >= _BUFFERED_CALLS or self._num_gaps >= _BUFFERED_GAPS:
            self._flush_gaps()

    def _flush_gaps(self) -> None:
        if self._gaps:
            counts, lengths = np.array(self._gap_counts).T
            self._itl.add_many(np.concatenate(self._gaps), np.repeat(counts, lengths))
            self._gaps, self._gap_counts, self._num_gaps = [], [], 0

    @property
    def itl(self) -> Histogram:
        self._flush_gaps()
        return self._itl

    def on_preemption(self, request: Request, cause: str) -> None:
        self.preemptions[cause] += 1
        self._new_preemptions += 1

    def on_first_token(self, request: Request, ttft_s: float) -> None:
        for group in self._groups_of(request):
            group.ttft.add(ttft_s)

    def on_finish(
        self, request: Request, finish_s: float, ttft_s: float | None, last_token_s: float | None
    ) -> None:
        assert request.finish_reason is not None, f"{request.request_id} has not ended"
        self.finish_reasons[request.finish_reason.name.lower()] += 1
        self.first_arrival_s = min(self.first_arrival_s, request.arrival_time)
        self.last_end_s = max(self.last_end_s, finish_s)
        is_complete = request.finish_reason in _COMPLETE
        e2e_s = finish_s - request.arrival_time
        tpot_s = None
        if ttft_s is not None and last_token_s is not None and request.num_output_tokens > 1:
            tpot_s = (last_token_s - request.arrival_time - ttft_s) / (
                request.num_output_tokens - 1
            )
        targets = self.targets.get(request.request_class, self.default_targets)
        is_good = (
            is_complete
            and (math.inf if ttft_s is None else ttft_s) <= targets.ttft_s
            and (tpot_s or 0.0) <= targets.itl_s
            and e2e_s <= targets.e2e_s
        )
        for group in self._groups_of(request):
            group.num_good += is_good
            group.num_preempted += request.num_preemptions > 0
            if request.first_scheduled_time is not None:
                group.prompt_tokens += request.num_prompt_tokens
                group.cached_tokens += request.num_cached_tokens
                group.output_tokens += request.num_output_tokens
                group.queue.add(request.first_scheduled_time - request.arrival_time)
            if not is_complete:
                group.num_incomplete += 1
                continue
            group.num_complete += 1
            group.e2e.add(e2e_s)
            if tpot_s is not None:
                group.tpot.add(tpot_s)

    def on_load_end(self, last_arrival_s: float) -> None:
        """Hears that no more requests will come. What is served from here on says nothing of
        fairness: nobody competes for what the last ones get."""
        self.load_end_s = last_arrival_s
        self.served_under_load = {name: g.served_tokens for name, g in self.tenants.items()}

    def _groups_of(self, request: Request) -> tuple[Group, Group, Group]:
        kind = self.classes.get(request.request_class)
        if kind is None:
            kind = self.classes[request.request_class] = Group()
        tenant = self.tenants.get(request.tenant)
        if tenant is None:
            if len(self.tenants) >= 2 * MAX_TENANTS:
                self._pool_small_tenants()
            tenant = self.tenants[request.tenant] = Group()
        return self.total, kind, tenant

    def _pool_small_tenants(self) -> None:
        by_size = sorted(self.tenants, key=lambda name: self.tenants[name].served_tokens)
        for name in by_size[:-MAX_TENANTS]:
            self.other_tenants.merge(self.tenants.pop(name))

    def largest_tenants(self) -> dict[str, Group]:
        """Returns the tenants that are told apart; all others are in `other_tenants`."""
        if len(self.tenants) > MAX_TENANTS:
            self._pool_small_tenants()
        return self.tenants
