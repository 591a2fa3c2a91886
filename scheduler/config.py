"""The scheduler's own limits. Knows numbers only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one engine. `num_pages` counts the null page, which is never handed out."""

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int  # most tokens of one prompt in one step
    page_size: int
    num_pages: int
    max_model_len: int
    enable_prefix_cache: bool = True
    policy: str = "priority"  # a key of policy.POLICIES
    max_starvation_s: float = math.inf
    tenant_weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"{self.max_num_batched_tokens=} must hold a token of each of {self.max_num_seqs=}"
            )
        if self.num_pages < 2:
            raise ValueError(f"{self.num_pages=} must be at least 2: the null page and one more")

    @property
    def max_pages_per_seq(self) -> int:
        """J: what a request of max_model_len tokens holds."""
        return -(-self.max_model_len // self.page_size)
