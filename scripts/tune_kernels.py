"""Measures block sizes of ragged paged attention on the device at hand and keeps the best.

    python scripts/tune_kernels.py --heads=llama3-8b --rows=16,64 --contexts=1024,8192

For each size (decode rows, prefill tokens) it searches from the backend's own choice. What wins
over all contexts together, by more than --min_gain and more than the noise, is written to
tuned/<device kind>/ragged_paged_attention.json. Without an accelerator it prints what the roofline
picks, for each --device_kind; --backend=xla measures a CPU all the same.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Iterator
from pathlib import Path

import jax
from absl import app, flags

from pallas_kernels.devices import DEVICES, device_spec
from pallas_kernels.dispatch import Backend, backend_for
from pallas_kernels.ragged_paged_attention import tuning
from pallas_kernels.ragged_paged_attention.api import why_unsupported
from pallas_kernels.ragged_paged_attention.tuner import (
    Found,
    blocks_of,
    climb,
    on_chip_bytes,
    shown_us,
    timer_of,
)
from pallas_kernels.ragged_paged_attention.workloads import HEADS, Workload, decode, prefill

_HEADS = flags.DEFINE_multi_enum("heads", ["llama3-8b"], list(HEADS), "heads of one device")
_PHASES = flags.DEFINE_list("phases", list(tuning.PHASES), "decode, prefill or both")
_ROWS = flags.DEFINE_list("rows", ["1", "16", "64", "256"], "decode rows")
_CHUNKS = flags.DEFINE_list("chunks", ["256", "2048"], "prefill tokens in the step")
_CONTEXTS = flags.DEFINE_list("contexts", ["1024", "8192"], "tokens in pages before the step's")
_PAGE_SIZES = flags.DEFINE_list("page_sizes", ["64"], "tokens per page")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "of queries")
_KV_DTYPE = flags.DEFINE_enum(
    "kv_dtype", "bfloat16", ["bfloat16", "float32", "int8", "float8_e4m3fn"], "of the pool"
)
_BACKEND = flags.DEFINE_string("backend", "auto", "xla, mosaic_tpu, mosaic_gpu; auto: the device's")
_DEVICE_KIND = flags.DEFINE_multi_enum(
    "device_kind", [], list(DEVICES), "print the roofline for these, measure nothing"
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "timed repeats; their median counts")
_CALLS = flags.DEFINE_integer("calls", 4, "calls in a repeat")
_POOL_BYTES = flags.DEFINE_integer("pool_bytes", 2**33, "most of the pool, all layers together")
_MIN_GAIN = flags.DEFINE_float("min_gain", 0.03, "share of the time that a change must save")
_TIME_LIMIT_S = flags.DEFINE_float("time_limit_s", math.inf, "start no measurement after this")
_OUT = flags.DEFINE_string("out", str(tuning.TUNED), "folder of the tuned files")


def groups() -> Iterator[tuple[str, list[Workload]]]:
    """Yields the workloads of one size of one phase, which differ in their contexts only."""
    settings = {"dtype": _DTYPE.value, "kv_dtype": _KV_DTYPE.value}
    contexts = [int(n) for n in _CONTEXTS.value]
    for name in _HEADS.value:
        for page_size in map(int, _PAGE_SIZES.value):
            for phase in _PHASES.value:
                make = {"decode": decode, "prefill": prefill}[phase]
                for size in map(int, _ROWS.value if phase == "decode" else _CHUNKS.value):
                    longest = max(contexts) + size
                    workloads = [
                        make(HEADS[name], size, n, page_size, max_model_len=longest, **settings)
                        for n in contexts
                    ]
                    yield f"{name}, page size {page_size}, {phase} {size}", workloads


def tune(backend: Backend, device_kind: str) -> None:
    begin = time.monotonic()
    is_time_left = lambda: time.monotonic() - begin < _TIME_LIMIT_S.value  # noqa: E731
    for title, workloads in groups():
        if not is_time_left():
            print(f"{title}: left out, the time is up")
            continue
        phase, shape = workloads[0].phase, workloads[0].shape(backend)
        if reason := why_unsupported(backend, shape, device_kind):
            print(f"{title}: refused: {reason}")
            continue
        start = tuning.heuristic(backend, shape, device_kind)
        print(f"{title}, {', '.join(w.name for w in workloads)}: from {blocks_of(start, phase)}")
        found = climb(
            start,
            phase,
            timer_of(
                workloads,
                backend,
                pool_bytes=_POOL_BYTES.value,
                repeats=_REPEATS.value,
                calls=_CALLS.value,
            ),
            min_gain=_MIN_GAIN.value,
            is_time_left=is_time_left,
            report=lambda line: print(f"  {line}", flush=True),
        )
        print(
            f"  best {blocks_of(found.best, phase)}: {shown_us(found.times)} us, from "
            f"{shown_us(found.times_before)} us: {found.gain:+.1%}, noise {found.noise:.1%}"
        )
        if found.gain > max(_MIN_GAIN.value, found.noise):
            entry = entry_of(found, workloads, backend)
            print(f"  kept: {tuning.write([entry], device_kind, Path(_OUT.value))}", flush=True)


def entry_of(found: Found, workloads: list[Workload], backend: Backend) -> tuning.Tuned:
    phase, shape = workloads[0].phase, workloads[0].shape(backend)
    pairs = zip(workloads, found.times, found.times_before, strict=True)
    return tuning.Tuned(
        backend=backend.value,
        phase=phase,
        size=tuning.size_of(shape, phase),
        shape=tuning.exact_part(shape),
        blocks=blocks_of(found.best, phase),
        jax=jax.__version__,
        date=datetime.date.today().isoformat(),
        figures={
            w.name: {"us": round(t * 1e6, 2), "us_before": round(b * 1e6, 2)} for w, t, b in pairs
        },
    )


def show_roofline(kinds: list[str]) -> None:
    print("Nothing is measured: block sizes by roofline and budgets; times are the least possible.")
    print("\n| device | workload | block sizes | KiB on chip | us | MB | GFLOP | limit |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in kinds:
        spec = device_spec(kind)
        backend = backend_for(spec.platform)
        for workload in (workload for _, workloads in groups() for workload in workloads):
            shape, work = workload.shape(backend), workload.work(backend)
            try:
                config = tuning.heuristic(backend, shape, kind)
            except ValueError as error:
                print(f"| {kind} | {workload.name} | refused: {error} | | | | | |")
                continue
            needed = on_chip_bytes(shape, config, workload.phase)
            is_memory = work.hbm_bytes / spec.hbm_bytes_per_s >= work.seconds(spec)
            print(
                f"| {kind} | {workload.name} | {blocks_of(config, workload.phase)} "
                f"| {needed // 1024} | {work.seconds(spec) * 1e6:.1f} | {work.hbm_bytes / 1e6:.1f} "
                f"| {work.flops / 1e9:.1f} | {'memory' if is_memory else 'arithmetic'} |"
            )


def main(argv: list[str]) -> None:
    del argv
    platform = jax.default_backend()
    if _DEVICE_KIND.value or (platform == "cpu" and _BACKEND.value == "auto"):
        if not _DEVICE_KIND.value:
            print("There is no accelerator here; --backend=xla would measure this CPU.")
        show_roofline(_DEVICE_KIND.value or list(DEVICES))
    else:
        tune(backend_for(platform, _BACKEND.value), jax.devices()[0].device_kind)


if __name__ == "__main__":
    app.run(main)
