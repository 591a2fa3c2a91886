"""How many prompt tokens and rows a step may hold. Knows counts and predicted seconds only."""

from __future__ import annotations

from typing import NamedTuple

from scheduler.config import SchedulerConfig
from scheduler.step_shape import StepShape
from scheduler.step_time import StepTime


class StepBudget(NamedTuple):
    prefill_tokens: int
    max_running: int
    reason: str


class StepBudgeter:
    def __init__(self, config: SchedulerConfig, model: StepTime) -> None:
        self._config = config

    def decide(
        self,
        *,
        num_decodes: int,
        num_rows_running: int,
        context_tokens: int,
        prefill_context: int,
        itl_slo_s: float,
        ttft_slack_s: float,
    ) -> StepBudget:
        config = self._config
        return StepBudget(
            config.max_num_batched_tokens - num_decodes, config.max_num_seqs, "fixed limits"
        )

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learns how long a step took."""
