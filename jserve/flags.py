"""Every engine setting as an absl flag, and back. Knows the settings' names and meanings only.

A flag has the name, type and default of its field in jserve.config; this table adds the help.
Presets are absl flagfiles: --flagfile=configs/interactive_chat.flags.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Sequence
from typing import Any, cast

from absl import flags

from jserve.config import EngineConfig

HELP: dict[str, dict[str, str]] = {
    "model": {
        "model": "smollm2-135m, gemma3-270m, a Hugging Face folder, a .gguf file, an Orbax folder, "
        "or a hub name.",
        "served_model_name": "The name clients use for the model; empty takes --model.",
        "dtype": "float32, bfloat16, or auto: float32 on CPU, bfloat16 elsewhere.",
        "quantization": "w8a8: weights, embedding included, and the activations that they multiply "
        "in int8; none: as --dtype says. docs/quantization.md has what it costs in quality.",
        "max_model_len": "Most tokens of one request, prompt and output; 0: the model's limit.",
        "chat_template": "File with the Jinja template of chats, for models without one, or in "
        "place of theirs; empty: the model's own.",
        "cache_dir": "Where fetched models and compiled programs are kept.",
    },
    "cache": {
        "page_size": "Tokens per KV page, a power of two from 8 to 256; 0: the backend's default.",
        "kv_cache_dtype": "int8 or fp8 pages, half the bytes of bfloat16 ones or less; auto: those "
        "of the model's dtype.",
        "kv_memory_fraction": "Share of the device's free memory for KV pages, below 1; 0: the "
        "backend's default.",
        "kv_memory_bytes": "Bytes per device for KV pages; overrides --kv_memory_fraction.",
        "enable_prefix_cache": "Keep the pages of finished requests for prompts that begin alike.",
        "kv_watermark": "Share of the KV pages that an admission leaves free, below 1.",
        "swap_space_bytes": "Host memory for the KV pages of preempted requests, which return from "
        "there where that is quicker than to recompute them; 0: recompute always.",
    },
    "scheduler": {
        "max_num_seqs": "Most requests that run at once.",
        "max_num_batched_tokens": "Most tokens in one step: one per running request, then prompts.",
        "prefill_chunk": "Most tokens of one prompt in one step.",
        "max_queued_requests": "Requests that may wait; one more gets RESOURCE_EXHAUSTED.",
        "max_queued_tokens": "Prompt tokens that may wait; a request beyond them gets "
        "RESOURCE_EXHAUSTED; 0: no bound.",
        "queue_timeout_s": "Longest wait of a request before it starts; then it gets "
        "DEADLINE_EXCEEDED; 0: no bound.",
        "request_classes": "Classes that requests may name, each with a priority that is added to "
        "the request's, a cap and its own targets, all optional, as in "
        "'interactive:itl_slo_ms=50,ttft_slo_ms=500;batch:priority=10,max_num_seqs=8'.",
        "policy": "Who is admitted next: fcfs; priority (lower first, then arrival); sjf (least "
        "remaining work); fair (the tenant served least); prefix (most cached tokens).",
        "max_starvation_s": "Longest wait before a request comes first under any policy; 0: no "
        "bound.",
        "tenant_weights": "Shares of tenants under --policy=fair, as in gold:4,free:1; others: 1.",
        "batching": "continuous: requests join and leave at every step; static: a group runs until "
        "its last one ends; dynamic: static, but a group that is not full waits for more, at most "
        "--batch_window_ms.",
        "batch_window_ms": "With --batching=dynamic: how long the oldest request waits for others.",
        "prefill_first": "Prompts take a step's tokens before running requests do.",
        "long_prompt_tokens": "Prompts with more tokens to compute are long, and short ones may "
        "pass them; 0: none is.",
        "max_long_prompts": "Long prompts that are prefilled at once.",
        "long_prompt_share": "Share of a step's prompt tokens for long prompts while short ones "
        "wait.",
        "itl_slo_ms": "Target for the time between tokens: steps get only as many prompt tokens, "
        "and as many running requests, as meet it at the 95th percentile; 0: fixed limits.",
        "ttft_slo_ms": "Target for the time to the first token, which bounds how much prefill "
        "--itl_slo_ms may hold back; 0: none.",
        "min_prefill_tokens": "Prompt tokens that a step may have whatever the targets.",
        "overlap": "Schedule a step while the one before it runs on the device.",
    },
    "parallel": {
        "tensor_parallel_size": "Devices that share each layer.",
        "emulated_cpu_devices": "Split the CPU into this many devices, for tests; 0: leave it.",
    },
    "runner": {
        "attention_backend": "xla, mosaic_tpu, mosaic_gpu, or auto: what suits the platform.",
        "layer_loop": "switched, unrolled, scanned, or auto: those of CPU, GPU and TPU.",
        "enable_compilation_cache": "Keep compiled programs in --cache_dir for the next start.",
        "invariant": "Compute each token in the same way, bit for bit, whatever shares its step, "
        "however its prompt is cut, and whether it was cached: slower (docs/sampling.md).",
        "jump_forward": "Append tokens that a grammar forces at once, without a step for each: "
        "always, off, or auto: where that takes the device less time.",
        "logprobs_mode": "raw: log-probabilities of the model's own distribution; processed: of "
        "the one that tokens are drawn from, with penalties, temperature and the rest.",
    },
    "grammar": {
        "max_grammar_bytes": "Largest schema, regex or grammar of a request.",
        "grammar_timeout_s": "Longest that one may take to compile, half of it for a trial; then "
        "its request is refused.",
        "grammar_cache_size": "Compiled grammars that are kept for requests that repeat them.",
    },
    "server": {
        "host": "Address to listen on. One beyond this machine needs --tls_cert and --api_keys, or "
        "--insecure.",
        "port": "gRPC port; 0 draws a free one.",
        "enable_http": "Serve the OpenAI-compatible HTTP API, and the live page.",
        "http_port": "HTTP port, same host; 0 draws a free one.",
        "metrics_port": "Port for Prometheus alone, same host, without keys or TLS; 0: none. "
        "--http_port has /metrics, too.",
        "vllm_metrics": "Export metrics by the names that vLLM's dashboards and the Kubernetes "
        "inference gateway read, too.",
        "drain_timeout_s": "Seconds that running requests may take to finish after SIGTERM.",
        "step_timeout_s": "Seconds after which a device step counts as stuck, and health turns to "
        "NOT_SERVING; 0: none does.",
        "max_message_bytes": "Largest request message; a longer one gets RESOURCE_EXHAUSTED, or "
        "413.",
        "max_header_bytes": "Largest head of an HTTP request, or metadata of a gRPC call.",
        "max_open_streams": "Calls at once; one more gets RESOURCE_EXHAUSTED, or 429.",
        "max_unread_updates": "Updates of a choice that may wait for a reader; then its request "
        "is aborted.",
        "enable_cache_service": "Serve jserve.v1.CacheService: reset of the prefix cache, and its "
        "events, which show the tokens of every prompt to whoever can connect.",
        "access_log": "File to which each call adds one line of JSON, without any prompt; -: "
        "standard output; empty: none.",
        "otlp_endpoint": "OpenTelemetry collector that gets a span of each request, such as "
        "http://localhost:4318 (needs the extra jserve[otel]); empty: none.",
        "profile_dir": "Folder for the traces of /debug/profile; empty: it is refused.",
    },
    "security": {
        "insecure": "Listen on addresses beyond this machine without TLS and keys.",
        "api_keys": "File with the hashes of API keys and what each may do, read again when it "
        "changes (docs/security.md); empty: anyone who can connect may call.",
        "tls_cert": "PEM file with the server's certificate chain, read again when it changes; "
        "empty: no TLS.",
        "tls_key": "PEM file with its private key.",
        "allowed_origins": "Sites whose pages may call the HTTP API from a browser, as in "
        "https://app.example,http://localhost:3000; *: all; empty: none.",
        "tls_client_ca": "PEM file with the authorities whose certificates callers must have; "
        "empty: they need none.",
    },
    "log": {
        "step_log": "File for one record per step, replaced at each start; empty: none.",
        "request_log": "File to which each ended request adds one record; empty: none.",
        "request_log_prompts": "Write the prompts' token ids to --request_log.",
    },
}
SECTIONS = tuple(HELP)


def define_flags(
    sections: Sequence[str] = SECTIONS, flag_values: flags.FlagValues = flags.FLAGS
) -> None:
    """Defines the flags of the named sections of EngineConfig; those already there are left.

    No setting may be negative, so each number has 0 as its lower bound.
    """
    for section in sections:
        settings = typing.get_type_hints(EngineConfig)[section]
        kinds = typing.get_type_hints(settings)
        for field in dataclasses.fields(settings):
            if field.name in flag_values:
                continue
            kind, arguments = kinds[field.name], (field.name, cast(Any, field.default))
            options: dict[str, Any] = {
                "help": HELP[section][field.name],
                "flag_values": flag_values,
            }
            if kind is bool:
                flags.DEFINE_boolean(*arguments, **options)
            elif kind is int:
                flags.DEFINE_integer(*arguments, **options, lower_bound=0)
            elif kind is float:
                flags.DEFINE_float(*arguments, **options, lower_bound=0.0)
            else:
                flags.DEFINE_string(*arguments, **options)


def config_from_flags(flag_values: flags.FlagValues = flags.FLAGS) -> EngineConfig:
    """Returns the settings that the parsed flags say; sections without flags keep their defaults.

    Raises:
      ConfigError: the settings contradict each other.
    """
    sections = {}
    for section in SECTIONS:
        settings = typing.get_type_hints(EngineConfig)[section]
        names = [f.name for f in dataclasses.fields(settings) if f.name in flag_values]
        sections[section] = settings(**{name: flag_values[name].value for name in names})
    return EngineConfig(**sections)


def list_in_help(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Makes --help list every jserve flag defined so far; absl lists the script's own only."""
    for module, defined in flag_values.flags_by_module_dict().items():
        if module.startswith("jserve."):
            for flag in defined:
                flag_values.register_key_flag_for_module(sys.argv[0], flag)
