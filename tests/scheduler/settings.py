"""What the scheduler's random traffic may be set to: small pools, so that they are tight."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np

from scheduler.config import RequestClass
from scheduler.policy import POLICIES
from scheduler.step_shape import StepShape

PAGE = 4
CLASSES = (
    RequestClass(name="interactive", itl_slo_s=0.05, ttft_slo_s=0.3),
    RequestClass(name="batch", priority=3, max_num_seqs=2),
)
STOP = frozenset({5, 6})
LIMITS = st.fixed_dictionaries(
    {
        "num_pages": st.integers(10, 22),
        "max_num_seqs": st.integers(2, 6),
        "prefill_chunk": st.integers(1, 20),
        "budget_extra": st.integers(0, 24),
        "enable_prefix_cache": st.booleans(),
        "policy": st.sampled_from([*sorted(POLICIES), "priority"]),
        "batching": st.sampled_from(["continuous"] * 4 + ["static", "dynamic"]),
        "prefill_first": st.booleans(),
        "long_prompt_tokens": st.sampled_from([0, 8]),
        "max_starvation_s": st.sampled_from([math.inf, 0.2]),
        "num_host_pages": st.sampled_from([40, 40, 4, 0]),
        "watermark": st.sampled_from([0.0, 0.1]),
    }
)


class PerToken:
    """A step takes a second per prompt token: what swapping is compared with."""

    def predict(self, shape: StepShape) -> float:
        return 0.001 + float(shape.prefill_tokens)

    def predict_decodes(self, num_rows: int, context_tokens: np.ndarray) -> np.ndarray:
        return np.full(len(context_tokens), 0.001)
