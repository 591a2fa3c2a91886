"""Predicts how long a step takes: learnt from steps, from a device's limits, or given. Knows counts
and seconds only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
        decode_context = shape.context_tokens if not shape.attended_pairs else 0
        pairs = shape.attended_pairs + decode_context
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
    of the same bucket count for less, so that a lasting change is followed.
    """

    DECAY = 0.99  # per step of the same bucket
    SOLVE_EVERY = 32  # steps
    READY_AFTER = 32  # steps
    WINDOW = 256  # steps that the error is taken over
    SHRINK = 0.3  # pulls what is a bucket's own to 0, like so many steps of that bucket
    OUTLIER = 5.0  # times the prediction; a pause counts as no more than that
    _SCALE = np.array([1.0, 1e-3, 1e-5])  # of 1, context tokens, pairs: keeps the sums alike

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = list(buckets)
        self.num_observations = 0
        count = len(self.buckets)
        self._sums = np.zeros((count, 3, 3))
        self._targets = np.zeros((count, 3))
        self._counts = np.zeros(count)
        self._bucket_s = np.zeros(count)  # what each bucket costs
        self._line = np.zeros(3)  # constant, per token of a mixed bucket, per row
        self._slopes = np.zeros(2)  # per context token, per pair
        self._ratios = np.ones(self.WINDOW)
        self._index: dict[tuple[int, int], int] = {}
        self._p95_ratio = 1.0
        # From a bucket's (1, context, pairs) to the unknowns: line, slopes, each bucket's own.
        self._map = np.zeros((count, 5 + count, 3))
        for i, bucket in enumerate(self.buckets):
            mixed_tokens = 0 if bucket.decode_only else bucket.num_tokens
            self._map[i, :3, 0] = 1.0, mixed_tokens / 100, bucket.num_rows / 10
            self._map[i, 3, 1] = self._map[i, 4, 2] = self._map[i, 5 + i, 0] = 1.0

    @classmethod
    def fit(
        cls, samples: Iterable[tuple[StepShape, float]], buckets: Sequence[Bucket]
    ) -> FittedStepTime:
        """Returns a model of all samples alike; pauses among them are left out.

        Raises:
          ValueError: there are fewer samples than a model needs.
        """
        kept = list(samples)
        if len(kept) < cls.READY_AFTER:
            raise ValueError(f"{len(kept)} steps are too few; give at least {cls.READY_AFTER}")
        model = cls(buckets)
        for _ in range(2):
            model._sums[:], model._targets[:], model._counts[:] = 0.0, 0.0, 0.0
            for shape, seconds in kept:
                model._add(model._bucket_of(shape), shape, seconds, decay=1.0)
            model._solve()
            kept = [s for s in kept if s[1] < cls.OUTLIER / 2 * model.predict(s[0])]
        model.num_observations = len(kept)
        for shape, seconds in kept[-cls.WINDOW :]:
            model._note_ratio(shape, seconds)
        return model

    @property
    def is_ready(self) -> bool:
        return self.num_observations >= self.READY_AFTER

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
            self._bucket_s[self._bucket_of(shape)]
            + slopes[0] * shape.context_tokens
            + slopes[1] * shape.attended_pairs
        )
        return max(float(seconds), MIN_STEP_S)

    def predict_decodes(self, num_rows: int, context_tokens: np.ndarray) -> np.ndarray:
        bucket_s = self._bucket_s[self._bucket_of(StepShape(num_rows, num_rows, 0, 0, 0))]
        seconds: np.ndarray = bucket_s + self._slopes[0] * np.asarray(context_tokens, float)
        np.maximum(seconds, MIN_STEP_S, out=seconds)
        return seconds

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learns how long a step took."""
        bucket = self._bucket_of(shape)
        if self.is_ready:
            seconds = min(seconds, self.OUTLIER * self.predict(shape))
            self._note_ratio(shape, seconds)
        self._add(bucket, shape, seconds, self.DECAY)
        self.num_observations += 1
        if self.num_observations % self.SOLVE_EVERY == 0:
            self._solve()
            self._p95_ratio = max(float(np.quantile(self._ratios, 0.95)), 1.0)

    def _note_ratio(self, shape: StepShape, seconds: float) -> None:
        self._ratios[self.num_observations % self.WINDOW] = seconds / self.predict(shape)

    def _bucket_of(self, shape: StepShape) -> int:
        key = (shape.num_tokens, shape.num_rows)
        index = self._index.get(key)
        if index is None:
            fits = any(key[0] <= b.num_tokens and key[1] <= b.num_rows for b in self.buckets)
            bucket = choose_bucket(self.buckets, *key) if fits else self.buckets[-1]
            index = self._index[key] = self.buckets.index(bucket)
        return index

    def _add(self, bucket: int, shape: StepShape, seconds: float, decay: float) -> None:
        # Divided by the seconds, so that it is relative errors that are made small.
        x = self._SCALE * (1.0, shape.context_tokens, shape.attended_pairs) / seconds
        self._sums[bucket] = decay * self._sums[bucket] + x[:, None] * x
        self._targets[bucket] = decay * self._targets[bucket] + x
        self._counts[bucket] = decay * self._counts[bucket] + 1

    def _solve(self) -> None:
        seen = self._sums[:, 0, 0] > 0
        by, sums, targets = self._map[seen], self._sums[seen], self._targets[seen]
        left = np.einsum("bdi,bij,bej->de", by, sums, by)
        right = np.einsum("bdi,bi->d", by, targets)
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
        self._line = solution[:3] / (1.0, 100, 10)
        self._slopes = solution[3:5] * self._SCALE[1:]

    def state(self) -> dict[str, Any]:
        """Returns the model as plain numbers, for `from_state`."""
        return {
            "buckets": [list(bucket) for bucket in self.buckets],
            "bucket_s": self._bucket_s.tolist(),
            "line": self._line.tolist(),
            "slopes": self._slopes.tolist(),
            "num_observations": self.num_observations,
            "p95_ratio": self._p95_ratio,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> FittedStepTime:
        """Returns the model that `state` described. What it learns from now on starts anew."""
        model = cls([Bucket(int(t), int(s), bool(d)) for t, s, d in state["buckets"]])
        model._bucket_s = np.array(state["bucket_s"], float)
        model._line = np.array(state["line"], float)
        model._slopes = np.array(state["slopes"], float)
        model.num_observations = int(state["num_observations"])
        model._p95_ratio = float(state["p95_ratio"])
        return model
