"""The engine's metrics: names, values, and what they cost the step."""

from __future__ import annotations

import timeit

import pytest

from jserve.engine.metrics import FINISH_REASONS, PHASES, EngineMetrics
from jserve.messages import Timings
from scheduler.budget import REASONS

STEP = {
    "schedule_s": 1e-4,
    "pack_s": 1e-4,
    "dispatch_s": 2e-4,
    "wait_s": 0.02,
    "post_s": 1e-4,
    "step_s": 0.021,
    "real_tokens": 5,
    "padded_tokens": 3,
    "predicted_s": 0.018,
    "actual_s": 0.02,
    "prediction_error": 0.1,
}
GAUGES = {
    "running": 3,
    "waiting": 1,
    "waiting_tokens": 500,
    "pages_used": 7,
    "pages_cached": 2,
    "pages_free": 91,
    "live_tokens": 100,
    "overlap_active": True,
}
IDLE = {name: 0 for name in GAUGES} | {"pages_free": 100}
HOST_LIMIT_S = 20e-6


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics()


def value(metrics: EngineMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"jserve_{name}", labels)


def test_every_metric_is_there_from_the_start_at_zero(metrics):
    for name in (
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_latency_seconds"),
        *("queue_time_seconds", "step_seconds"),
    ):
        assert value(metrics, f"{name}_count") == 0
    for name in (
        *("prompt_tokens_total", "output_tokens_total", "requests_running", "requests_waiting"),
        *("live_tokens", "prefix_cache_hit_tokens_total", "prefix_cache_query_tokens_total"),
        *("preemptions_total", "compilations_after_warmup_total", "overlap_active"),
        *("waiting_tokens", "prefix_cache_evicted_pages_total", "step_prediction_error"),
        *("step_predicted_seconds", "step_actual_seconds"),
    ):
        assert value(metrics, name) == 0
    assert all(value(metrics, "requests_finished_total", reason=r) == 0 for r in FINISH_REASONS)
    assert all(value(metrics, "swapped_pages_total", way=way) == 0 for way in ("in", "out"))
    limits = ("requests", "tokens")
    assert all(value(metrics, "requests_refused_total", limit=limit) == 0 for limit in limits)
    assert all(value(metrics, "kv_pages", state=s) == 0 for s in ("used", "cached", "free"))
    assert all(value(metrics, "step_tokens_total", kind=k) == 0 for k in ("real", "padded"))
    assert all(value(metrics, "step_host_seconds_count", phase=p) == 0 for p in PHASES)


def test_a_request_is_counted_once_by_its_reason_with_its_tokens_and_times(metrics):
    metrics.on_first_token(queue_s=0.25, ttft_s=0.5, prompt_tokens=9, cached_tokens=8)
    metrics.on_token_gap(0.125)
    metrics.on_finish("stop", Timings(0.25, 0.5, 0.625, 0.125), 9, 2)
    assert value(metrics, "queue_time_seconds_sum") == 0.25
    assert value(metrics, "time_to_first_token_seconds_sum") == 0.5
    assert value(metrics, "inter_token_latency_seconds_sum") == 0.125
    assert value(metrics, "e2e_latency_seconds_sum") == 0.625
    assert value(metrics, "prefill_time_seconds_sum") == 0.25
    assert value(metrics, "decode_time_seconds_sum") == 0.125
    assert value(metrics, "inference_time_seconds_sum") == 0.375
    assert value(metrics, "request_prompt_tokens_sum") == 9
    assert value(metrics, "request_output_tokens_sum") == 2
    assert value(metrics, "prompt_tokens_total") == value(
        metrics, "prefix_cache_query_tokens_total"
    )
    assert value(metrics, "prompt_tokens_total") == 9
    assert value(metrics, "output_tokens_total") == 2
    assert value(metrics, "prefix_cache_hit_tokens_total") == 8
    counted = {r: value(metrics, "requests_finished_total", reason=r) for r in FINISH_REASONS}
    assert counted == dict.fromkeys(FINISH_REASONS, 0) | {"stop": 1}


