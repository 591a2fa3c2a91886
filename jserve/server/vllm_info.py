"""What VllmEngine says of model, server and load. Knows the engine's numbers and the messages: no
calls."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from importlib.metadata import version

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from jserve.engine.input_processor import InputProcessor
from jserve.engine.metrics import EngineMetrics
from jserve.server.front import Engine

SERVER_TYPE = "vllm-grpc"  # the protocol's name for whoever speaks it
MIN_INTERVAL_S = 1.0  # between two samples of the throughput

# Labels tell the samples of one metric apart.
_SAMPLES = {
    "jserve_requests_running": "",
    "jserve_requests_waiting": "",
    "jserve_waiting_tokens": "",
    "jserve_live_tokens": "",
    "jserve_kv_pages": "state",
    "jserve_output_tokens_total": "",
    "jserve_prefix_cache_hit_tokens_total": "",
    "jserve_prefix_cache_query_tokens_total": "",
}


def model_info(processor: InputProcessor) -> pb.GetModelInfoResponse:
    limits, tokenizer = processor.limits, processor.tokenizer
    return pb.GetModelInfoResponse(
        model_path=limits.name,
        served_model_name=limits.name,
        is_generation=True,
        max_context_length=limits.max_model_len,
        max_req_input_len=limits.max_model_len - 1,
        vocab_size=limits.vocab_size,
        model_type=limits.model_type,
        architectures=limits.architectures,
        eos_token_ids=limits.eos_token_ids,
        bos_token_id=tokenizer.bos_token_id or 0,
    )


def server_info(engine: Engine, began: float) -> pb.GetServerInfoResponse:
    """`began` is when the server started, in seconds since 1970."""
    limits = engine.processor.limits
    samples = _samples(engine.metrics)
    return pb.GetServerInfoResponse(
        active_requests=_active(samples),
        uptime_seconds=time.time() - began,
        server_type=SERVER_TYPE,
        data_parallel_size=1,
        block_size=limits.page_size,
        max_num_seqs=limits.max_num_seqs,
        constrained_decoding_start="first_token",
    )


class LoadMeter:
    """Reads the load; its throughput is that since an earlier reading."""

    def __init__(self) -> None:
        self._at, self._tokens, self._tokens_per_s = time.monotonic(), 0.0, 0.0

    def read(self, engine: Engine) -> pb.GetLoadsResponse:
        limits, samples = engine.processor.limits, _samples(engine.metrics)
        pages = {state: samples[f"jserve_kv_pages{state}"] for state in ("used", "cached", "free")}
        queried = samples["jserve_prefix_cache_query_tokens_total"]
        hits = samples["jserve_prefix_cache_hit_tokens_total"]
        running, num_pages = int(samples["jserve_requests_running"]), sum(pages.values())
        load = pb.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=int(samples["jserve_requests_waiting"]),
            num_total_reqs=_active(samples),
            num_used_tokens=int(samples["jserve_live_tokens"]),
            max_total_num_tokens=int(num_pages) * limits.page_size,
            token_usage=pages["used"] / num_pages if num_pages else 0.0,
            gen_throughput=self._throughput(samples["jserve_output_tokens_total"]),
            cache_hit_rate=hits / queried if queried else 0.0,
            utilization=running / limits.max_num_seqs if limits.max_num_seqs else 0.0,
            max_running_requests=limits.max_num_seqs,
            num_waiting_uncached_tokens=int(samples["jserve_waiting_tokens"]),
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=version("jserve"),
            dp_rank_count=1,
            loads=[load],
        )

    def _throughput(self, tokens: float) -> float:
        now = time.monotonic()
        if now - self._at >= MIN_INTERVAL_S:
            self._tokens_per_s = (tokens - self._tokens) / (now - self._at)
            self._at, self._tokens = now, tokens
        return self._tokens_per_s


def _active(samples: dict[str, float]) -> int:
    return int(samples["jserve_requests_running"] + samples["jserve_requests_waiting"])


def _samples(metrics: EngineMetrics) -> dict[str, float]:
    """The samples by name and label; only those metrics are collected that have any."""
    found = metrics.registry.restricted_registry(list(_SAMPLES)).collect()
    return {
        sample.name + sample.labels.get(_SAMPLES[sample.name], ""): sample.value
        for metric in found
        for sample in metric.samples
    }
