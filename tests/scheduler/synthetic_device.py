"""A device that exists only as costs: a staircase by bucket, context and pairs, with noise and
pauses. Its buckets depart from a straight line, as real ones do."""

from __future__ import annotations

import numpy as np

from scheduler.bucket import choose_bucket, make_buckets
from scheduler.step_shape import StepShape

BUCKETS = make_buckets(64, 1024)
PAUSE_S = 0.25


class SyntheticDevice:
    """Takes `slowdown` times the seconds that a step costs, and some more or less of it."""

    def __init__(self, noise: float = 0.03, pauses: float = 0.0, seed: int = 0) -> None:
        self.noise, self.pauses, self.slowdown = noise, pauses, 1.0
        self._rng = np.random.default_rng(seed)
        own = np.random.default_rng(5).uniform(0.85, 1.15, len(BUCKETS))
        self._own = dict(zip(BUCKETS, own.tolist(), strict=True))

    def seconds(self, shape: StepShape) -> float:
        """What the step costs without noise or pause."""
        bucket = choose_bucket(BUCKETS, shape.num_tokens, shape.num_rows)
        tokens = 0 if bucket.decode_only else bucket.num_tokens
        bucket_s = (2e-3 + 20e-6 * tokens + 15e-6 * bucket.num_rows) * self._own[bucket]
        read_s = 30e-9 * shape.context_tokens + 0.2e-9 * shape.attended_pairs
        return self.slowdown * (bucket_s + read_s)

    def run(self, shape: StepShape) -> float:
        """How long the step takes this time."""
        pause_s = PAUSE_S if self._rng.random() < self.pauses else 0.0
        return self.seconds(shape) * self._rng.lognormal(0, self.noise) + pause_s


def step_of(decodes: int, prefill: int = 0, context: int = 0, computed: int = 0) -> StepShape:
    """Decode rows with `context` tokens in all, and a chunk of a prompt with `computed` ones."""
    if not prefill:
        return StepShape(decodes, decodes, 0, context, 0)
    pairs = prefill * computed + prefill * (prefill + 1) // 2
    return StepShape(decodes + 1, decodes, prefill, context + computed + prefill, pairs)


def mixed_steps(num: int, seed: int, decode_share: float = 0.5) -> list[StepShape]:
    """Steps of every kind: few rows and many, short contexts and long."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(num):
        decodes = int(2 ** rng.uniform(0, 6)) - 1
        context = decodes * int(rng.integers(50, 2000))
        if decodes and rng.random() < decode_share:
            steps.append(step_of(decodes, 0, context))
        else:
            steps.append(
                step_of(decodes, int(2 ** rng.uniform(1, 9.9)), context, int(rng.integers(0, 1500)))
            )
    return steps
