"""Every setting of an engine, composed and frozen. Knows defaults and contradictions, no device."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

from jserve.errors import ConfigError

MAX_PORT = 65_535
DEFAULT_CACHE_DIR = str(Path.home() / ".cache" / "jserve")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    model: str = "smollm2-135m"  # known name, folder, .gguf file, Orbax folder or hub name
    served_model_name: str = ""  # name clients use; "" takes `model`
    dtype: str = "auto"  # "auto": float32 on CPU, bfloat16 elsewhere
    max_model_len: int = 0  # 0: the model's own limit
    cache_dir: str = DEFAULT_CACHE_DIR  # fetched models and compiled programs


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    page_size: int = 0  # tokens per page; 0: the backend's default
    kv_memory_fraction: float = 0.0  # of the device's free memory; 0: the backend's default
    kv_memory_bytes: int = 0  # per device; overrides the fraction when not 0
    enable_prefix_cache: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    prefill_chunk: int = 256  # most tokens of one prompt in one step; the rest is for others
    max_queued_requests: int = 1024
    policy: str = "priority"  # who is admitted next: fcfs, priority, sjf, fair, prefix
    max_starvation_s: float = 0.0  # longest wait before a request comes first; 0: no bound
    tenant_weights: str = ""  # "name:2,other:0.5", shares of policy fair; 1 for the rest
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 50051
    metrics_port: int = 0  # 0: no Prometheus endpoint
    drain_timeout_s: float = 30.0
    max_message_bytes: int = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything `build_engine` needs. Raises ConfigError for contradictions, with the remedy."""

    model: ModelSettings = field(default_factory=ModelSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    runner: RunnerSettings = field(default_factory=RunnerSettings)
    server: ServerSettings = field(default_factory=ServerSettings)

    def __post_init__(self) -> None:
        s, c = self.scheduler, self.cache
        for section in (self.model, c, s, self.parallel, self.runner, self.server):
            for setting in fields(section):
                value = getattr(section, setting.name)
                if isinstance(value, (int, float)) and not 0 <= value < float("inf"):
                    raise ConfigError(f"{setting.name}={value} must be a finite number, 0 or more")
        for name in ("port", "metrics_port"):
            if getattr(self.server, name) > MAX_PORT:
                raise ConfigError(f"{name}={getattr(self.server, name)} is above {MAX_PORT}")
        if s.max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs={s.max_num_seqs} must be at least 1")
        if s.max_num_batched_tokens < s.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={s.max_num_batched_tokens} cannot hold one token of each "
                f"of max_num_seqs={s.max_num_seqs}; raise the first or lower the second"
            )
        parse_weights(s.tenant_weights)
        if s.prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk={s.prefill_chunk} must be at least 1")
        if c.page_size and (c.page_size & (c.page_size - 1) or not 8 <= c.page_size <= 256):
            raise ConfigError(f"page_size={c.page_size} must be a power of two from 8 to 256")
        if not 0 <= c.kv_memory_fraction < 1:
            raise ConfigError(f"kv_memory_fraction={c.kv_memory_fraction} must be in [0, 1)")
        if self.model.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"dtype={self.model.dtype!r}; use auto, float32 or bfloat16")


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
