"""Which requests are late. Knows their deadlines: not what becomes of them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from scheduler.request import Request


class Deadlines:
    """The deadlines of requests, and those of their wait, in order of time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._sequence = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request, num_live: int) -> None:
        """Remembers a request's deadlines. Ended requests whose deadline is far are let go before
        they outnumber the `num_live` ones."""
        for deadline in (request.deadline, request.queue_deadline):
            if deadline is None:
                continue
            if len(self._heap) > 4 * num_live + 16:
                self._heap = [entry for entry in self._heap if not entry[2].is_finished]
                heapq.heapify(self._heap)
            heapq.heappush(self._heap, (deadline, next(self._sequence), request))

    def take_late(self, now: float) -> Iterator[Request]:
        """Yields each request that is past its deadline, or past its queue deadline without having
        started. Whoever asks ends it before going on."""
        while self._heap and self._heap[0][0] <= now:
            time, _, request = heapq.heappop(self._heap)
            is_late = time == request.deadline or request.first_scheduled_time is None
            if is_late and not request.is_finished:
                yield request

    def first(self) -> float | None:
        """Returns the earliest deadline."""
        return self._heap[0][0] if self._heap else None
