"""Predicts how long a step takes. Knows counts and seconds only."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from scheduler.bucket import Bucket
from scheduler.step_shape import StepShape


class StepTime(Protocol):
    """Predicted seconds of steps."""

    def predict(self, shape: StepShape) -> float: ...

    def predict_decodes(self, num_rows: int, context_tokens: np.ndarray) -> np.ndarray: ...


class FittedStepTime:
    """Learns from the steps it observes."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets

    def predict(self, shape: StepShape) -> float:
        return 0.0

    def predict_decodes(self, num_rows: int, context_tokens: np.ndarray) -> np.ndarray:
        return np.zeros(len(context_tokens))
