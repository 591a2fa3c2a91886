"""Searches for block sizes by measuring them. Knows configs and times; not kernels, files or flags.

From a backend's own choice it climbs: one block size at a time to a half and to the double, as long
as that helps. A config that the backend refuses, or that changes the results, is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.devices import DEVICES
from pallas_kernels.dispatch import Backend
from pallas_kernels.ragged_paged_attention.config import (
    AttentionShape,
    Config,
    GpuConfig,
    TpuConfig,
    gpu_decode_bytes,
    gpu_prefill_bytes,
    tpu_decode_bytes,
    tpu_prefill_bytes,
)
from pallas_kernels.ragged_paged_attention.workloads import (
    Workload,
    attend_with,
    compile_layers,
    layers_for,
    make_step,
    measure,
)

Timer = Callable[[Config], list[float]]  # seconds per layer of each workload
MOST_DIFFERENCE = 0.05  # between the outputs of two configs, which round in another order


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to: times are seconds per layer of each workload, of the last measurement.

    Attributes:
      noise: how far two measurements of the same config lay apart, as a share.
    """

    best: Config
    times: list[float]
    times_before: list[float]
    noise: float

    @property
    def gain(self) -> float:
        return gain_of(self.times, self.times_before)


def blocks_of(config: Config, phase: str) -> dict[str, int]:
    """Returns the block sizes of one phase, whose name theirs begin with."""
    return {name: v for name, v in asdict(config).items() if name.startswith(phase)}


def on_chip_bytes(shape: AttentionShape, config: Config, phase: str) -> int:
    """Returns the VMEM or shared memory that a backend's kernel takes; 0 where it has none."""
    match config, phase:
        case TpuConfig(), "decode":
            return tpu_decode_bytes(shape, config.decode_rows, config.decode_pages)
        case TpuConfig(), "prefill":
            return tpu_prefill_bytes(shape, config.prefill_tokens, config.prefill_pages)
        case GpuConfig(), "decode":
            return gpu_decode_bytes(shape, config.decode_stages)
        case GpuConfig(), "prefill":
            return gpu_prefill_bytes(shape, config.prefill_block, config.prefill_stages)
    return 0


def neighbours(config: Config, phase: str) -> Iterator[Config]:
    """Yields `config` with one block size of `phase` halved or doubled; those up to 4, which count
    things, also one less or more."""
    for name, value in blocks_of(config, phase).items():
        near = {value // 2, 2 * value} | ({value - 1, value + 1} if value <= 4 else set())
        for other in sorted(near - {0, value}):
            yield replace(config, **{name: other})  # type: ignore[arg-type]


def gain_of(times: list[float], before: list[float]) -> float:
    """Returns the time saved, as a geometric mean over workloads: 0.1 is a tenth less."""
    ratios = [math.log(t / b) for t, b in zip(times, before, strict=True)]
    return 1 - math.exp(sum(ratios) / len(ratios))


def climb(
    start: Config,
    phase: str,
    timer: Timer,
    *,
    min_gain: float,
    is_time_left: Callable[[], bool] = lambda: True,
    report: Callable[[str], None] = print,
) -> Found:
    """Returns the best config reached from `start` by steps that each save `min_gain` or more.

    Both are measured again at the end: the best of many measurements of one thing looks good too.
    """
    first = timer(start)
    best, best_times, seen, improved = start, first, {start}, True
    while improved:
        improved = False
        for other in neighbours(best, phase):
            if other in seen or not is_time_left():
                continue
            seen.add(other)
            try:
                times = timer(other)
            except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
                report(f"{blocks_of(other, phase)}: refused: {str(error).splitlines()[0][:120]}")
                continue
            gain = gain_of(times, best_times)
            report(f"{blocks_of(other, phase)}: {shown_us(times)} us, {gain:+.1%}")
            if gain >= min_gain:
                best, best_times, improved = other, times, True
    if best == start:
        return Found(start, first, first, 0.0)
    times, before = timer(best), timer(start)
    noise = max(abs(gain_of(times, best_times)), abs(gain_of(before, first)))
    return Found(best, times, before, noise)


def shown_us(times: list[float]) -> str:
    return " ".join(f"{t * 1e6:.1f}" for t in times)


def timer_of(
    workloads: list[Workload], backend: Backend, *, pool_bytes: int, repeats: int, calls: int
) -> Timer:
    """Returns what times a config on all of `workloads`.

    It raises ValueError for a config that takes more on-chip memory than the device has, which
    compilers may need minutes to say, or whose outputs are not those of the first that it timed.
    """
    outputs: dict[str, np.ndarray] = {}
    spec = DEVICES.get(jax.devices()[0].device_kind)

    def timer(config: Config) -> list[float]:
        times = []
        for workload in workloads:
            needed = on_chip_bytes(workload.shape(backend), config, workload.phase)
            if spec and needed > spec.on_chip_bytes:
                raise ValueError(f"takes {needed} of {spec.on_chip_bytes} bytes on the chip")
            num_layers = layers_for(workload, backend, pool_bytes)
            step = make_step(workload, backend, num_layers)
            program = compile_layers(attend_with(workload, backend, config), step, num_layers)
            seconds, out, _ = measure(program, step, num_layers, repeats, calls)
            found = np.asarray(out.astype(jnp.float32))
            wanted = outputs.setdefault(workload.name, found)
            if not np.allclose(found, wanted, rtol=0, atol=MOST_DIFFERENCE):
                raise ValueError(f"other results in {workload.name}")
            times.append(seconds)
        return times

    return timer
