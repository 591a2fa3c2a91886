"""Which running request gives way: when the pool is dry, or to a more urgent one that waits. Knows
what each has computed and holds: not how it leaves, nor who comes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from scheduler.config import SchedulerConfig
from scheduler.policy import POLICIES
from scheduler.request import Request
from scheduler.slots import Slots


class Victims:
    """The requests that run, `running`, as those who may have to leave."""

    def __init__(self, config: SchedulerConfig, slots: Slots, running: Iterable[Request]) -> None:
        self.priorities = Counter[int]()  # of those that run
        self._running = running
        self._slots = slots
        self._max_starvation_s = config.max_starvation_s
        self._by_urgency = POLICIES[config.policy].preempts

    def on_start(self, request: Request) -> None:
        self.priorities[request.priority] += 1

    def on_leave(self, request: Request) -> None:
        self.priorities[request.priority] -= 1
        if not self.priorities[request.priority]:
            del self.priorities[request.priority]

    def choose(self) -> Request:
        """The least urgent running request, and of those the one that loses the least work.

        The one with the most work is never chosen before the others, so it ends: no livelock.
        """
        return max(self._running, key=self._readiness)

    def is_any_less_urgent(self, request: Request) -> bool:
        if not self._by_urgency:
            return False
        return max(self.priorities, default=request.priority) > request.priority

    def less_urgent_than(
        self, request: Request, now: float, num_lacking: int, spared: set[Request]
    ) -> Request | None:
        """The running request that has to make room for an urgent one, if all such hold the pages
        that it lacks. One that has waited as long as any may is left alone, and so are `spared`.
        """
        if not self.is_any_less_urgent(request):
            return None
        victims = [
            r
            for r in self._running
            if r.priority > request.priority
            and now - r.arrival_time < self._max_starvation_s
            and r not in spared
        ]
        held = sum(int(self._slots.num_pages[r.slot]) for r in victims)
        if not victims or held < num_lacking:
            return None
        return max(victims, key=self._readiness)

    def _readiness(self, request: Request) -> tuple[int, int, float]:
        return request.priority, -int(self._slots.num_computed[request.slot]), request.arrival_time
