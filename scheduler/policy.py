"""In which order waiting requests are admitted. Knows requests, what was served to whom, and how
much of a prompt is cached: not pages, not steps.

A policy is one class here, entered in POLICIES. Whatever its order, a request that has waited for
`max_starvation_s` comes first; of several such, the oldest.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.request import FinishReason, Request

PREFILL_TOKENS_PER_DECODE = 16  # prompt tokens that take as long as one more token of output
MAX_IDLE_TENANTS = 1024  # whose history is kept
OUTPUT_WEIGHT = 2  # what an output token counts against a tenant's share; a prompt token counts 1


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What a policy may depend on.

    Attributes:
      max_starvation_s: longest that a request waits before it comes first.
      tenant_weights: share of each tenant relative to others'; 1 for those that are not named.
      cached_tokens: tells how many of a request's tokens are in the prefix cache now.
    """

    max_starvation_s: float = math.inf
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    cached_tokens: Callable[[Request], int] = lambda request: 0


class _Heap:
    """Requests in the order of a key that is fixed while they wait; any may be removed."""

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self._key = key
        self._heap: list[tuple[Any, int, Request]] = []
        self._entry_of: dict[Request, int] = {}  # any other entry of a request is out of date
        self._sequence = itertools.count()

    def __len__(self) -> int:
        return len(self._entry_of)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._entry_of)

    def push(self, request: Request) -> None:
        if len(self._heap) > 2 * len(self) + 16:  # let go of what was removed
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)
        self._entry_of[request] = number = next(self._sequence)
        heapq.heappush(self._heap, (self._key(request), number, request))

    def remove(self, request: Request) -> None:
        self._entry_of.pop(request, None)

    def first(self) -> Request | None:
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def _is_live(self, entry: tuple[Any, int, Request]) -> bool:
        return self._entry_of.get(entry[2]) == entry[1]


def _arrival(request: Request) -> float:
    return request.arrival_time


