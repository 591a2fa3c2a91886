"""Notices that a turn of the engine does not end: the device does not answer. Knows times: no
requests, no steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from jserve.engine.metrics import EngineMetrics

log = logging.getLogger(__name__)

GIVE_UP_AFTER = 2  # times the limit: those that wait are then told
_LOOKS = 8  # within the limit


class Watchdog:
    """The engine's thread says when a turn begins and ends, another thread looks.

    Args:
      limit_s: a turn that takes longer is stuck; 0: none is.
      describe: says what the turn computes, for the log.
    """

    def __init__(self, limit_s: float, describe: Callable[[], str], metrics: EngineMetrics) -> None:
        self.busy_since: float | None = None  # time.monotonic; None while no turn runs
        self._limit_s = limit_s
        self._describe = describe
        self._metrics = metrics
        self._reported: float | None = None  # the turn that the log has heard of

    @property
    def interval_s(self) -> float:
        """How often `look` had better be called."""
        return min(self._limit_s / _LOOKS, 1.0) or 1.0

    @property
    def stuck_s(self) -> float:
        """How long the turn that is stuck has taken so far; 0.0 while none is."""
        since = self.busy_since
        busy_s = 0.0 if since is None else time.monotonic() - since
        return busy_s if busy_s > self._limit_s > 0 else 0.0

    def look(self) -> bool:
        """Reports a turn that is stuck, once; returns whether it has been so for too long."""
        since, stuck_s = self.busy_since, self.stuck_s
        if stuck_s and self._reported != since:
            self._reported = since
            self._metrics.on_stuck_step()
            log.error("a step has run for %.1f s: %s", stuck_s, self._describe())
        return stuck_s > GIVE_UP_AFTER * self._limit_s