def test_what_meets_and_what_misses_a_target_is_counted_by_class_where_there_is_one(metrics):
    def counts(name, kind):
        labels = {"class": name, "kind": kind}
        return tuple(value(metrics, f"slo_{x}_total", **labels) for x in ("attained", "missed"))

    metrics.set_targets({"": (0.0, 0.0), "chat": (0.5, 0.05), "bulk": (0.0, 1.0)})
    assert counts("chat", "ttft") == (0, 0)
    for name in ("", "chat", "bulk"):
        for seconds in (0.5, 0.6):
            metrics.on_first_token(0.0, seconds, 1, 0, name)
        for seconds in (0.01, 0.05, 0.06):
            metrics.on_token_gap(seconds, name)
        metrics.on_no_first_token(name)
    assert counts("chat", "ttft") == (1, 2)
    assert counts("chat", "itl") == (2, 1)
    assert counts("bulk", "itl") == (3, 0)
    assert counts("bulk", "ttft") == counts("", "ttft") == counts("", "itl") == (None, None)


def test_an_unknown_finish_reason_is_no_new_series(metrics):
    with pytest.raises(KeyError):
        metrics.on_finish("tired", Timings(0.0, None, 1.0, None), 1, 0)


def test_a_request_that_never_had_a_token_has_no_prefill_time(metrics):
    metrics.on_finish("abort", Timings(0.5, None, 0.5, None), 9, 0)
    assert value(metrics, "e2e_latency_seconds_count") == 1
    for name in ("prefill", "decode", "inference"):
        assert value(metrics, f"{name}_time_seconds_count") == 0


def test_a_step_records_each_phase_and_both_kinds_of_tokens(metrics):
    metrics.on_step(**STEP)
    for phase in PHASES:
        assert value(metrics, "step_host_seconds_sum", phase=phase) == STEP[f"{phase}_s"]
    assert value(metrics, "step_seconds_sum") == STEP["step_s"]
    assert value(metrics, "step_tokens_total", kind="real") == 5
    assert value(metrics, "step_tokens_total", kind="padded") == 3


def test_gauges_show_the_last_state_and_go_back_to_zero_when_idle(metrics):
    metrics.set_gauges(**GAUGES)
    assert value(metrics, "requests_running") == 3
    assert value(metrics, "kv_pages", state="cached") == 2
    assert value(metrics, "overlap_active") == 1
    metrics.set_gauges(**IDLE)
    for name in ("requests_running", "requests_waiting", "live_tokens", "overlap_active"):
        assert value(metrics, name) == 0
    assert value(metrics, "kv_pages", state="free") == 100


def test_the_limits_of_steps_are_shown_with_the_one_reason_in_force(metrics):
    metrics.set_limits(256, 32, "fixed limits")
    metrics.set_limits(64, 12, "itl target")
    assert value(metrics, "prefill_budget_tokens") == 64
    assert value(metrics, "running_cap") == 12
    shown = {reason: value(metrics, "budget_reason", reason=reason) for reason in REASONS}
    assert shown == dict.fromkeys(REASONS, 0) | {"itl target": 1}


def test_preemptions_by_cause_swaps_evictions_and_compilations_are_counted(metrics):
    metrics.on_preemption("no free page", 2)
    metrics.on_preemption("a more urgent request")
    metrics.on_swap(pages_out=3, pages_in=1)
    metrics.on_eviction(5)
    metrics.on_compilation()
    assert value(metrics, "preemptions_total") == 3
    assert value(metrics, "preemptions_by_cause_total", cause="no free page") == 2
    assert value(metrics, "swapped_pages_total", way="out") == 3
    assert value(metrics, "swapped_pages_total", way="in") == 1
    assert value(metrics, "prefix_cache_evicted_pages_total") == 5
    assert value(metrics, "compilations_after_warmup_total") == 1


def test_two_engines_share_no_metric(metrics):
    metrics.on_compilation()
    assert value(EngineMetrics(), "compilations_after_warmup_total") == 0


def test_latency_buckets_reach_from_1_ms_to_100_s(metrics):
    for edge in ("0.001", "100.0"):
        assert value(metrics, "time_to_first_token_seconds_bucket", le=edge) == 0


def test_a_step_costs_less_than_20_microseconds_of_host_time(metrics):
    def step():
        metrics.on_step(**STEP)
        metrics.set_gauges(**GAUGES)
        metrics.set_limits(256, 32, "itl target")  # with a target, nearly every step

    # The best of many short runs: what the code costs, not what else the machine does.
    assert min(timeit.repeat(step, number=100, repeat=200)) / 100 < HOST_LIMIT_S
