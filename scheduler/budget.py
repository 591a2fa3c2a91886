"""How many prompt tokens a step may hold and how many requests may run, for a target of the time
between tokens. Knows counts and predicted seconds: not requests, not pages."""

from __future__ import annotations

from typing import NamedTuple

from scheduler.config import SchedulerConfig
from scheduler.step_shape import StepShape
from scheduler.step_time import FittedStepTime, StepTime

REASONS = ("fixed limits", "no model yet", "itl target", "floor", "ttft target")
GRANULE = 16  # prompt tokens by which a budget changes
RUNNING_EVERY = 16  # steps between two looks at the running cap
HEADROOM = 0.05  # of the target, that has to be left for the running cap to rise
PATIENCE_S = 1.0  # a TTFT missed by so much doubles the time that a step may take
MOST_PATIENCE = 8.0  # times the ITL target that a late first token may make of it


class StepBudget(NamedTuple):
    """What a step may hold, and why no more: one of REASONS."""

    prefill_tokens: int
    max_running: int
    reason: str


class StepBudgeter:
    """Sizes steps by a model of their time, so that what 95 of 100 take stays within a target."""

    def __init__(self, config: SchedulerConfig, model: StepTime) -> None:
        self.model = model
        self.last_budget = StepBudget(
            config.max_num_batched_tokens, config.max_num_seqs, "fixed limits"
        )
        self._fitted = model if isinstance(model, FittedStepTime) else None  # one that learns
        self._config = config
        self._max_running = config.max_num_seqs
        self._until_running = 0

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
        """Returns the budget of a step.

        Args:
          num_decodes: its decode rows, which have `context_tokens` in all.
          num_rows_running: requests that run.
          prefill_context: tokens that the first prompt to go on has computed already.
          itl_slo_s: the strictest target of those that run; 0: none, the fixed limits hold. While
            nobody decodes they hold for prompts, but no more may run than did last.
          ttft_slack_s: seconds until a prompt misses its target for the first token. When it has,
            the ITL target gives way, the more the later it is.
        """
        config = self._config
        most = config.max_num_batched_tokens - num_decodes
        if itl_slo_s <= 0:
            return self.fixed(num_decodes)
        if self._fitted and not self._fitted.is_ready:
            budget = StepBudget(most, config.max_num_seqs, "no model yet")
        elif not num_decodes:
            self._until_running = 0
            running = max(self._max_running, num_rows_running, 1)
            is_capped = running < config.max_num_seqs
            budget = StepBudget(most, running, "itl target" if is_capped else "fixed limits")
        else:
            itl_s = itl_slo_s
            if ttft_slack_s < 0:
                itl_s *= min(1 - ttft_slack_s / PATIENCE_S, MOST_PATIENCE)
            limit_s = itl_s / self._p95_ratio()
            base = (num_decodes, context_tokens, prefill_context)
            tokens = self._most_tokens(most, limit_s, *base)
            reason = "itl target" if itl_s == itl_slo_s else "ttft target"
            if tokens < config.min_prefill_tokens:
                tokens, reason = min(config.min_prefill_tokens, most), "floor"
            running = self._running_cap(num_decodes, context_tokens, itl_slo_s)
            budget = StepBudget(tokens, max(running, num_rows_running, 1), reason)
        self.last_budget = budget
        return budget

    def fixed(self, num_decodes: int) -> StepBudget:
        """Returns the budget of a step without a target."""
        config = self._config
        most = config.max_num_batched_tokens - num_decodes
        self.last_budget = StepBudget(most, config.max_num_seqs, "fixed limits")
        return self.last_budget

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learns how long a step took, if the model can."""
        if self._fitted:
            self._fitted.observe(shape, seconds)

    def _p95_ratio(self) -> float:
        return self._fitted.p95_ratio if self._fitted else 1.0

    def _most_tokens(
        self, most: int, limit_s: float, decodes: int, context: int, prefill_context: int
    ) -> int:
        """The most prompt tokens, in granules, with which a step is predicted to keep a limit."""

        def fits(granules: int) -> bool:
            count = min(granules * GRANULE, most)
            rows = min(decodes + 1, self._config.max_num_seqs)
            pairs = count * prefill_context + count * (count + 1) // 2
            shape = StepShape(rows, decodes, count, context + prefill_context + count, pairs)
            return self.model.predict(shape) <= limit_s

        low, high = 0, -(-most // GRANULE)
        if fits(high):
            return most
        guess = self.last_budget.prefill_tokens // GRANULE  # the last step's is mostly right
        if 0 < guess < high:
            low, high = (guess, high) if fits(guess) else (0, guess)
            if low and not fits(low + 1):
                return low * GRANULE
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low * GRANULE

    def _running_cap(self, num_decodes: int, context_tokens: int, itl_slo_s: float) -> int:
        """The most rows with which a step that only decodes keeps the target, each with the context
        that the present ones have on average. It rises only as far as leaves some of the target, so
        that it does not go to and fro. A target that one row alone misses caps nothing."""
        self._until_running -= 1
        if self._until_running <= 0:
            self._until_running = RUNNING_EVERY
            limit_s = itl_slo_s / self._p95_ratio()
            each = context_tokens / num_decodes
            rows = self._most_rows(limit_s, each)
            if rows > self._max_running:
                rows = max(self._most_rows((1 - HEADROOM) * limit_s, each), self._max_running)
            self._max_running = rows or self._config.max_num_seqs
        return self._max_running

    def _most_rows(self, limit_s: float, context_of_each: float) -> int:
        low, high = 0, self._config.max_num_seqs + 1
        while high - low > 1:
            rows = (low + high) // 2
            shape = StepShape(rows, rows, 0, int(rows * context_of_each), 0)
            low, high = (rows, high) if self.model.predict(shape) <= limit_s else (low, rows)
        return low
