"""Our metrics by vLLM's names, as scrapers read them."""

from __future__ import annotations

import math

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jserve.engine.metrics import EngineMetrics
from jserve.engine.vllm_metrics import VllmMetrics
from jserve.messages import Timings

LABELS = {"model_name": "tiny", "engine": "0"}
HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("time_per_output_token_seconds", "request_queue_time_seconds", "request_prompt_tokens"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_generation_tokens"),
    *("request_inference_time_seconds", "request_max_num_generation_tokens"),
)


@pytest.fixture
def metrics() -> EngineMetrics:
    metrics = EngineMetrics()
    cache = {"block_size": 16, "num_gpu_blocks": 100, "cache_dtype": "float32"}
    metrics.registry.register(VllmMetrics(metrics.registry, "tiny", cache))
    return metrics


def families(metrics: EngineMetrics) -> dict[str, str]:
    """Names and types of a scrape."""
    scraped = generate_latest(metrics.registry).decode()
    return {family.name: family.type for family in text_string_to_metric_families(scraped)}


def value(metrics: EngineMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"vllm:{name}", LABELS | labels)


def test_a_scrape_shows_both_names_and_vllms_types(metrics):
    found = families(metrics)
    assert found["jserve_requests_running"] == found["vllm:num_requests_running"] == "gauge"
    gauges = ("num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc")
    assert all(found[f"vllm:{name}"] == "gauge" for name in (*gauges, "cache_config_info"))
    assert all(found[f"vllm:{name}"] == "histogram" for name in HISTOGRAMS)
    counters = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")
    more = ("num_preemptions", "request_success", "prompt_tokens_cached")
    assert all(found[f"vllm:{name}"] == "counter" for name in (*counters, *more))


def test_a_request_is_told_by_both_names(metrics):
    metrics.on_first_token(queue_s=0.25, ttft_s=0.5, prompt_tokens=9, cached_tokens=8)
    metrics.on_token_gap(0.125)
    metrics.on_finish("length", Timings(0.25, 0.5, 0.625, 0.125), 9, 2)
    metrics.on_preemption("decode", 3)
    sums = {name: value(metrics, f"{name}_sum") for name in HISTOGRAMS}
    assert sums == {
        "time_to_first_token_seconds": 0.5,
        "inter_token_latency_seconds": 0.125,
        "time_per_output_token_seconds": 0.125,
        "e2e_request_latency_seconds": 0.625,
        "request_queue_time_seconds": 0.25,
        "request_prefill_time_seconds": 0.25,
        "request_decode_time_seconds": 0.125,
        "request_inference_time_seconds": 0.375,
        "request_prompt_tokens": 9,
        "request_generation_tokens": 2,
        "request_max_num_generation_tokens": 2,
    }
    assert value(metrics, "time_to_first_token_seconds_bucket", le="0.5") == 1
    assert value(metrics, "time_to_first_token_seconds_bucket", le="0.2") == 0
    assert value(metrics, "prompt_tokens_total") == value(metrics, "prefix_cache_queries_total")
    assert value(metrics, "prefix_cache_hits_total") == 8
    assert value(metrics, "generation_tokens_total") == 2
    assert value(metrics, "num_preemptions_total") == 3
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert value(metrics, "request_success_total", finished_reason="abort") == 0


def test_O96_usage_is_the_share_of_pages_that_live_requests_hold(metrics):
    def set_pages(used, cached, free):
        rest = dict.fromkeys(("waiting_tokens", "live_tokens"), 0)
        pages = {"pages_used": used, "pages_cached": cached, "pages_free": free}
        metrics.set_gauges(running=2, waiting=5, overlap_active=True, **pages, **rest)

    set_pages(25, 40, 35)
    for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
        assert math.isclose(value(metrics, name), 0.25)
    assert value(metrics, "num_requests_running") == 2
    assert value(metrics, "num_requests_waiting") == 5
    set_pages(0, 40, 60)  # cached pages are there for whoever comes
    assert value(metrics, "kv_cache_usage_perc") == 0


def test_tokens_per_step_are_a_sum_and_a_count(metrics):
    for real_tokens in (5, 8):
        times = dict.fromkeys(("schedule_s", "pack_s", "dispatch_s", "wait_s", "post_s"), 0.001)
        more = {"predicted_s": 0.01, "actual_s": 0.01, "prediction_error": 0.0}
        metrics.on_step(**times, **more, step_s=0.01, real_tokens=real_tokens, padded_tokens=3)
    assert families(metrics)["vllm:iteration_tokens_total"] == "histogram"
    found = [value(metrics, f"iteration_tokens_total_{name}") for name in ("sum", "count")]
    assert found == [13, 2]
    assert value(metrics, "iteration_tokens_total_bucket", le="+Inf") == 2


def test_a_scheduler_of_clusters_finds_the_pools_size_in_labels(metrics):
    cache = {"block_size": "16", "num_gpu_blocks": "100", "cache_dtype": "float32"}
    labels = cache | {"engine": "0"}
    assert metrics.registry.get_sample_value("vllm:cache_config_info", labels) == 1


def test_a_name_can_be_asked_for_alone(metrics):
    one = metrics.registry.restricted_registry(["vllm:num_requests_waiting"])
    assert [metric.name for metric in one.collect()] == ["vllm:num_requests_waiting"]
