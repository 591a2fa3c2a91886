"""What each step held, over time, in bounded memory. Knows counts and seconds: no requests."""

from __future__ import annotations

from typing import Any

import numpy as np

from jserve.sim.histogram import Histogram

# What each step has, in the order of Timeline.add. Preemptions are those of a whole call of it.
COUNTS = (
    *("decode_rows", "prefill_tokens", "chunks", "context_tokens", "pages_used", "pages_cached"),
    *("waiting", "running", "predicted_s", "preemptions"),
)
_PREFILL = COUNTS.index("prefill_tokens")
_SUMS = 5  # columns before the sums of COUNTS: those of _HEAD
_HEAD = ("start_s", "end_s", "max_step_s", "busy_s", "steps")
_BUFFERED_CALLS, _BUFFERED_STEPS = 4096, 1 << 18  # between two flushes


class Timeline:
    """Records of one step each until `capacity` is reached; from then on of equal spans of time,
    which double whenever it is reached again.

    Attributes:
      decode_s, mixed_s: durations of steps without and with prefill tokens.
      peaks: the most of each of COUNTS that a step had.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._span_s = 0.0  # of a record; 0: one step
        self._records = np.zeros((0, _SUMS + len(COUNTS)))
        self._durations: list[np.ndarray] = []
        self._calls: list[tuple[float, ...]] = []
        self._num_buffered = 0
        self._peaks = np.zeros(len(COUNTS))
        self._decode_s, self._mixed_s = Histogram(), Histogram()

    def add(self, start_s: float, durations_s: np.ndarray, *counts: float) -> None:
        """Adds consecutive steps that have the same COUNTS; calls come in order of `start_s`.

        Shape: durations_s f64[n], n > 0.
        """
        self._durations.append(durations_s.copy())  # it may be a piece of something large
        self._calls.append((start_s, len(durations_s), *counts))
        self._num_buffered += len(durations_s)
        if len(self._calls) >= _BUFFERED_CALLS or self._num_buffered >= _BUFFERED_STEPS:
            self._flush()

    def _flush(self) -> None:
        if not self._calls:
            return
        calls = np.array(self._calls, np.float64)
        durations = np.concatenate(self._durations)
        steps = calls[:, 1].astype(np.int64)
        first = np.cumsum(steps) - steps
        busy = np.add.reduceat(durations, first)
        longest = np.maximum.reduceat(durations, first)
        counts = calls[:, 2:]
        is_mixed = np.repeat(counts[:, _PREFILL] > 0, steps)
        self._mixed_s.add_many(durations, is_mixed.astype(np.int64))
        self._decode_s.add_many(durations, (~is_mixed).astype(np.int64))
        self._peaks = np.maximum(self._peaks, counts.max(axis=0))
        start = calls[:, 0]
        head = np.stack([start, start + busy, longest, busy, steps], axis=1)
        sums = counts * steps[:, None]
        sums[:, -1] = counts[:, -1]
        self._records = np.concatenate([self._records, np.concatenate([head, sums], axis=1)])
        self._calls, self._durations, self._num_buffered = [], [], 0
        if self._span_s:
            self._merge()
        while len(self._records) > self._capacity:
            total_s = self._records[-1, 0] - self._records[0, 0]
            self._span_s = max(2 * self._span_s, 2 * total_s / self._capacity, 1e-9)
            self._merge()

    def _merge(self) -> None:
        """Puts records that begin in the same span into one."""
        records = self._records
        span = np.floor((records[:, 0] - records[0, 0]) / self._span_s)
        first = np.flatnonzero(np.diff(span, prepend=-1.0))
        merged = np.empty((len(first), records.shape[1]))
        merged[:, 0] = records[first, 0]
        merged[:, 1:3] = np.maximum.reduceat(records[:, 1:3], first)
        merged[:, 3:] = np.add.reduceat(records[:, 3:], first)
        self._records = merged

    @property
    def decode_s(self) -> Histogram:
        self._flush()
        return self._decode_s

    @property
    def mixed_s(self) -> Histogram:
        self._flush()
        return self._mixed_s

    @property
    def peaks(self) -> dict[str, float]:
        self._flush()
        return dict(zip(COUNTS, self._peaks.tolist(), strict=True))

    def totals(self) -> dict[str, float]:
        """Returns `steps`, `busy_s`, and the sum over all steps of each of COUNTS."""
        self._flush()
        sums = self._records[:, 3:].sum(axis=0).tolist()
        return dict(zip(("busy_s", "steps", *COUNTS), sums, strict=True))

    def columns(self) -> dict[str, Any]:
        """Returns f64[n] per name: start_s, end_s, max_step_s, busy_s, steps of each record, and
        the mean over its steps of each of COUNTS, of preemptions the sum."""
        self._flush()
        columns = dict(zip((*_HEAD, *COUNTS), self._records.T, strict=True))
        for name in COUNTS[:-1]:
            columns[name] = columns[name] / np.maximum(columns["steps"], 1)
        return columns
