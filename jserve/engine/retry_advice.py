"""When a caller that found no room had better come again. Knows times: no requests, no queue."""

from __future__ import annotations

FIRST_GUESS_S = 1.0  # while no request has ended
MOST_S = 60.0
_WEIGHT = 0.05  # of the newest gap between ends


class RetryAdvice:
    """Places become free as requests end. Each caller that is sent away is told when the next place
    is expected that nobody before it was promised, so that they do not all come back at once.

    One thread may note ends while another asks.
    """

    def __init__(self) -> None:
        self._gap_s: float | None = None  # between ends, on average
        self._last_end: float | None = None
        self._promised = 0.0  # the time of the last place that somebody was promised

    def on_end(self, now: float, arrived: float) -> None:
        """Hears that a request which had `arrived` has ended, and so made room, at `now` seconds of
        any clock. Before it came there may have been nobody to end."""
        if self._last_end is not None:
            gap = now - max(self._last_end, arrived)
            old = gap if self._gap_s is None else self._gap_s
            self._gap_s = old + _WEIGHT * (gap - old)
        self._last_end = now

    def after_s(self, now: float) -> float:
        """Returns the seconds until a place is expected for one more caller, at most MOST_S."""
        gap = FIRST_GUESS_S if self._gap_s is None else self._gap_s
        self._promised = min(max(self._promised, now) + gap, now + MOST_S)
        return self._promised - now
