"""Turns flags into all that a run needs: limits, step-time model, load, targets. Knows flags and
the parts that they choose: runs nothing, shows nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from absl import flags

from jserve.bench.report import parse_goodput
from jserve.bench.workload import Lengths
from jserve.config import EngineConfig, scheduler_config
from jserve.errors import ConfigError
from jserve.flags import config_from_flags
from jserve.sim.model_size import ModelSize
from jserve.sim.recorder import Targets
from jserve.sim.synthetic import Kind, Mix, parse_kinds, parse_tenants, synthetic
from jserve.sim.timing import Basis, basis_from_flags, step_time_from_flags
from jserve.sim.traces import read_trace
from scheduler.bucket import make_buckets
from scheduler.config import SchedulerConfig
from scheduler.request import Request
from scheduler.step_time import StepTime

HOST_BYTES_PER_S = 25e9  # of pages to the host and back: about PCIe 4.0 x16
MEMORY_FRACTION = 0.9  # of a device's memory, unless --kv_memory_fraction says otherwise
_NO_MODEL_LEN = 32_768


@dataclass(frozen=True, slots=True)
class Setup:
    """One run: what `simulate` takes, and how its requests are called good.

    Attributes:
      timed_by: the step-time model, for people.
      open_requests: begins the load anew; the counter hears what is left out, and why.
    """

    config: SchedulerConfig
    step_time: StepTime
    timed_by: str
    overlap: bool
    closed_loop: int
    swap_page_s: float
    open_requests: Callable[[Counter[str]], Iterator[Request]]
    targets: dict[str, Targets]
    default_targets: Targets
    num_requests: int  # 0: known when all are read


def setup_from_flags(values: flags.FlagValues) -> Setup:
    """Builds a run from the flags as they are now.

    Raises:
      ConfigError: they contradict each other, or a file that they name is no good.
    """
    engine = config_from_flags(values)
    basis = basis_from_flags(values)
    config = _limits(engine, values, basis)
    buckets = make_buckets(config.max_num_seqs, config.max_num_batched_tokens)
    step_time, timed_by = step_time_from_flags(values, basis, buckets)
    targets, default = _targets(values.goodput, config)
    return Setup(
        config=config,
        step_time=step_time,
        timed_by=timed_by,
        overlap=engine.scheduler.overlap,
        closed_loop=values.closed_loop,
        swap_page_s=_page_bytes(basis.size, config.page_size) / HOST_BYTES_PER_S,
        open_requests=lambda skipped: _load(values, engine, config, skipped),
        targets=targets,
        default_targets=default,
        num_requests=values.limit if values.trace else values.requests,
    )


# ---- limits ----


def _limits(engine: EngineConfig, values: flags.FlagValues, basis: Basis) -> SchedulerConfig:
    """Pages and lengths as flags, the step log or the device's memory have them, in this order."""
    log, device, size = basis
    header = log.header if log else {}
    page_size = engine.cache.page_size or header.get("page_size") or (64 if device else 16)
    max_model_len = values.max_model_len or (size.max_position if size else _NO_MODEL_LEN)
    num_pages = values.num_pages or header.get("num_pages") or 0
    page_bytes = _page_bytes(size, page_size)
    if not num_pages and engine.cache.kv_memory_bytes and page_bytes:
        num_pages = int(engine.cache.kv_memory_bytes / page_bytes)
    if not num_pages and device and size:
        fraction = engine.cache.kv_memory_fraction or MEMORY_FRACTION
        num_pages = int((fraction * device.hbm_bytes - size.memory_bytes) / page_bytes)
        if num_pages < 2:
            raise ConfigError(
                f"the weights, {size.memory_bytes / 2**30:.1f} GiB, leave no room for KV pages in "
                f"{fraction:g} of {device.kind}; give --num_pages or another --device"
            )
    if not num_pages:  # nobody knows the memory: what all slots can fill
        num_pages = 1 + engine.scheduler.max_num_seqs * -(-max_model_len // page_size)
    swap = engine.cache.swap_space_bytes
    if swap and not page_bytes:
        raise ConfigError("--swap_space_bytes needs the size of a page; give --model_config")
    return scheduler_config(
        engine,
        page_size=page_size,
        num_pages=num_pages,
        max_model_len=max_model_len,
        num_host_pages=int(swap / page_bytes) if swap else 0,
    )


def _page_bytes(size: ModelSize | None, page_size: int) -> float:
    return size.kv_bytes_per_token * page_size if size else 0.0


# ---- load and targets ----


def _load(
    values: flags.FlagValues, engine: EngineConfig, config: SchedulerConfig, skipped: Counter[str]
) -> Iterator[Request]:
    """The requests that a server with these limits would take, in order of arrival."""
    if values.trace:
        requests = read_trace(values.trace, values.trace_format, skipped)
    else:
        requests = synthetic(_mix(values))
    priorities = {c.name: c.priority for c in config.classes}
    capacity = min(config.max_model_len, (config.num_pages - 1) * config.page_size)
    num_taken = 0
    for request in requests:
        if request.num_prompt_tokens + request.sampling.max_tokens > capacity:
            skipped[f"longer than {capacity} tokens (--max_model_len, --num_pages)"] += 1
            continue
        request.priority += priorities.get(request.request_class, 0)
        request.arrival_time /= values.rate_scale
        if engine.scheduler.queue_timeout_s and not values.closed_loop:
            request.queue_deadline = request.arrival_time + engine.scheduler.queue_timeout_s
        yield request
        num_taken += 1
        if num_taken == values.limit:
            return


def _mix(values: flags.FlagValues) -> Mix:
    if values.rate and not values.burstiness:
        raise ConfigError("--burstiness must be above 0; 1 is a Poisson process")
    default = Kind(
        input=Lengths(values.input_len),
        output=Lengths(values.output_len),
        prefix=values.shared_prefix,
    )
    return Mix(
        kinds=parse_kinds(values.mix, default),
        num_requests=values.requests,
        rate=values.rate,
        burstiness=values.burstiness,
        tenants=parse_tenants(values.tenants),
        seed=values.seed,
    )


def _targets(goodput: str, config: SchedulerConfig) -> tuple[dict[str, Targets], Targets]:
    """--goodput for all; without it, what the engine and its classes promise."""
    if goodput:
        limits = {name[:-3] + "_s": ms / 1e3 for name, ms in parse_goodput(goodput).items()}
        return {}, Targets(**limits)

    targets = {
        name: Targets(ttft_s=own.ttft_s or math.inf, itl_s=own.itl_s or math.inf)
        for name, own in config.latency_targets().items()
    }
    return targets, targets[""]
