"""Our metrics by the names that vLLM's dashboards and the Kubernetes inference gateway read. Knows
names only: nothing is counted here, all is read from ours when somebody asks.

Sources: docs.vllm.ai, "Production Metrics"; gateway-api-inference-extension, proposal 003 "Model
Server Protocol".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

ENGINE = {"engine": "0"}  # vLLM numbers its data-parallel engines; here there is one

# Theirs, and ours. What has two names has had another one before.
NAMES = {
    "num_requests_running": "requests_running",
    "num_requests_waiting": "requests_waiting",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "e2e_latency_seconds",
    "request_queue_time_seconds": "queue_time_seconds",
    "request_prefill_time_seconds": "prefill_time_seconds",
    "request_decode_time_seconds": "decode_time_seconds",
    "request_inference_time_seconds": "inference_time_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_output_tokens",
    "request_max_num_generation_tokens": "request_output_tokens",
    "prompt_tokens": "prompt_tokens",
    "prompt_tokens_cached": "prefix_cache_hit_tokens",
    "generation_tokens": "output_tokens",
    "prefix_cache_queries": "prefix_cache_query_tokens",
    "prefix_cache_hits": "prefix_cache_hit_tokens",
    "num_preemptions": "preemptions",
    "request_success": "requests_finished",
}
LABELS = {"reason": "finished_reason"}
USAGE_NAMES = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
OTHERS = ("cache_config_info", "iteration_tokens_total")
_PAGES, _STEPS, _STEP_TOKENS = "kv_pages", "step_seconds", "step_tokens"
_SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")


class VllmMetrics(Collector):
    """Reads the metrics of `registry`, in which it may itself be registered.

    `model_name` labels each series. `cache_config` becomes the labels of vllm:cache_config_info;
    readers expect block_size (tokens per page) and num_gpu_blocks (pages) in it.
    """

    def __init__(
        self, registry: CollectorRegistry, model_name: str, cache_config: Mapping[str, object]
    ) -> None:
        names = {
            f"jserve_{name}{suffix}"
            for name in (*NAMES.values(), _PAGES, _STEPS, _STEP_TOKENS)
            for suffix in _SUFFIXES
        }
        self._ours = registry.restricted_registry(names)
        self._labels = {"model_name": model_name} | ENGINE
        self._cache_config = {name: str(value) for name, value in cache_config.items()}

    def collect(self) -> Iterator[Metric]:
        ours = {metric.name.removeprefix("jserve_"): metric for metric in self._ours.collect()}
        for theirs, name in NAMES.items():
            yield self._renamed(ours[name], f"vllm:{theirs}")
        pages = {sample.labels["state"]: sample.value for sample in ours[_PAGES].samples}
        for name in USAGE_NAMES:
            yield self._gauge(
                name,
                "KV pages that live requests hold, as a share of all: 0 to 1.",
                self._labels,
                pages["used"] / max(sum(pages.values()), 1),
            )
        yield self._gauge(
            "cache_config_info", "Sizes of the KV pool.", self._cache_config | ENGINE, 1.0
        )
        yield self._tokens_of_steps(ours)

    def describe(self) -> Iterator[Metric]:
        """Tells the registry which names are taken, without values."""
        for name in (*NAMES, *USAGE_NAMES, *OTHERS):
            yield Metric(f"vllm:{name}", "", "unknown")

    def _renamed(self, ours: Metric, name: str) -> Metric:
        metric = Metric(name, ours.documentation, ours.type)
        for sample in ours.samples:
            labels = {LABELS.get(key, key): value for key, value in sample.labels.items()}
            suffix = sample.name.removeprefix(ours.name)
            metric.add_sample(name + suffix, labels | self._labels, sample.value)
        return metric

    def _tokens_of_steps(self, ours: Mapping[str, Metric]) -> Metric:
        """Sum and count, which is what dashboards divide: buckets would cost every step."""
        count = next(s.value for s in ours[_STEPS].samples if s.name.endswith("_count"))
        tokens = {s.labels["kind"]: s.value for s in ours[_STEP_TOKENS].samples}["real"]
        metric = Metric("vllm:iteration_tokens_total", "Tokens of a step.", "histogram")
        metric.add_sample(f"{metric.name}_bucket", self._labels | {"le": "+Inf"}, count)
        metric.add_sample(f"{metric.name}_count", self._labels, count)
        metric.add_sample(f"{metric.name}_sum", self._labels, tokens)
        return metric

    def _gauge(self, name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=list(labels))
        gauge.add_metric(list(labels.values()), value)
        return gauge
