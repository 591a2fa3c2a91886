"""In which order waiting requests are admitted. Knows requests: not pages, not steps."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from scheduler.request import Request


class WaitingQueue:
    """Priority first, then arrival. A preempted request keeps its arrival time, so it comes back
    ahead of everything that arrived after it."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Request]] = []
        self._live: set[Request] = set()  # a removed request's entry is skipped when it surfaces
        self._sequence = itertools.count()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._live)

    def push(self, request: Request) -> None:
        if len(self._heap) > 2 * len(self._live) + 16:  # let go of what was removed
            self._heap = [entry for entry in self._heap if entry[3] in self._live]
            heapq.heapify(self._heap)
        self._live.add(request)
        entry = (request.priority, request.arrival_time, next(self._sequence), request)
        heapq.heappush(self._heap, entry)

    def peek(self) -> Request | None:
        while self._heap and self._heap[0][3] not in self._live:
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None

    def remove(self, request: Request) -> None:
        self._live.discard(request)
