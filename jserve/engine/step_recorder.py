"""What is measured of steps, and who is told: the scheduler, the metrics and the step log. Knows
plans, counts and times: no tokens, no devices."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from jserve.engine.activity import Activity
from jserve.engine.device import StepHandle
from jserve.engine.metrics import EngineMetrics
from jserve.engine.step_log import StepLog
from scheduler.budget import StepBudget
from scheduler.packer import PackedBatch
from scheduler.plan import StepPlan
from scheduler.scheduler import Scheduler

ERROR_DECAY = 0.02  # weight of the newest step in the error of predictions


@dataclass(slots=True)
class StepInFlight:
    """A step on its way, and when each thing was done for it: seconds of time.perf_counter."""

    plan: StepPlan
    batch: PackedBatch
    handle: StepHandle
    num_preemptions: int  # that planning it took
    begun: float
    planned: float
    packed: float
    dispatched: float


class StepRecorder:
    """Hears of each step, and keeps the last ones in `activity`; the engine's thread only.

    A step is taken to last from its dispatch, or the results of the step before it if those came
    later, until its own results: a device runs steps one after the other.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        step_log: StepLog | None,
        *,
        overlap: bool,
    ) -> None:
        self._scheduler = scheduler
        self._metrics = metrics
        self.activity = Activity(scheduler, metrics)
        self._step_log = step_log
        self._overlap = overlap
        self._created = self._last_results = time.perf_counter()
        self._last_end: float | None = None
        self._preemptions = Counter[str]()
        self._num_evicted = 0
        self._budget: StepBudget | None = None
        self._error = 0.0  # of predictions, as a share of what steps took
        metrics.set_targets(scheduler.config.latency_targets())
        self._show_changes()
        self.show_state()

    def stats(self) -> dict[str, int]:
        """What the engine holds right now."""
        scheduler = self._scheduler
        cache, pool = scheduler.cache, scheduler.pool
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "waiting_tokens": scheduler.waiting.num_tokens,
            "pages_used": pool.num_usable - pool.num_free - cache.num_evictable,
            "pages_cached": cache.num_evictable,
            "pages_free": pool.num_free,
            "live_tokens": scheduler.num_live_tokens,
        }

    def show_state(self) -> dict[str, int]:
        """Brings the gauges up to date, and returns what they show."""
        stats = self.stats()
        self._metrics.set_gauges(**stats, overlap_active=self._overlap)
        return stats

    def on_planned(self, plan: StepPlan) -> int:
        """Counts what planning did; returns the preemptions."""
        counts = self._scheduler.preemption.counts
        num_new = counts.total() - self._preemptions.total()
        if num_new:
            for cause, count in (counts - self._preemptions).items():
                self._metrics.on_preemption(cause, count)
            self._preemptions = counts.copy()
        if len(plan.copies_out) or len(plan.copies_in):
            self._metrics.on_swap(len(plan.copies_out), len(plan.copies_in))
        return num_new

    def on_collected(self, step: StepInFlight, asked: float, arrived: float, *, last: bool) -> None:
        """Records a step whose results were asked for, arrived and are taken in. After the `last`
        one for now the engine idles."""
        step_s = arrived - max(step.dispatched, self._last_results)
        self._last_results = arrived
        self._scheduler.on_step_time(step.plan, step_s)
        stats = self.show_state()
        shape = step.plan.shape
        self.activity.on_step(
            *(arrived, step_s, step.batch.bucket.num_tokens, shape.decode_rows),
            *(shape.prefill_tokens, shape.num_rows - shape.decode_rows, step.num_preemptions),
            stats,
        )
        if self._step_log:
            self._log(self._step_log, step, arrived - step_s, step_s, stats)
        self._show_changes()
        self._count(step, step_s, asked, arrived, last=last)

    def _show_changes(self) -> None:
        """Shows what changes in few steps."""
        budget = self._scheduler.budgeter.last_budget
        if budget != self._budget:
            self._metrics.set_limits(*budget)
            self._budget = budget
        num_evicted = self._scheduler.cache.num_evicted
        if num_evicted > self._num_evicted:
            self._metrics.on_eviction(num_evicted - self._num_evicted)
            self._num_evicted = num_evicted

    def _count(
        self, step: StepInFlight, step_s: float, asked: float, arrived: float, *, last: bool
    ) -> None:
        predicted_s = step.plan.predicted_s
        self._error += ERROR_DECAY * (abs(predicted_s / max(step_s, 1e-9) - 1) - self._error)
        end = time.perf_counter()
        began = self._last_end if self._last_end is not None else asked
        self._last_end = None if last else end
        num_tokens = step.batch.num_tokens
        self._metrics.on_step(
            schedule_s=step.planned - step.begun,
            pack_s=step.packed - step.planned,
            dispatch_s=step.dispatched - step.packed,
            wait_s=arrived - asked,
            post_s=end - arrived,
            step_s=end - began,
            real_tokens=num_tokens,
            padded_tokens=step.batch.bucket.num_tokens - num_tokens,
            predicted_s=predicted_s,
            actual_s=step_s,
            prediction_error=self._error,
        )

    def _log(
        self,
        step_log: StepLog,
        step: StepInFlight,
        began: float,
        step_s: float,
        stats: dict[str, int],
    ) -> None:
        shape, bucket = step.plan.shape, step.batch.bucket
        step_log.add(
            (
                began - self._created,
                step_s,
                shape.decode_rows,
                shape.prefill_tokens,
                shape.num_rows - shape.decode_rows,
                shape.context_tokens,
                shape.attended_pairs,
                bucket.num_tokens,
                bucket.num_rows,
                stats["pages_used"],
                stats["pages_cached"],
                stats["waiting"],
                stats["running"],
                step.num_preemptions,
                step.plan.predicted_s,
            )
        )
