"""A distribution in bounded memory. Knows numbers only."""

from __future__ import annotations

import math

import numpy as np

PERCENTILES = (50, 90, 95, 99)
GROWTH = 1.005  # a bin's upper edge over its lower one
_LOG_GROWTH = math.log(GROWTH)
_LEAST = 1e-9  # what is smaller, zero included, shares the lowest bin


class Histogram:
    """Counts of numbers from 0 up in bins 0.5 % wide; count, sum, least and most are exact."""

    __slots__ = ("_bins", "count", "least", "most", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.least = math.inf
        self.most = 0.0
        self._bins: dict[int, int] = {}

    def add(self, value: float) -> None:
        index = math.floor(math.log(max(value, _LEAST)) / _LOG_GROWTH)
        self._bins[index] = self._bins.get(index, 0) + 1
        self.count += 1
        self.total += value
        self.least = min(self.least, value)
        self.most = max(self.most, value)

    def add_many(self, values: np.ndarray, counts: np.ndarray) -> None:
        """Adds each of `values` as often as `counts` says.

        Shapes: values f64[n]; counts i64[n].
        """
        values, counts = values[counts > 0], counts[counts > 0]
        if not values.size:
            return
        indices = np.floor(np.log(np.maximum(values, _LEAST)) / _LOG_GROWTH).astype(np.int64)
        lowest = int(indices.min())
        sums = np.bincount(indices - lowest, weights=counts)
        for offset in np.flatnonzero(sums).tolist():
            index = lowest + offset
            self._bins[index] = self._bins.get(index, 0) + int(sums[offset])
        self.count += int(counts.sum())
        self.total += float(values @ counts)
        self.least = min(self.least, float(values.min()))
        self.most = max(self.most, float(values.max()))

    def merge(self, other: Histogram) -> None:
        for index, count in other._bins.items():
            self._bins[index] = self._bins.get(index, 0) + count
        self.count += other.count
        self.total += other.total
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    def percentile(self, percent: float) -> float:
        """Returns the nearest-rank percentile, at most 0.25 % off; NaN if nothing was added."""
        if not self.count:
            return math.nan
        values, shares = self.cumulative()
        rank = min(int(np.searchsorted(shares, percent / 100 - 1e-12)), len(values) - 1)
        return float(values[rank])

    def cumulative(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns ascending values, and the share of samples up to each: f64[n], f64[n]."""
        indices = sorted(self._bins)
        values = np.exp((np.array(indices) + 0.5) * _LOG_GROWTH).clip(self.least, self.most)
        counts = np.array([self._bins[i] for i in indices])
        return values, np.cumsum(counts) / max(self.count, 1)

    def summary_ms(self) -> dict[str, float] | None:
        """Returns mean, percentiles and most of seconds in milliseconds; None without samples."""
        if not self.count:
            return None
        percentiles = {f"p{p}": 1e3 * self.percentile(p) for p in PERCENTILES}
        return {"mean": 1e3 * self.mean, **percentiles, "max": 1e3 * self.most}
