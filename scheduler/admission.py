"""Who may start, and in which order: bounds of the queue, caps of classes, the gate for long
prompts, and prompts that are better served after another one. Knows requests, not pages.

What the policy puts first but may not start now is set aside under what blocks it, its lane, so
that others pass; it returns to the queue when the lane has room. So a step's cost does not depend
on how many wait.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator

from scheduler.config import LatencyTargets, SchedulerConfig
from scheduler.pages import RequestPages, Work
from scheduler.policy import POLICIES, PolicySettings, WaitingQueue
from scheduler.request import Request, RequestStatus
from scheduler.suspects import Group

MAX_PASSED = 64  # requests set aside, or taken back, per call

_WAIT = (RequestStatus.WAITING, RequestStatus.PREEMPTED)

Lane = tuple[str, Hashable]


class Admission:
    """The waiting requests.

    Attributes:
      on_trial: requests that start before all others, because of suspects.py.
      held: likewise, groups of requests that may not start.
      alone: likewise, the one request that may; None: anyone.
    """

    def __init__(self, config: SchedulerConfig, pages: RequestPages) -> None:
        self.config = config
        self.num_tokens = 0  # prompt tokens that wait to be admitted for the first time
        self.num_preempted = 0
        self.on_trial: dict[Request, None] = {}
        self.held: list[Group] = []
        self.alone: Request | None = None
        self.running_of = Counter[str]()  # running requests by class
        self.waiting_of = Counter[str]()  # waiting ones by class
        self.long: set[Request] = set()  # long prompts in prefill
        self._pages = pages
        self._classes = {c.name: c for c in config.classes}
        self._targets = config.latency_targets()
        self._has_itl_targets = any(targets.itl_s for targets in self._targets.values())
        self._settings = PolicySettings(
            config.max_starvation_s, config.tenant_weights, pages.num_cached_tokens
        )
        self.queue: WaitingQueue = POLICIES[config.policy](self._settings)
        self._aside: dict[Lane, WaitingQueue] = {}
        self._lane_of: dict[Request, Lane] = {}

    def __len__(self) -> int:
        return len(self.queue) + len(self._lane_of)

    def __iter__(self) -> Iterator[Request]:
        yield from self.queue
        yield from self._lane_of

    def why_full(
        self, num_tokens: int, num_live: int, num_more_tokens: int = 0
    ) -> tuple[str, str] | None:
        """Returns the limit, "requests" or "tokens", that a prompt of `num_tokens` would exceed,
        and what there is now; None if there is room.

        `num_live` requests run or wait; `num_more_tokens` wait elsewhere. A prompt alone in the
        queue may be of any length.
        """
        config = self.config
        if num_live >= config.max_queued_requests + config.max_num_seqs:
            return "requests", f"{num_live} requests are running or queued, the limit"
        waiting = self.num_tokens + num_more_tokens
        if 0 < config.max_queued_tokens < waiting + num_tokens and waiting:
            return "tokens", (
                f"{waiting} prompt tokens are queued; {num_tokens} more exceed the limit of "
                f"{config.max_queued_tokens}"
            )
        return None

    def push(self, request: Request) -> None:
        self._count(request, 1)
        self.queue.push(request)

    def remove(self, request: Request) -> None:
        """Takes out a request that waits."""
        self._count(request, -1)
        lane = self._lane_of.pop(request, None)
        if lane is None:
            self.queue.remove(request)
            return
        self._aside[lane].remove(request)
        if not self._aside[lane]:
            del self._aside[lane]

    def _count(self, request: Request, sign: int) -> None:
        self.waiting_of[request.request_class] += sign
        if request.status == RequestStatus.PREEMPTED:
            self.num_preempted += sign
        else:
            self.num_tokens += sign * request.num_prompt_tokens

    def start(self, request: Request, num_left: int) -> None:
        """Takes out a request that starts to run, with `num_left` tokens to compute."""
        if 0 < self.config.long_prompt_tokens < num_left:
            self.long.add(request)
        self.remove(request)
        self.running_of[request.request_class] += 1

    def stop(self, request: Request) -> None:
        """Hears that a request runs no more."""
        self.running_of[request.request_class] -= 1
        self.long.discard(request)

    def first(self, now: float) -> Request | None:
        """Returns the request to admit next, without taking it out."""
        if self.alone is not None:
            return self.alone if self.alone.status in _WAIT else None
        for tried in self.on_trial:  # else newcomers could put off the trial's end for ever
            if tried.status in _WAIT and self._lane_that_blocks(tried) is None:
                return tried
        self._take_back(now)
        for _ in range(MAX_PASSED):
            request = self.queue.first(now)
            if request is None:
                return None
            lane = self._lane_that_blocks(request)
            if lane is None:
                return request
            self.queue.remove(request)
            if lane not in self._aside:
                self._aside[lane] = POLICIES[self.config.policy](self._settings)
                self._aside[lane].share_history(self.queue)
            self._aside[lane].push(request)
            self._lane_of[request] = lane
        return None

    def oldest(self) -> Request | None:
        """Returns the request that arrived first of all that wait, those set aside included."""
        firsts = (queue.oldest() for queue in (self.queue, *self._aside.values()))
        return min(filter(None, firsts), key=lambda r: r.arrival_time, default=None)

    def candidates(self, now: float) -> Iterator[Request]:
        """Yields those among whom `first` chooses: the first of the queue, and of each lane that
        has room. Moves nobody."""
        open_lanes = (aside for lane, aside in self._aside.items() if self._room(lane) > 0)
        for queue in (self.queue, *open_lanes):
            request = queue.first(now)
            if request is not None:
                yield request

    def _is_long(self, request: Request) -> bool:
        """Whether a request that waits has a long prompt left to compute."""
        limit = self.config.long_prompt_tokens
        if not limit or request.num_tokens <= limit:
            return False
        spared = max(request.num_swapped_tokens, self._pages.num_cached_tokens(request))
        return request.num_tokens - spared > limit

    # ---- targets ----------------------------------------------------------------------------

    def strictest_itl_slo_s(self) -> float:
        """The shortest target for the time between tokens among those that run, or of all while
        nobody does; 0: none."""
        if not self._has_itl_targets:
            return 0.0
        of_running = [self.targets_of(name).itl_s for name, n in self.running_of.items() if n]
        targets = of_running or [targets.itl_s for targets in self._targets.values()]
        return min(filter(None, targets), default=0.0)

    def targets_of(self, request_class: str) -> LatencyTargets:
        return self._targets.get(request_class, self._targets[""])

    def ttft_slack_s(self, now: float, prefilling: Iterable[Request]) -> float:
        """Seconds until the first of the prompts that are computed, or of the oldest that waits,
        misses its target for the first token; inf without targets."""
        oldest = self.queue.oldest()
        slack = math.inf
        for request in [*prefilling, *([oldest] if oldest else [])]:
            target = self.targets_of(request.request_class).ttft_s
            if target and not request.num_output_tokens:
                slack = min(slack, request.arrival_time + target - now)
        return slack

    # ---- lanes ------------------------------------------------------------------------------

    def _lane_that_blocks(self, request: Request) -> Lane | None:
        for group in self.held:
            if request in group:
                return ("held", group)
        kind = self._classes.get(request.request_class)
        if kind is not None and self._room(("class", kind.name)) <= 0:
            return ("class", kind.name)
        if self.config.batching != "continuous":
            return None  # a group starts together
        if self._is_long(request) and self._room(("long", None)) <= 0:
            return ("long", None)
        work = self._pages.awaited(request)
        return None if work is None else ("prefix", work)

    def _room(self, lane: Lane) -> int:
        """How many requests of a lane may start now."""
        kind, name = lane
        if kind == "class":
            cap = self._classes[str(name)].max_num_seqs or self.config.max_num_seqs
            return cap - self.running_of[str(name)]
        if kind == "held":
            return 0 if name in self.held else MAX_PASSED
        if kind == "long":
            return self.config.max_long_prompts - len(self.long)
        assert isinstance(name, Work), "what is waited for"
        return 0 if self._pages.is_in_work(name) else MAX_PASSED

    def _take_back(self, now: float) -> None:
        """Puts back into the queue as many of each lane as the lane has room for."""
        for lane in list(self._aside):
            aside = self._aside[lane]
            for _ in range(min(self._room(lane), len(aside), MAX_PASSED)):
                request = aside.first(now)
                assert request is not None, "a lane that is not empty has a first request"
                aside.remove(request)
                del self._lane_of[request]
                self.queue.push(request)
            if not aside:
                del self._aside[lane]
