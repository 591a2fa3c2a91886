"""What an engine counts, as Prometheus metrics. Knows numbers: no requests, no steps, no clock.

Every child with labels is resolved once, here, and gauges that change with each step are read when
somebody looks: `on_step` and `set_gauges` run between device steps and may together cost at most
20 µs (tests/engine/test_metrics.py measures them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from jserve.messages import Timings
from scheduler.budget import REASONS
from scheduler.request import FinishReason

PHASES = ("schedule", "pack", "dispatch", "wait", "post")
FINISH_REASONS = tuple(reason.name.lower() for reason in FinishReason)

# Seconds. Few, as each observation walks them.
LATENCY_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0),
)
TOKEN_BUCKETS = tuple(scale * 10**i for i in range(5) for scale in (1, 2, 5))
SLO_KINDS = ("ttft", "itl")
HOST_BUCKETS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)


class _Slo(NamedTuple):
    """A target, and the counters of what met it and what missed it."""

    target_s: float
    attained: Counter
    missed: Counter

    def judge(self, seconds: float) -> None:
        (self.attained if seconds <= self.target_s else self.missed).inc()


class EngineMetrics:
    """The metrics of one engine, in a registry of its own.

    Methods take plain numbers; durations are seconds. Each belongs to one event of the engine:
    `on_first_token` and `on_finish` come once per request whatever was preempted and recomputed,
    and finished requests by reason add up to all requests that the engine accepted.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._shown: dict[str, float] = {}  # of gauges made by `_shows`
        self._define_request_metrics()
        self._define_queue_metrics()
        self._define_cache_metrics()
        self._define_step_metrics()
        self._define_prediction_metrics()
        self._define_fault_metrics()

    def _define_request_metrics(self) -> None:
        self._ttft = self._latency("time_to_first_token", "From arrival to the first output token.")
        self._itl = self._latency("inter_token_latency", "Between output tokens of one request.")
        self._e2e = self._latency("e2e_latency", "From arrival to the end of the request.")
        self._queue = self._latency("queue_time", "From arrival to the first step.")
        self._prefill = self._latency("prefill_time", "From the first step to the first token.")
        self._decode = self._latency("decode_time", "From the first token to the end.")
        self._inference = self._latency("inference_time", "From the first step to the end.")
        self._prompt_lengths = self._lengths("request_prompt_tokens", "Of ended requests.")
        self._output_lengths = self._lengths("request_output_tokens", "Of ended requests.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests.")
        self._output_tokens = self._counter("output_tokens", "Output tokens.")
        self._forced_tokens = self._counter(
            "forced_tokens", "Output tokens that a grammar forced, which took no step of their own."
        )
        finished = self._counter(
            "requests_finished", "Choices that ended, n per request.", ["reason"]
        )
        self._finished = {reason: finished.labels(reason) for reason in FINISH_REASONS}

    def _define_queue_metrics(self) -> None:
        self._ready = self._gauge("ready", "1 while requests are taken.")
        self._shows("running", self._gauge("requests_running", "Requests that hold a slot."))
        self._shows("waiting", self._gauge("requests_waiting", "Requests in the queue."))
        self._shows("waiting_tokens", self._gauge("waiting_tokens", "Prompt tokens in the queue."))
        refused = self._counter(
            "requests_refused", "Requests beyond a limit of the queue.", ["limit"]
        )
        self._quota_refusals = self._counter(
            "quota_refusals", "Requests of callers who had used up their share."
        )
        self._refused = {limit: refused.labels(limit) for limit in ("requests", "tokens")}
        self._preemptions = self._counter("preemptions", "Requests put back into the queue.")
        self._preemptions_by_cause = self._counter(
            "preemptions_by_cause", "The same, by what they made room for.", ["cause"]
        )
        what = "First tokens (ttft) and gaps between tokens (itl) that"
        self._attained = self._counter(
            "slo_attained", f"{what} met their target.", ["class", "kind"]
        )
        self._missed = self._counter("slo_missed", f"{what} came late.", ["class", "kind"])
        self._slos: dict[str, dict[str, _Slo]] = {kind: {} for kind in SLO_KINDS}

    def _define_cache_metrics(self) -> None:
        pages = self._gauge(
            "kv_pages", "KV pages by state: used by live requests, cached only, free.", ["state"]
        )
        for state in ("used", "cached", "free"):
            self._shows(f"pages_{state}", pages.labels(state))
        live_tokens = self._gauge("live_tokens", "Tokens of running requests in KV pages.")
        self._shows("live_tokens", live_tokens)
        self._cache_hits = self._counter(
            "prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache."
        )
        self._cache_queries = self._counter(
            "prefix_cache_query_tokens", "Prompt tokens: hits are a share."
        )
        self._evictions = self._counter(
            "prefix_cache_evicted_pages", "Cached pages given up for others."
        )
        swapped = self._counter("swapped_pages", "KV pages copied to and from the host.", ["way"])
        self._swapped_out, self._swapped_in = swapped.labels("out"), swapped.labels("in")

    def _define_step_metrics(self) -> None:
        tokens = self._counter(
            "step_tokens", "Tokens in steps: real ones, and padding up to the bucket.", ["kind"]
        )
        self._real_tokens, self._padded_tokens = tokens.labels("real"), tokens.labels("padded")
        host = Histogram(
            "jserve_step_host_seconds",
            "Host time per step and phase.",
            ["phase"],
            buckets=HOST_BUCKETS,
            registry=self.registry,
        )
        self._phases = tuple(host.labels(phase) for phase in PHASES)
        self._step = Histogram(
            "jserve_step_seconds",
            "From one step's results to the next one's.",
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        self._compilations = self._counter(
            "compilations_after_warmup", "Programs compiled while serving; anything but 0 is a bug."
        )
        what = "1 while a step is scheduled as the one before it runs."
        self._shows("overlap_active", self._gauge("overlap_active", what))

    def _define_prediction_metrics(self) -> None:
        for name, what in (
            ("step_predicted_seconds", "Of the last step, as expected."),
            ("step_actual_seconds", "Of the last step, as measured."),
            ("step_prediction_error", "By what share predicted steps were off, lately."),
        ):
            self._shows(name, self._gauge(name, what))
        self._prefill_budget = self._gauge(
            "prefill_budget_tokens", "Prompt tokens that the last step might have held."
        )
        self._running_cap = self._gauge("running_cap", "Requests that may run at once.")
        reasons = self._gauge(
            "budget_reason", "1 for what sets prefill_budget_tokens and running_cap.", ["reason"]
        )
        self._reasons = {reason: reasons.labels(reason) for reason in REASONS}

    def _define_fault_metrics(self) -> None:
        self._step_failures = self._counter(
            "step_failures", "Steps that the device did not compute; what ran started again."
        )
        self._stuck_steps = self._counter("stuck_steps", "Steps that took longer than the limit.")
        self._slow_readers = self._counter(
            "slow_readers", "Requests ended because their reader left too much unread."
        )

    def set_targets(self, targets: Mapping[str, tuple[float, float]]) -> None:
        """Takes each class's targets for the first token and for the gaps, in seconds; 0: none."""
        for name, seconds in targets.items():
            for kind, target_s in zip(SLO_KINDS, seconds, strict=True):
                if target_s:
                    counters = (c.labels(name, kind) for c in (self._attained, self._missed))
                    self._slos[kind][name] = _Slo(target_s, *counters)

    def show_ready(self, is_ready: Callable[[], bool]) -> None:
        """Asks `is_ready` whenever somebody reads the metrics, from their thread."""
        self._ready.set_function(is_ready)

    def on_first_token(
        self,
        queue_s: float,
        ttft_s: float,
        prompt_tokens: int,
        cached_tokens: int,
        request_class: str = "",
        *,
        num_tokens: int = 1,
    ) -> None:
        """Counts a request's prompt, once it is computed, and its first output token; an embedding,
        of 0 tokens, is as good as one.
        `cached_tokens` are those that its first admission found in the prefix cache."""
        self._queue.observe(queue_s)
        self._ttft.observe(ttft_s)
        self._prompt_tokens.inc(prompt_tokens)
        self._cache_queries.inc(prompt_tokens)
        self._cache_hits.inc(cached_tokens)
        self._output_tokens.inc(num_tokens)
        if slo := self._slos["ttft"].get(request_class):
            slo.judge(ttft_s)

    def on_no_first_token(self, request_class: str) -> None:
        """Hears of a request whose deadline passed before its first token: a target missed."""
        if slo := self._slos["ttft"].get(request_class):
            slo.missed.inc()

    def on_token_gap(self, itl_s: float, request_class: str = "") -> None:
        """Counts an output token that is not a request's first."""
        self._itl.observe(itl_s)
        self._output_tokens.inc()
        if slo := self._slos["itl"].get(request_class):
            slo.judge(itl_s)

    def on_forced_tokens(self, count: int) -> None:
        """Counts output tokens that took no step: those that a grammar forced."""
        self._output_tokens.inc(count)
        self._forced_tokens.inc(count)

    def on_finish(
        self, reason: str, timings: Timings, prompt_tokens: int, output_tokens: int
    ) -> None:
        """Counts an ended choice, once. `reason` is one of FINISH_REASONS."""
        self._finished[reason].inc()
        self._e2e.observe(timings.e2e_s)
        self._prompt_lengths.observe(prompt_tokens)
        self._output_lengths.observe(output_tokens)
        if timings.ttft_s is not None:
            self._prefill.observe(timings.ttft_s - timings.queue_s)
            self._decode.observe(timings.e2e_s - timings.ttft_s)
            self._inference.observe(timings.e2e_s - timings.queue_s)

    def on_refusal(self, limit: str) -> None:
        """Counts a request that found no room, by the limit: requests or tokens."""
        self._refused[limit].inc()

    def on_quota_refusal(self) -> None:
        self._quota_refusals.inc()

    def on_preemption(self, cause: str, count: int = 1) -> None:
        self._preemptions.inc(count)
        self._preemptions_by_cause.labels(cause).inc(count)

    def on_swap(self, pages_out: int, pages_in: int) -> None:
        self._swapped_out.inc(pages_out)
        self._swapped_in.inc(pages_in)

    def on_eviction(self, num_pages: int) -> None:
        self._evictions.inc(num_pages)

    def on_compilation(self) -> None:
        self._compilations.inc()

    def on_step(
        self,
        *,
        schedule_s: float,
        pack_s: float,
        dispatch_s: float,
        wait_s: float,
        post_s: float,
        step_s: float,
        real_tokens: int,
        padded_tokens: int,
        predicted_s: float,
        actual_s: float,
        prediction_error: float,
    ) -> None:
        """Records one collected step; `padded_tokens` are the bucket's beyond the real ones. On the
        device it was expected to take `predicted_s` and took `actual_s`."""
        schedule, pack, dispatch, wait, post = self._phases
        schedule.observe(schedule_s)
        pack.observe(pack_s)
        dispatch.observe(dispatch_s)
        wait.observe(wait_s)
        post.observe(post_s)
        self._step.observe(step_s)
        self._real_tokens.inc(real_tokens)
        self._padded_tokens.inc(padded_tokens)
        shown = self._shown
        shown["step_predicted_seconds"] = predicted_s
        shown["step_actual_seconds"] = actual_s
        shown["step_prediction_error"] = prediction_error

    def on_step_failure(self) -> None:
        self._step_failures.inc()

    def on_stuck_step(self) -> None:
        self._stuck_steps.inc()

    def on_slow_reader(self) -> None:
        self._slow_readers.inc()

    def set_limits(self, prefill_tokens: int, max_running: int, reason: str) -> None:
        """Shows what steps may hold now, and why no more: one of scheduler.budget.REASONS."""
        self._prefill_budget.set(prefill_tokens)
        self._running_cap.set(max_running)
        for name, gauge in self._reasons.items():
            gauge.set(name == reason)

    def set_gauges(self, **state: float) -> None:
        """Shows the engine's state now: running, waiting, waiting_tokens, pages_used, pages_cached,
        pages_free, live_tokens and overlap_active. Call it after the last step too: gauges do not
        decay."""
        self._shown.update(state)

    def _shows(self, name: str, gauge: Gauge) -> None:
        """Lets a gauge show what `_shown` has under a name when it is looked at."""
        self._shown[name] = 0.0
        gauge.set_function(partial(self._shown.__getitem__, name))

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"jserve_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"jserve_{name}", text, labels, registry=self.registry)

    def _lengths(self, name: str, text: str) -> Histogram:
        return Histogram(f"jserve_{name}", text, buckets=TOKEN_BUCKETS, registry=self.registry)

    def _latency(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"jserve_{name}_seconds", text, buckets=LATENCY_BUCKETS, registry=self.registry
        )
