"""Finds the request that a device cannot compute: those of a failed step are tried again, together,
then in halves. Knows requests and groups of them: not why steps fail, not devices."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from scheduler.request import Request

Group = tuple[Request, ...]


class Waiting(Protocol):
    """See `Admission`."""

    on_trial: dict[Request, None]
    held: list[Group]
    alone: Request | None


class Suspects:
    """Who is tried now, before anybody else starts, and who waits for that; all others run as ever,
    but for one that is last to be accused: it is tried alone, as the fault may be that of somebody
    who has come since.

    A request is cleared by a token that it gets, or its embedding. One whose step fails though
    nobody else is in it is the culprit.

    Args:
      waiting: is told who may not start before their trial.

    Attributes:
      num_culprits: those found since a step last gave tokens.
    """

    def __init__(self, waiting: Waiting) -> None:
        self.num_culprits = 0
        self._waiting = waiting
        self._held = waiting.held

    @property
    def is_alert(self) -> bool:
        """Whether steps matter here at all."""
        return bool(self._waiting.on_trial or self._held or self.num_culprits)

    def on_failure(self, requests: Collection[Request]) -> Request | None:
        """Hears who was in the steps that failed; returns the culprit, if it is known now."""
        there = [request for request in requests if not request.is_finished]
        on_trial = self._waiting.on_trial
        accused = [request for request in there if request in on_trial]
        if not accused:
            on_trial.update(dict.fromkeys(there))
            return None
        first, second = accused[: -(-len(accused) // 2)], accused[-(-len(accused) // 2) :]
        absent = [request for request in on_trial if request not in accused]
        self._held[:0] = [tuple(group) for group in (second, absent) if group]
        self._waiting.on_trial = dict.fromkeys(first)
        if second:
            return None
        if len(requests) > 1:
            self._waiting.alone = first[0]
            return None
        self._end_trial(there)
        self.num_culprits += 1
        return first[0]

    def on_tokens(self, requests: Collection[Request]) -> None:
        """Hears who got a token, or all that they asked for."""
        if requests:
            self.num_culprits = 0
        self._end_trial(requests)

    def _end_trial(self, requests: Collection[Request]) -> None:
        for request in requests:
            self._waiting.on_trial.pop(request, None)
        if self._waiting.alone not in self._waiting.on_trial:
            self._waiting.alone = None

    def go_on(self) -> None:
        """Begins the next trial when nobody is left of the one before."""
        self._end_trial([r for r in self._waiting.on_trial if r.is_finished])
        while self._held and not self._waiting.on_trial:
            group = self._held.pop(0)
            self._waiting.on_trial = dict.fromkeys(r for r in group if not r.is_finished)
