"""What the engine does now, for whoever looks at it: its last steps, who runs, who waits, and how
long tokens took of late. Knows counts, names and times: no tokens, no text, no transport.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

from jserve.engine.metrics import LATENCY_BUCKETS, SLO_KINDS, EngineMetrics
from scheduler.config import SchedulerConfig
from scheduler.request import Request, RequestStatus
from scheduler.scheduler import Scheduler

MAX_STEPS = 512  # that are remembered
MAX_SHOWN = 128  # requests of a snapshot; of those that wait, a quarter
MAX_QUEUES = 32  # pairs of class and tenant that are told apart; the rest count as one
WINDOW_S = 60.0  # of the distributions
READING_GAP_S = 5.0  # by how much a window may be too long
OTHERS = "(others)"

# One step, in this order. Counts of pages and requests are those after it.
STEP_FIELDS = (
    "t_s",  # when its results came, since the engine's start
    "step_s",
    "bucket_tokens",  # decode rows, prefill tokens and padding
    "decode_rows",
    "prefill_tokens",
    "chunks",
    "pages_used",
    "pages_cached",
    "pages_free",
    "running",
    "preemptions",  # that planning it took
    "waiting",  # by class, in the order of `classes`
)
_HISTOGRAMS = {
    "ttft": "jserve_time_to_first_token_seconds",
    "itl": "jserve_inter_token_latency_seconds",
}
_SLO_COUNTERS = ("jserve_slo_attained_total", "jserve_slo_missed_total")


class _Reading(NamedTuple):
    """The latency metrics at one time."""

    at: float
    counts: dict[str, list[float]]  # by kind: observations up to each bucket's bound, and all
    judged: Counter[tuple[str, str, bool]]  # by class, kind, and whether the target was met


class Activity:
    """Remembers steps, and tells what there is. The engine's thread only.

    `on_step` runs between device steps and may cost 5 µs (tests/engine/test_activity.py); all else
    is worked out when somebody looks.
    """

    def __init__(self, scheduler: Scheduler, metrics: EngineMetrics) -> None:
        self._scheduler = scheduler
        self._registry = metrics.registry.restricted_registry(
            [f"{name}_bucket" for name in _HISTOGRAMS.values()] + list(_SLO_COUNTERS)
        )
        self._classes = [*scheduler.config.latency_targets()]
        self._began = time.perf_counter()
        self._started = time.time()  # tells one engine from the next
        self._num_steps = 0
        self._steps: deque[tuple[Any, ...]] = deque(maxlen=MAX_STEPS)
        self._last_step = self._began
        self._next_reading = self._began
        self._readings: deque[_Reading] = deque()

    def on_step(
        self,
        ended: float,
        step_s: float,
        bucket_tokens: int,
        decode_rows: int,
        prefill_tokens: int,
        chunks: int,
        num_preemptions: int,
        stats: dict[str, int],
    ) -> None:
        """Remembers a step. `ended` is a time.perf_counter, `stats` those of StepRecorder."""
        self._num_steps += 1
        self._last_step = ended
        waiting = self._scheduler.waiting.waiting_of
        self._steps.append(
            (
                ended - self._began,
                step_s,
                bucket_tokens,
                decode_rows,
                prefill_tokens,
                chunks,
                stats["pages_used"],
                stats["pages_cached"],
                stats["pages_free"],
                stats["running"],
                num_preemptions,
                [waiting[name] for name in self._classes],
            )
        )
        if ended >= self._next_reading:
            self._read(ended)

    def snapshot(self, since: int, now: float) -> dict[str, Any]:
        """Returns what there is to see, fit for JSON: the steps after number `since`, counted from
        1, and all else as it is. `now` is on the clock of arrival times."""
        at = time.perf_counter()
        if not 0 <= since <= self._num_steps:
            since = 0  # of another engine
        num_new = min(self._num_steps - since, len(self._steps))
        scheduler = self._scheduler
        pool, cache = scheduler.pool, scheduler.cache
        return {
            "started": self._started,
            "now_s": at - self._began,
            "seq": self._num_steps,
            "step_fields": STEP_FIELDS,
            "steps": list(islice(self._steps, len(self._steps) - num_new, None)),
            "classes": self._classes,
            "running": len(scheduler.running),
            "requests": self._requests(now),
            "queue": _queue(scheduler.waiting, now),
            "pages": {
                "used": pool.num_usable - pool.num_free - cache.num_evictable,
                "cached": cache.num_evictable,
                "free": pool.num_free,
            },
            "latency": self._latency(at),
            "limits": _limits(scheduler.config),
            "budget": scheduler.budgeter.last_budget._asdict(),  # of the last step
        }

    def _requests(self, now: float) -> list[dict[str, Any]]:
        """The running requests in order of admission, then those that wait longest."""
        scheduler = self._scheduler
        running = list(islice(scheduler.running, MAX_SHOWN))
        waiting = islice(scheduler.waiting, MAX_SHOWN // 4)
        num_computed = scheduler.slots.num_computed
        return [_shown(r, int(num_computed[r.slot]), now) for r in running] + [
            _shown(r, 0, now) for r in waiting
        ]

    def _latency(self, at: float) -> dict[str, Any]:
        """The distributions of the last WINDOW_S seconds, and how many met their targets."""
        newest = self._read(at)
        if at - self._last_step > WINDOW_S:
            oldest: _Reading | None = newest  # there was nothing
        else:
            old = [r for r in self._readings if r.at <= at - WINDOW_S]
            oldest = old[-1] if old else None
        found: dict[str, Any] = {"window_s": WINDOW_S, "bounds_s": LATENCY_BUCKETS}
        targets = self._scheduler.config.latency_targets()
        for index, kind in enumerate(SLO_KINDS):
            upto = newest.counts[kind]
            if oldest is not None:
                upto = [n - o for n, o in zip(upto, oldest.counts[kind], strict=True)]
            found[kind] = {
                "counts": [int(n - o) for n, o in zip(upto, [0, *upto], strict=False)],
                "targets": [
                    {
                        "class": name,
                        "target_s": target[index],
                        **_judged(newest, oldest, name, kind),
                    }
                    for name, target in targets.items()
                    if target[index]
                ],
            }
        return found

    def _read(self, at: float) -> _Reading:
        """Reads the metrics, and keeps that for later windows if it is time to."""
        counts: dict[str, list[float]] = {}
        judged = Counter[tuple[str, str, bool]]()
        kinds = {name: kind for kind, name in _HISTOGRAMS.items()}
        for family in self._registry.collect():
            if kind := kinds.get(family.name):
                counts[kind] = [sample.value for sample in family.samples]
                continue
            for sample in family.samples:
                key = sample.labels["class"], sample.labels["kind"]
                judged[(*key, sample.name == _SLO_COUNTERS[0])] += int(sample.value)
        reading = _Reading(at, counts, judged)
        if at >= self._next_reading:
            self._next_reading = at + READING_GAP_S
            self._readings.append(reading)
            while len(self._readings) > 1 and self._readings[1].at <= at - WINDOW_S:
                self._readings.popleft()
        return reading


def _judged(newest: _Reading, oldest: _Reading | None, name: str, kind: str) -> dict[str, int]:
    met, missed = (
        newest.judged[name, kind, was_met] - (oldest.judged[name, kind, was_met] if oldest else 0)
        for was_met in (True, False)
    )
    return {"met": met, "missed": missed}


def _shown(request: Request, num_computed: int, now: float) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "class": request.request_class,
        "tenant": request.tenant,
        "priority": request.priority,
        "status": RequestStatus(request.status).name.lower(),
        "prompt_tokens": request.num_prompt_tokens,
        "cached_tokens": request.num_cached_tokens,
        "computed_tokens": num_computed,  # of the prompt, and of what came after
        "output_tokens": request.num_output_tokens,
        "max_tokens": request.sampling.max_tokens,
        "preemptions": request.num_preemptions,
        "age_s": now - request.arrival_time,
    }


def _queue(waiting: Iterable[Request], now: float) -> list[dict[str, Any]]:
    """Those that wait, by class and tenant; the longest queues first."""
    queues: dict[tuple[str, str], dict[str, Any]] = {}
    for request in waiting:
        key = request.request_class, request.tenant
        if key not in queues and len(queues) >= MAX_QUEUES:
            key = request.request_class, OTHERS
        queue = queues.setdefault(
            key, {"class": key[0], "tenant": key[1], "requests": 0, "tokens": 0, "oldest_s": 0.0}
        )
        queue["requests"] += 1
        queue["tokens"] += request.num_prompt_tokens
        queue["oldest_s"] = max(queue["oldest_s"], now - request.arrival_time)
    return sorted(queues.values(), key=lambda queue: -queue["requests"])


def _limits(config: SchedulerConfig) -> dict[str, int | str]:
    return {
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_model_len": config.max_model_len,
        "page_size": config.page_size,
        "num_pages": config.num_pages - 1,
        "policy": config.policy,
    }
