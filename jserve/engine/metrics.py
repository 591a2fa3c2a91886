"""What an engine counts, as Prometheus metrics. Knows numbers: no requests, no steps, no clock.

Every child with labels is resolved once, here: `on_step` and `set_gauges` run between device steps
and may together cost at most 20 µs (tests/engine/test_metrics.py measures them).
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from scheduler.request import FinishReason

PHASES = ("schedule", "pack", "dispatch", "wait", "post")
FINISH_REASONS = tuple(reason.name.lower() for reason in FinishReason)

# Seconds. Few, as each observation walks them.
LATENCY_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0),
)
HOST_BUCKETS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)


class EngineMetrics:
    """The metrics of one engine, in a registry of its own.

    Methods take plain numbers; durations are seconds. Each belongs to one event of the engine:
    `on_first_token` and `on_finish` come once per request whatever was preempted and recomputed,
    and finished requests by reason add up to all requests that the engine accepted.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._define_request_metrics()
        self._define_cache_metrics()
        self._define_step_metrics()

    def _define_request_metrics(self) -> None:
        self._ttft = self._latency("time_to_first_token", "From arrival to the first output token.")
        self._itl = self._latency("inter_token_latency", "Between output tokens of one request.")
        self._e2e = self._latency("e2e_latency", "From arrival to the end of the request.")
        self._queue = self._latency("queue_time", "From arrival to the first step.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answered requests.")
        self._output_tokens = self._counter("output_tokens", "Output tokens.")
        finished = self._counter("requests_finished", "Requests that ended.", ["reason"])
        self._finished = {reason: finished.labels(reason) for reason in FINISH_REASONS}
        self._running = self._gauge("requests_running", "Requests that hold a slot.")
        self._waiting = self._gauge("requests_waiting", "Requests in the queue.")

    def _define_cache_metrics(self) -> None:
        pages = self._gauge(
            "kv_pages", "KV pages by state: used by live requests, cached only, free.", ["state"]
        )
        self._pages_used = pages.labels("used")
        self._pages_cached = pages.labels("cached")
        self._pages_free = pages.labels("free")
        self._live_tokens = self._gauge("live_tokens", "Tokens of running requests in KV pages.")
        self._cache_hits = self._counter(
            "prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache."
        )
        self._cache_queries = self._counter(
            "prefix_cache_query_tokens", "Prompt tokens: hits are a share."
        )
        self._preemptions = self._counter("preemptions", "Requests put back into the queue.")

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
        self._overlap = self._gauge(
            "overlap_active", "1 while a step is scheduled as the one before it runs."
        )

    def on_first_token(
        self, queue_s: float, ttft_s: float, prompt_tokens: int, cached_tokens: int
    ) -> None:
        """Counts a request's prompt, once it is computed, and its first output token.
        `cached_tokens` are those that its first admission found in the prefix cache."""
        self._queue.observe(queue_s)
        self._ttft.observe(ttft_s)
        self._prompt_tokens.inc(prompt_tokens)
        self._cache_queries.inc(prompt_tokens)
        self._cache_hits.inc(cached_tokens)
        self._output_tokens.inc()

    def on_token_gap(self, itl_s: float) -> None:
        """Counts an output token that is not a request's first."""
        self._itl.observe(itl_s)
        self._output_tokens.inc()

    def on_finish(self, reason: str, e2e_s: float) -> None:
        """Counts an ended request, once. `reason` is one of FINISH_REASONS."""
        self._finished[reason].inc()
        self._e2e.observe(e2e_s)

    def on_preemption(self, count: int = 1) -> None:
        self._preemptions.inc(count)

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
    ) -> None:
        """Records one collected step; `padded_tokens` are the bucket's beyond the real ones."""
        schedule, pack, dispatch, wait, post = self._phases
        schedule.observe(schedule_s)
        pack.observe(pack_s)
        dispatch.observe(dispatch_s)
        wait.observe(wait_s)
        post.observe(post_s)
        self._step.observe(step_s)
        self._real_tokens.inc(real_tokens)
        self._padded_tokens.inc(padded_tokens)

    def set_gauges(
        self,
        *,
        running: int,
        waiting: int,
        pages_used: int,
        pages_cached: int,
        pages_free: int,
        live_tokens: int,
        overlap_active: bool,
    ) -> None:
        """Shows the engine's state now. Call it after the last step too: gauges do not decay."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._pages_used.set(pages_used)
        self._pages_cached.set(pages_cached)
        self._pages_free.set(pages_free)
        self._live_tokens.set(live_tokens)
        self._overlap.set(overlap_active)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"jserve_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"jserve_{name}", text, labels, registry=self.registry)

    def _latency(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"jserve_{name}_seconds", text, buckets=LATENCY_BUCKETS, registry=self.registry
        )