class WaitingQueue:
    """First come, first served: the base of all orders.

    A preempted request keeps its arrival time, so it comes back ahead of what arrived after it.
    """

    preempts = False  # a waiting request takes the place of a less urgent one that runs
    counts_decodes = False  # wants to hear of every decode row, by `on_decoded`

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self.settings = settings or PolicySettings()
        self._by_arrival = _Heap(_arrival)

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_arrival)

    def push(self, request: Request) -> None:
        self._by_arrival.push(request)

    def remove(self, request: Request) -> None:
        """Takes a request out; one that does not wait is ignored."""
        self._by_arrival.remove(request)

    def share_history(self, other: WaitingQueue) -> None:
        """Goes by what `other`, of the same kind, hears of what was served and finished."""

    def oldest(self) -> Request | None:
        return self._by_arrival.first()

    def first(self, now: float) -> Request | None:
        """Returns the request to admit next, without taking it."""
        oldest = self._by_arrival.first()
        if oldest is None or now - oldest.arrival_time >= self.settings.max_starvation_s:
            return oldest
        return self._first(oldest)

    def _first(self, oldest: Request) -> Request:
        return oldest

    def on_served(self, request: Request, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Hears what a step computes for a request that runs."""

    def on_decoded(self, requests: Sequence[Request], num_steps: int) -> None:
        """Hears which requests get one more token of output in each of so many steps."""

    def on_finished(self, request: Request) -> None:
        """Hears that a request has ended."""


class _ByKey(WaitingQueue):
    """An order by `key`, fixed while a request waits."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._by_key = _Heap(self.key)

    def key(self, request: Request) -> Any:
        raise NotImplementedError

    def push(self, request: Request) -> None:
        super().push(request)
        self._by_key.push(request)

    def remove(self, request: Request) -> None:
        super().remove(request)
        self._by_key.remove(request)

    def _first(self, oldest: Request) -> Request:
        return self._by_key.first() or oldest


class Priority(_ByKey):
    """The most urgent first, in order of arrival among equals."""

    preempts = True

    def key(self, request: Request) -> tuple[int, float]:
        return request.priority, request.arrival_time


class ShortestJob(_ByKey):
    """The least remaining work first.

    How long an output will be is known from those of the same class, or where there is none of the
    same tenant, that finished: their running mean, and max_tokens until there is one.
    """

    MEMORY = 0.1  # how much of the mean is the newest output

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._mean_output: dict[tuple[str, str], float] = {}

    def share_history(self, other: WaitingQueue) -> None:
        assert isinstance(other, ShortestJob), "queues of one policy"
        self._mean_output = other._mean_output

    def key(self, request: Request) -> tuple[float, float]:
        most = request.sampling.max_tokens
        output = min(self._mean_output.get(self._kind(request), most), most)
        left = max(output - request.num_output_tokens, 1)
        return left + request.num_tokens / PREFILL_TOKENS_PER_DECODE, request.arrival_time

    def on_finished(self, request: Request) -> None:
        is_whole = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not is_whole or not request.sampling.max_tokens:
            return  # how long it would have become is not known
        length = float(request.num_output_tokens)
        kind = self._kind(request)
        mean = self._mean_output.pop(kind, length)
        if len(self._mean_output) >= MAX_IDLE_TENANTS:  # the one that finished longest ago goes
            del self._mean_output[next(iter(self._mean_output))]
        self._mean_output[kind] = mean + self.MEMORY * (length - mean)

    def _kind(self, request: Request) -> tuple[str, str]:
        return (request.request_class, "" if request.request_class else request.tenant)


class FairShare(WaitingQueue):
    """The tenant that was served least first, by weight; within a tenant, in order of arrival.

    A tenant's count rises with each token served. One that comes back after a pause starts no lower
    than the least of those that wait: unused share is not saved up. Source: virtual token counters
    of Fairness in Serving Large Language Models (arXiv 2401.00588).
    """

    counts_decodes = True

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._served: dict[str, float] = {}  # per tenant, divided by its weight
        self._waiting: dict[str, _Heap] = {}  # tenants with requests that wait
        self._order: list[tuple[float, str]] = []  # served so far, tenant; counts only rise
        self._floor = 0.0  # count of the tenant whose request left last

    def share_history(self, other: WaitingQueue) -> None:
        assert isinstance(other, FairShare), "queues of one policy"
        self._served = other._served

    def push(self, request: Request) -> None:
        super().push(request)
        tenant = request.tenant
        if tenant not in self._waiting:
            least = self._least_served()
            if least is not None:
                self._floor = self._served.get(least, self._floor)
            self._forget_idle()
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._floor)
            self._waiting[tenant] = _Heap(_arrival)
            heapq.heappush(self._order, (self._served[tenant], tenant))
        self._waiting[tenant].push(request)

    def remove(self, request: Request) -> None:
        super().remove(request)
        heap = self._waiting.get(request.tenant)
        if heap is not None:
            heap.remove(request)
            self._floor = self._served.get(request.tenant, self._floor)
            if not heap:
                del self._waiting[request.tenant]

    def _first(self, oldest: Request) -> Request:
        tenant = self._least_served()
        assert tenant is not None, "a request waits, and so does its tenant"
        return self._waiting[tenant].first() or oldest

    def _least_served(self) -> str | None:
        while self._order:
            served, tenant = self._order[0]
            if tenant not in self._waiting:
                heapq.heappop(self._order)
            elif served < self._served.get(tenant, served):
                heapq.heapreplace(self._order, (self._served[tenant], tenant))
            else:
                return tenant
        return None

    def _forget_idle(self) -> None:
        """Lets go of tenants that would come back at the floor anyway."""
        if len(self._served) > 2 * len(self._waiting) + MAX_IDLE_TENANTS:
            for tenant, count in list(self._served.items()):
                if tenant not in self._waiting and count <= self._floor:
                    del self._served[tenant]  # in place: other queues share it

    def on_decoded(self, requests: Sequence[Request], num_steps: int) -> None:
        for request in requests:
            self.on_served(request, 0, num_steps)

    def on_served(self, request: Request, num_prompt_tokens: int, num_output_tokens: int) -> None:
        weight = self.settings.tenant_weights.get(request.tenant, 1.0)
        tokens = num_prompt_tokens + OUTPUT_WEIGHT * num_output_tokens
        self._served[request.tenant] = self._served.get(request.tenant, 0.0) + tokens / weight


class LongestPrefix(WaitingQueue):
    """The one with most cached tokens among the oldest few; in order of arrival among equals.

    Looking at a few keeps the cost flat in the length of the queue.
    """

    WINDOW = 32

    def __init__(self, settings: PolicySettings | None = None) -> None:
        super().__init__(settings)
        self._window: dict[Request, None] = {}  # the oldest, as they came
        self._rest = _Heap(_arrival)

    def push(self, request: Request) -> None:
        super().push(request)
        self._window[request] = None
        if len(self._window) > self.WINDOW:
            newest = max(reversed(self._window), key=_arrival)
            del self._window[newest]
            self._rest.push(newest)

    def remove(self, request: Request) -> None:
        super().remove(request)
        self._rest.remove(request)
        if request in self._window:
            del self._window[request]
            following = self._rest.first()
            if following is not None:
                self._rest.remove(following)
                self._window[following] = None

    def _first(self, oldest: Request) -> Request:
        cached = self.settings.cached_tokens
        return min(self._window, key=lambda r: (-cached(r), r.arrival_time))


POLICIES: dict[str, type[WaitingQueue]] = {
    "fcfs": WaitingQueue,
    "priority": Priority,
    "sjf": ShortestJob,
    "fair": FairShare,
    "prefix": LongestPrefix,
}
