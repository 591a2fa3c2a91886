"""Every setting of an engine, composed and frozen. Knows defaults and contradictions, no device."""

from __future__ import annotations

import ipaddress
import math
import re
import socket
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jserve.errors import ConfigError
from scheduler.config import BATCHINGS, POLICY_NAMES, RequestClass, SchedulerConfig

MAX_PORT = 65_535
CLASS_FIELDS = ("priority", "max_num_seqs", "itl_slo_ms", "ttft_slo_ms")
CHOICES: dict[str, dict[str, tuple[str, ...]]] = {  # of settings that are one of few words
    "model": {"dtype": ("auto", "float32", "bfloat16"), "quantization": ("none", "w8a8")},
    "cache": {"kv_cache_dtype": ("auto", "int8", "fp8")},
    "scheduler": {"policy": POLICY_NAMES, "batching": BATCHINGS},
    "runner": {
        "jump_forward": ("auto", "always", "off"),
        "logprobs_mode": ("raw", "processed"),
    },
}
DEFAULT_CACHE_DIR = str(Path.home() / ".cache" / "jserve")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    model: str = "smollm2-135m"  # known name, folder, .gguf file, Orbax folder or hub name
    served_model_name: str = ""  # name clients use; "" takes `model`
    dtype: str = "auto"  # "auto": float32 on CPU, bfloat16 elsewhere
    quantization: str = "none"  # "w8a8": matrices and what they multiply in int8
    max_model_len: int = 0  # 0: the model's own limit
    chat_template: str = ""  # file with a Jinja template; "": the model's own
    cache_dir: str = DEFAULT_CACHE_DIR  # fetched models and compiled programs


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    page_size: int = 0  # tokens per page; 0: the backend's default
    kv_cache_dtype: str = "auto"  # "auto": the model's; "int8", "fp8"
    kv_memory_fraction: float = 0.0  # of the device's free memory; 0: the backend's default
    kv_memory_bytes: int = 0  # per device; overrides the fraction when not 0
    enable_prefix_cache: bool = True
    kv_watermark: float = 0.0  # share of the pages that an admission leaves free
    swap_space_bytes: int = 0  # host memory for the pages of preempted requests; 0: recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    prefill_chunk: int = 256  # most tokens of one prompt in one step; the rest is for others
    max_queued_requests: int = 1024
    max_queued_tokens: int = 0  # prompt tokens that may wait; 0: no bound
    queue_timeout_s: float = 0.0  # longest wait before a request starts; 0: no bound
    request_classes: str = ""  # "interactive:itl_slo_ms=50;batch:priority=10,max_num_seqs=8"
    policy: str = "priority"  # who is admitted next: fcfs, priority, sjf, fair, prefix
    max_starvation_s: float = 0.0  # longest wait before a request comes first; 0: no bound
    tenant_weights: str = ""  # "name:2,other:0.5", shares of policy fair; 1 for the rest
    batching: str = "continuous"  # or "dynamic", "static"
    batch_window_ms: float = 50.0  # of dynamic batching: how long a group may take to fill
    prefill_first: bool = False  # prompts before decode rows
    long_prompt_tokens: int = 0  # prompts with more tokens to compute are long; 0: none is
    max_long_prompts: int = 1  # that are prefilled at once
    long_prompt_share: float = 0.5  # of a step's prefill budget, while short prompts want it too
    itl_slo_ms: float = 0.0  # target for the time between tokens; 0: none
    ttft_slo_ms: float = 0.0  # target for the time to the first token; 0: none
    min_prefill_tokens: int = 16  # of a step, whatever the targets
    overlap: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    tensor_parallel_size: int = 1
    emulated_cpu_devices: int = 0  # 0: leave the platform's device count alone


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    attention_backend: str = "auto"  # "xla", "mosaic_tpu", "mosaic_gpu"
    layer_loop: str = "auto"  # "switched" (CPU), "unrolled" (GPU), "scanned" (TPU)
    enable_compilation_cache: bool = True
    invariant: bool = False  # tokens and log-probabilities depend on nothing but their sequence
    jump_forward: str = "auto"  # steps saved where a grammar forces tokens: "always", "off"
    logprobs_mode: str = "raw"  # of the model's logits; "processed": of what is drawn from


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSettings:
    max_grammar_bytes: int = 2**17  # of one schema, regex or grammar
    grammar_timeout_s: float = 1.5  # longest that one may take to compile
    grammar_cache_size: int = 64  # compiled ones that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 50051
    enable_http: bool = True
    http_port: int = 8000
    metrics_port: int = 0  # 0: no Prometheus endpoint of its own beside /metrics
    vllm_metrics: bool = False  # the names that vLLM's dashboards read, too
    drain_timeout_s: float = 30.0
    step_timeout_s: float = 60.0  # a longer one: the device does not answer; 0: no limit
    max_message_bytes: int = 4 * 2**20
    max_header_bytes: int = 2**14
    max_open_streams: int = 4096  # calls at once, of all callers
    max_unread_updates: int = 4096  # of a choice, whose reader is then given up
    enable_cache_service: bool = False  # reset and KV events, for operators and routers
    access_log: str = ""  # file with a record per call; "-": standard output; "": none
    otlp_endpoint: str = ""  # OpenTelemetry collector that gets spans; "": none
    profile_dir: str = ""  # where /debug/profile writes; "": it is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class SecuritySettings:
    insecure: bool = False  # listen beyond this machine without TLS and keys
    api_keys: str = ""  # file with the hashes of keys, and what each may do; "": anyone may call
    tls_cert: str = ""  # PEM files, read again when they change; "": no TLS
    tls_key: str = ""
    allowed_origins: str = ""  # sites whose pages may call over HTTP: "https://a.org,http://b:8080"
    tls_client_ca: str = ""  # callers need a certificate that it has signed; "": they need none


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    step_log: str = ""  # file with a record per step; "": none
    request_log: str = ""  # file with a record per ended request; "": none
    request_log_prompts: bool = False  # with their token ids


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything `build_engine` needs. Raises ConfigError for contradictions, with the remedy."""

    model: ModelSettings = field(default_factory=ModelSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    runner: RunnerSettings = field(default_factory=RunnerSettings)
    grammar: GrammarSettings = field(default_factory=GrammarSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    security: SecuritySettings = field(default_factory=SecuritySettings)
    log: LogSettings = field(default_factory=LogSettings)

    def __post_init__(self) -> None:
        c = self.cache
        for section in fields(self):
            settings = getattr(self, section.name)
            for setting in fields(settings):
                value = getattr(settings, setting.name)
                if isinstance(value, (int, float)) and not 0 <= value < float("inf"):
                    raise ConfigError(f"{setting.name}={value} must be a finite number, 0 or more")
        for section_name, choices in CHOICES.items():
            for name, words in choices.items():
                if (word := getattr(getattr(self, section_name), name)) not in words:
                    raise ConfigError(f"{name}={word!r}; use one of {', '.join(words)}")
        for name in ("port", "http_port", "metrics_port"):
            if getattr(self.server, name) > MAX_PORT:
                raise ConfigError(f"{name}={getattr(self.server, name)} is above {MAX_PORT}")
        _check_scheduler(self.scheduler)
        if c.page_size and (c.page_size & (c.page_size - 1) or not 8 <= c.page_size <= 256):
            raise ConfigError(f"page_size={c.page_size} must be a power of two from 8 to 256")
        if not 0 <= c.kv_memory_fraction < 1:
            raise ConfigError(f"kv_memory_fraction={c.kv_memory_fraction} must be in [0, 1)")
        if c.kv_watermark >= 1:
            raise ConfigError(f"kv_watermark={c.kv_watermark} must be in [0, 1)")
        if not (self.grammar.max_grammar_bytes and self.grammar.grammar_timeout_s):
            raise ConfigError("max_grammar_bytes and grammar_timeout_s must be above 0")
        if self.log.request_log_prompts and not self.log.request_log:
            raise ConfigError("request_log_prompts needs a file to write to; give request_log too")
        _check_security(self.server, self.security)


def _check_security(server: ServerSettings, security: SecuritySettings) -> None:
    if bool(security.tls_cert) != bool(security.tls_key):
        raise ConfigError("tls_cert and tls_key belong together; give both, or neither")
    if security.tls_client_ca and not security.tls_cert:
        raise ConfigError("tls_client_ca checks callers over TLS; give tls_cert and tls_key too")
    if "*" in parse_origins(security.allowed_origins) and not security.api_keys:
        raise ConfigError(
            "allowed_origins=* opens this server to the page of any site that someone near it "
            "visits: name the origins, or give api_keys"
        )
    if security.insecure or is_loopback(server.host):
        return
    if not (security.tls_cert and security.api_keys):
        raise ConfigError(
            f"host={server.host!r} can be reached from other machines: give tls_cert, tls_key and "
            "api_keys, or host=127.0.0.1; or insecure, if whoever reaches it may do and read all"
        )
    if server.metrics_port:
        raise ConfigError(
            f"metrics_port={server.metrics_port} has neither TLS nor keys, and can be reached from "
            f"other machines at host={server.host!r}: use /metrics of http_port with an admin key "
            "and metrics_port=0; or insecure, if whoever reaches it may read it"
        )


def parse_origins(text: str) -> tuple[str, ...]:
    """Reads "https://a.org,http://b:8080", or "*" for all. Raises ConfigError for what no browser
    would send."""
    origins = tuple(filter(None, map(str.strip, text.split(","))))
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+", origin):
            raise ConfigError(
                f"allowed_origins: {origin!r} is no origin, as in https://app.example or "
                "http://localhost:3000, in lower case and without a path; * is all"
            )
    return origins


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`, an address or a name. A name
    that is not known is taken for the worst."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    if not host:  # all addresses, to whoever binds it
        return False
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(address[0])).is_loopback for *_, address in found)


def _check_scheduler(s: SchedulerSettings) -> None:
    for name in ("max_num_seqs", "prefill_chunk", "max_long_prompts", "min_prefill_tokens"):
        if getattr(s, name) < 1:
            raise ConfigError(f"{name}={getattr(s, name)} must be at least 1")
    if s.max_num_batched_tokens < s.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens={s.max_num_batched_tokens} cannot hold one token of each "
            f"of max_num_seqs={s.max_num_seqs}; raise the first or lower the second"
        )
    if not 0 < s.long_prompt_share <= 1:
        raise ConfigError(f"long_prompt_share={s.long_prompt_share} must be in (0, 1]")
    parse_weights(s.tenant_weights)
    has_itl_target = s.itl_slo_ms or any(c.itl_slo_s for c in parse_classes(s.request_classes))
    if s.prefill_first and has_itl_target:
        raise ConfigError(
            "prefill_first lets prompts pause streams, so no itl_slo_ms can be kept; leave out one"
        )


def scheduler_config(engine: EngineConfig, **sizes: Any) -> SchedulerConfig:
    """Returns the limits that an engine with these settings gives its scheduler; `sizes` are the
    fields that come from its model and devices."""
    settings = engine.scheduler
    limits: dict[str, Any] = {}
    for limit in fields(SchedulerConfig):
        in_ms = limit.name.removesuffix("_s") + "_ms"
        if hasattr(settings, limit.name):
            limits[limit.name] = getattr(settings, limit.name)
        elif hasattr(settings, in_ms):
            limits[limit.name] = getattr(settings, in_ms) / 1e3
    limits |= {
        "max_starvation_s": settings.max_starvation_s or math.inf,
        "tenant_weights": parse_weights(settings.tenant_weights),
        "classes": parse_classes(settings.request_classes),
        "enable_prefix_cache": engine.cache.enable_prefix_cache,
        "watermark": engine.cache.kv_watermark,
    }
    return SchedulerConfig(**limits, **sizes)


def parse_weights(text: str) -> dict[str, float]:
    """Reads "name:2,other:0.5".

    Raises:
      ConfigError: an entry has another form, or a weight is not a finite number above 0.
    """
    weights: dict[str, float] = {}
    for entry in filter(None, text.split(",")):
        name, _, number = entry.rpartition(":")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not name or not 0 < weight < float("inf"):
            raise ConfigError(f"tenant_weights: {entry!r} is not name:weight, as in gold:4,free:1")
        weights[name] = weight
    return weights


def parse_classes(text: str) -> tuple[RequestClass, ...]:
    """Reads "interactive:priority=0,itl_slo_ms=50,ttft_slo_ms=500;batch:priority=10".

    Raises:
      ConfigError: naming the entry that has another form, an unknown field or a bad value.
    """
    classes: dict[str, RequestClass] = {}
    for entry in filter(None, map(str.strip, text.split(";"))):
        name, _, listed = entry.partition(":")
        if not name or name in classes:
            raise ConfigError(f"request_classes: {entry!r} has no name of its own")
        given = dict(_class_field(entry, item) for item in filter(None, listed.split(",")))
        classes[name] = RequestClass(
            name=name,
            priority=int(given.get("priority", 0)),
            max_num_seqs=int(given.get("max_num_seqs", 0)),
            itl_slo_s=given.get("itl_slo_ms", 0.0) / 1e3,
            ttft_slo_s=given.get("ttft_slo_ms", 0.0) / 1e3,
        )
    return tuple(classes.values())


def _class_field(entry: str, item: str) -> tuple[str, float]:
    """Reads one "name=number" of a class."""
    name, _, number = item.strip().partition("=")
    is_whole = name in ("priority", "max_num_seqs")
    try:
        value = float(int(number) if is_whole else number)
    except (OverflowError, ValueError):
        value = math.nan
    lowest = -(2**31) if name == "priority" else 0
    if name not in CLASS_FIELDS or not lowest <= value < 2**31:
        raise ConfigError(
            f"request_classes: {item!r} of {entry!r} is none of {', '.join(CLASS_FIELDS)} with a "
            "number, as in batch:priority=10,max_num_seqs=8"
        )
    return name, value
