"""Predicts how long a step takes: learnt from steps, from a device's limits, or given. Knows counts
and seconds only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any, Protocol

import numpy as np

from scheduler.bucket import Bucket, choose_bucket
from scheduler.step_shape import StepShape

MIN_STEP_S = 1e-6  # no prediction is shorter


class StepTime(Protocol):
    """Predicted seconds of steps."""

    def predict(self, shape: StepShape) -> float:
        """Returns the seconds of a step."""

    def predict_decodes(self, num_rows: int, context_tokens: np.ndarray) -> np.ndarray:
        """Returns the seconds f64[n] of steps that only decode: `num_rows` rows each, with so many
        tokens of context in all, i64[n]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearStepTime:
    """So much for a step, and for each thing in it."""

    constant_s: float = 0.0
    per_prefill_token_s: float = 0.0
    per_decode_row_s: float = 0.0
    per_context_token_s: float = 0.0

    def predict(self, shape: StepShape) -> float:
        return (
            self.constant_s
            + self.per_prefill_token_s * shape.prefill_tokens
            + self.per_decode_row_s * shape.decode_rows
            + self.per_context_token_s * shape.context_tokens
        )

    def predict_decodes(self, num_rows: int, context_tokens: np.ndarray) -> np.ndarray:
        constant = self.constant_s + self.per_decode_row_s * num_rows
        return constant + self.per_context_token_s * np.asarray(context_tokens, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineStepTime:
    """What a device takes at best: bytes over bandwidth or FLOPs over rate, whichever is more, at
    `efficiency`, and an overhead per step (Williams, Waterman and Patterson, CACM 2009).

    Attributes:
      weight_bytes: read by every step.
      kv_bytes_per_token: read for each token of context.
      flops_per_token: of all matmuls; about two per parameter.
      flops_per_pair: of attention, per query-key pair, all layers and heads.
    """

    weight_bytes: float
    kv_bytes_per_token: float
    flops_per_token: float
    flops_per_pair: float
    hbm_bytes_per_s: float
    flop_per_s: float
    overhead_s: float = 50e-6
    efficiency: float = 0.7

    def predict(self, shape: StepShape) -> float:
        pairs = max(shape.attended_pairs, shape.context_tokens)  # a decode row has one per token
        return float(self._seconds(shape.num_tokens, shape.context_tokens, pairs))

    def predict_decodes(self, num_rows: int, context_tokens: np.ndarray) -> np.ndarray:
        context = np.asarray(context_tokens, float)
        return np.asarray(self._seconds(num_rows, context, context))

    def _seconds(self, num_tokens: int, context: Any, pairs: Any) -> Any:
        memory = (self.weight_bytes + self.kv_bytes_per_token * context) / self.hbm_bytes_per_s
        compute = self.flops_per_token * num_tokens + self.flops_per_pair * pairs
        return np.maximum(memory, compute / self.flop_per_s) / self.efficiency + self.overhead_s


class FittedStepTime:
    """Learns from steps: ridge regression on relative errors.

    A step runs in a compiled shape, its bucket, and costs what that costs, plus so much per token
    of context and per query-key pair. What a bucket costs is linear in its tokens and rows, plus
    what its own steps say beyond that; so a bucket that was never seen is interpolated. Older steps
    of the same bucket count for less, so that a lasting change is followed; and so does, slowly,
    what no step has confirmed for long, so that a bucket avoided as slow is tried again. When the
    steps of several buckets agree that the device became slower or faster, all that was learnt is
    scaled.
    """

    DECAY = 0.99  # per step of the same bucket
    FADE = 0.9  # per LEARN_EVERY steps, whatever their bucket
    LEAST = 1e-3  # steps that a bucket counts for, however long ago it was seen
    LEARN_EVERY = 32  # steps
    WINDOW = 256  # steps that the error is taken over
    SHRINK = 0.3  # pulls what is a bucket's own to 0, like so many steps of that bucket
    OUTLIER = 2.0  # times what was expected; what takes longer, such as a pause, weighs less
    KNOWN_AFTER = 8  # steps of a bucket; only such buckets tell whether the device changed
    SHIFT = 1.1  # times as slow or as fast: the least that is taken for such a change
    AGREEMENT = 1.25  # how far apart, as a ratio, buckets may be that agree
    _SCALE = np.array([1.0, 1e-3, 1e-5, 1.0])  # of 1, context tokens, pairs, seconds: for the sums
    # Of 1, tokens, rows. What tokens and rows explain as well goes mostly to the tokens: rows pass
    # for cheap until they are tried, as what passes for dear may never be.
    _LINE_SCALE = np.array([1.0, 1e-2, 1e-2])

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        self.num_observations = 0
        count = len(self.buckets)
        self._sums = np.zeros((count, 4, 4))  # of products of 1, context, pairs and seconds
        self._counts = np.zeros(count)
        self._bucket_s = np.zeros(count)  # what each bucket costs
        self._line = np.zeros(3)  # constant, per token of a mixed bucket, per row
        self._slopes = np.zeros(2)  # per context token, per pair
        self._recent: list[tuple[float, ...]] = []  # bucket, context, pairs, seconds
        self._ratios = np.ones(1)  # of actual and predicted seconds, the last WINDOW
        self._p95_ratio = 1.0
        self._bucket_of = lru_cache(1 << 14)(self._find_bucket)
        # From a bucket's (1, context, pairs) to the unknowns: line, slopes, each bucket's own.
        self._map = np.zeros((count, 5 + count, 3))
        for i, bucket in enumerate(self.buckets):
            mixed_tokens = 0 if bucket.decode_only else bucket.num_tokens
            self._map[i, :3, 0] = self._LINE_SCALE * (1.0, mixed_tokens, bucket.num_rows)
            self._map[i, 3, 1] = self._map[i, 4, 2] = self._map[i, 5 + i, 0] = 1.0

    @classmethod
    def fit(
        cls, samples: Iterable[tuple[StepShape, float]], buckets: Sequence[Bucket]
    ) -> FittedStepTime:
        """Returns a model of all samples alike; pauses among them count for little.

        Raises:
          ValueError: there are fewer samples than a model needs.
        """
        model = cls(buckets)
        steps = np.array([model._row(shape, seconds) for shape, seconds in samples], float)
        if len(steps) < cls.LEARN_EVERY:
            raise ValueError(f"{len(steps)} steps are too few; give at least {cls.LEARN_EVERY}")
        model.num_observations = len(steps)
        model._start(steps)
        return model

    @property
    def is_ready(self) -> bool:
        return self.num_observations >= self.LEARN_EVERY

    @property
    def p95_ratio(self) -> float:
        """What 95 of 100 recent steps took at most, relative to their predictions."""
        return self._p95_ratio

    def coefficients(self) -> dict[str, float]:
        """Returns the plain costs: of a step, a prefill token, a row, a token of context."""
        return {
            "constant_s": float(self._line[0]),
            "per_prefill_token_s": float(self._line[1]),
            "per_decode_row_s": float(self._line[2]),
            "per_context_token_s": float(self._slopes[0]),
        }

    def predict(self, shape: StepShape) -> float:
        slopes = self._slopes
        seconds = (
            self._bucket_s[self._bucket_of(shape.num_tokens, shape.num_rows)]
            + slopes[0] * shape.context_tokens
            + slopes[1] * shape.attended_pairs
        )
        return max(float(seconds), MIN_STEP_S)

    def predict_decodes(self, num_rows: int, context_tokens: np.ndarray) -> np.ndarray:
        bucket_s = self._bucket_s[self._bucket_of(num_rows, num_rows)]
        seconds: np.ndarray = bucket_s + self._slopes[0] * np.asarray(context_tokens, float)
        np.maximum(seconds, MIN_STEP_S, out=seconds)
        return seconds

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learns how long a step took."""
        self._recent.append(self._row(shape, seconds))
        self.num_observations += 1
        if len(self._recent) == self.LEARN_EVERY:
            steps = np.array(self._recent)
            self._recent.clear()
            if self._counts.any():
                self._learn(steps)
            else:
                self._start(steps)

    def _start(self, steps: np.ndarray) -> None:
        """Fits the first model to steps f64[n, 4]: a step is expected to take what is usual for its
        bucket, and then what the model says."""
        usual = {bucket: np.median(steps[steps[:, 0] == bucket, 3]) for bucket in set(steps[:, 0])}
        expected = np.array([usual[bucket] for bucket in steps[:, 0]])
        for _ in range(2):
            self._sums[:], self._counts[:] = 0.0, 0.0
            self._add(steps, expected)
            self._solve()
            expected = self._predict_rows(steps)
        self._note_ratios(steps[:, 3] / expected)

    def _learn(self, steps: np.ndarray) -> None:
        """Takes in steps f64[n, 4], and forgets a little of older ones."""
        buckets, seconds = steps[:, 0].astype(int), steps[:, 3]
        expected = self._predict_rows(steps)
        shift = self._shift(buckets, seconds / expected)
        self._sums[:, :3] /= shift  # as if its steps had taken that much longer
        self._sums[:, :, :3] /= shift
        expected *= shift
        self._note_ratios(seconds / expected)
        # Of a bucket that is hardly known, what it takes is believed.
        expected = np.where(self._counts[buckets] < 1, np.maximum(expected, seconds), expected)
        left = self.DECAY ** np.bincount(buckets, minlength=len(self.buckets))
        left *= np.clip(self.LEAST / np.maximum(self._counts, self.LEAST), self.FADE, 1.0)
        self._sums *= left[:, None, None]
        self._counts *= left
        self._add(steps, expected)
        self._solve()

    def _shift(self, buckets: np.ndarray, ratios: np.ndarray) -> float:
        """How many times as long as predicted steps take, if known buckets agree on it; else 1."""
        known = defaultdict[int, list[float]](list)
        for bucket, ratio in zip(buckets.tolist(), ratios.tolist(), strict=True):
            if self._counts[bucket] >= self.KNOWN_AFTER:
                known[bucket].append(ratio)
        medians = [median(of_bucket) for of_bucket in known.values()]
        if len(medians) < 2 or max(medians) > self.AGREEMENT * min(medians):
            return 1.0
        shift = median(medians)
        return 1.0 if 1 / self.SHIFT < shift < self.SHIFT else shift

    def _note_ratios(self, ratios: np.ndarray) -> None:
        self._ratios = np.concatenate([self._ratios, ratios])[-self.WINDOW :]
        self._p95_ratio = max(float(np.quantile(self._ratios, 0.95)), 1.0)

    def _row(self, shape: StepShape, seconds: float) -> tuple[float, ...]:
        bucket = self._bucket_of(shape.num_tokens, shape.num_rows)
        return bucket, shape.context_tokens, shape.attended_pairs, max(seconds, MIN_STEP_S)

    def _find_bucket(self, num_tokens: int, num_rows: int) -> int:
        fits = any(num_tokens <= b.num_tokens and num_rows <= b.num_rows for b in self.buckets)
        bucket = choose_bucket(self.buckets, num_tokens, num_rows) if fits else self.buckets[-1]
        return self.buckets.index(bucket)

    def _predict_rows(self, steps: np.ndarray) -> np.ndarray:
        seconds = self._bucket_s[steps[:, 0].astype(int)] + steps[:, 1:3] @ self._slopes
        return np.maximum(np.asarray(seconds, float), MIN_STEP_S)

    def _add(self, steps: np.ndarray, expected: np.ndarray) -> None:
        """Adds steps f64[n, 4], with errors relative to the seconds f64[n] expected of each, so
        that one that took next to nothing weighs no more than others; a pause weighs less."""
        bucket = steps[:, 0].astype(int)
        scale = np.maximum(expected, steps[:, 3] / self.OUTLIER)[:, None]
        x = np.concatenate([np.ones_like(scale), steps[:, 1:]], axis=1) * self._SCALE / scale
        np.add.at(self._sums, bucket, x[:, :, None] * x[:, None])
        np.add.at(self._counts, bucket, 1)

    def _solve(self) -> None:
        seen = self._sums[:, 0, 0] > 0
        by, sums = self._map[seen], self._sums[seen]
        left = np.einsum("bdi,bij,bej->de", by, sums[:, :3, :3], by)
        right = np.einsum("bdi,bi->d", by, sums[:, :3, 3])
        one_step = self._sums[:, 0, 0].sum() / self._counts.sum()  # weighs 1 / seconds^2
        penalty = np.full(len(right), self.SHRINK * one_step)
        penalty[:5] = 1e-6 * one_step
        penalty[5:][seen] = self.SHRINK * sums[:, 0, 0] / self._counts[seen]
        left[np.diag_indices(len(right))] += penalty
        unknown = np.ones(len(right), bool)
        solution = np.zeros(len(right))
        while True:  # costs are not negative
            solution[:] = 0.0
            solution[unknown] = np.linalg.solve(left[np.ix_(unknown, unknown)], right[unknown])
            negative = unknown & (solution < 0)
            negative[5:] = negative[0] = False
            if not negative.any():
                break
            unknown &= ~negative
        self._bucket_s = np.einsum("bd,d->b", self._map[:, :, 0], solution)
        self._line = solution[:3] * self._LINE_SCALE
        self._slopes = solution[3:5] * self._SCALE[1:3]
