"""Times ragged paged attention per layer: decode against a plain gather, prefill, growth.

    python scripts/bench_attention.py --suite=decode --model=smollm2 --page_sizes=16,32
    python scripts/bench_attention.py --suite=growth --num_layers=4

`growth` prints a table in Markdown of how time follows live context and max_model_len.
Every number is for one layer inside a loop over `--num_layers` layers of one donated pool, so keys
and values come from memory as they do in a model's step. `cpu` is processor time of all threads:
on a busy machine it is the steadier one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from pallas_kernels.dispatch import Backend, backend_for
from pallas_kernels.ragged_paged_attention.workloads import (
    HEADS,
    Heads,
    Workload,
    attend_with,
    compile_layers,
    gathered,
    make_step,
)

_SUITE = flags.DEFINE_enum("suite", "all", ["all", "decode", "prefill", "growth"], "what to time")
_MODEL = flags.DEFINE_enum("model", "smollm2", list(HEADS), "head shapes")
_PAGE_SIZES = flags.DEFINE_list("page_sizes", ["16"], "tokens per page, one or more")
_ROWS = flags.DEFINE_list("rows", ["1", "4", "16", "32"], "decode rows")
_CONTEXTS = flags.DEFINE_list("contexts", ["64", "200", "512", "2048"], "tokens of context")
_CHUNKS = flags.DEFINE_list("chunks", ["64", "256", "512"], "prefill tokens in the step")
_NUM_LAYERS = flags.DEFINE_integer("num_layers", 8, "layers of the pool")
_MAX_MODEL_LEN = flags.DEFINE_integer("max_model_len", 4096, "width of page_indices, in tokens")
_REPEATS = flags.DEFINE_integer("repeats", 10, "timed calls of each program")
_BASELINE = flags.DEFINE_boolean("baseline", False, "time a gather of max_model_len tokens too")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of queries and pool")


class Timing(NamedTuple):
    """Microseconds of one layer."""

    best: float
    median: float
    cpu: float


def backend() -> Backend:
    return backend_for(jax.default_backend())


def workload(
    heads: Heads, page_size: int, rows: list[tuple[int, int]], max_model_len: int = 0
) -> Workload:
    """A step of `rows` (kv_len, q_len) in the dtype that the flag says."""
    return Workload(
        heads=heads,
        rows=tuple(rows),
        page_size=page_size,
        max_model_len=max_model_len or _MAX_MODEL_LEN.value,
        dtype=_DTYPE.value,
        kv_dtype=_DTYPE.value,
    )


def measure(load: Workload, attend: Callable | None = None) -> Timing:
    """Times `attend`, ragged paged attention by default, over all layers."""
    num_layers, step = _NUM_LAYERS.value, make_step(load, backend(), _NUM_LAYERS.value)
    program = compile_layers(attend or attend_with(load, backend()), step, num_layers)
    walls, cpus = [], []
    for _ in range(_REPEATS.value + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        out, pool, _ = program(*step)
        step = step._replace(pool=pool)
        jax.block_until_ready((out, pool))
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    scale = 1e6 / num_layers
    walls, cpus = np.array(walls[1:]) * scale, np.array(cpus[1:]) * scale
    return Timing(walls.min(), float(np.median(walls)), cpus.min())


def ragged(num_rows: int, mean: int) -> list[int]:
    """Log-normal lengths with the given mean, the longest about four times as long."""
    lengths = np.random.default_rng(1).lognormal(0, 0.6, num_rows)
    lengths = lengths / lengths.mean() * mean
    return [int(n) for n in np.clip(lengths, 1, _MAX_MODEL_LEN.value)]


def bench_decode(heads: Heads, page_size: int) -> None:
    bytes_per_token = 2 * heads.num_kv_heads * heads.head_dim * jnp.dtype(_DTYPE.value).itemsize
    print(f"\ndecode, {_MODEL.value}, {_DTYPE.value}, page_size {page_size}: us per layer")
    print(f"{'rows':>5}{'context':>9}{'lengths':>9}{'best':>9}{'median':>9}{'cpu':>9}{'GB/s':>7}")
    for num_rows in map(int, _ROWS.value):
        for context in map(int, _CONTEXTS.value):
            shapes = {"uniform": [context] * num_rows}
            if num_rows > 1:
                shapes["ragged"] = ragged(num_rows, context)
            for name, kv_lens in shapes.items():
                load = workload(heads, page_size, [(n, 1) for n in kv_lens])
                window = heads.sliding_window or max(kv_lens)
                live = sum(min(n, window) for n in kv_lens) * bytes_per_token
                t = measure(load)
                line = f"{num_rows:5}{context:9}{name:>9}{t.best:9.0f}{t.median:9.0f}{t.cpu:9.0f}"
                line += f"{live / t.best / 1e3:7.1f}"
                if _BASELINE.value:
                    base = measure(load, gathered(load, backend()))
                    line += f"   gather {base.best:9.0f}{base.median:9.0f}{base.cpu:9.0f}"
                print(line, flush=True)


def bench_prefill(heads: Heads, page_size: int) -> None:
    print(f"\nprefill, {_MODEL.value}, {_DTYPE.value}, page_size {page_size}: us per layer")
    print(f"{'chunk':>6}{'before':>9}{'best':>9}{'median':>9}{'cpu':>9}{'GFLOP/s':>9}")
    for chunk in map(int, _CHUNKS.value):
        for before in (0, *map(int, _CONTEXTS.value)):
            t = measure(workload(heads, page_size, [(before + chunk, chunk)]))
            window = heads.sliding_window or before + chunk
            seen = sum(min(before + i + 1, window) for i in range(chunk))
            flops = 4 * seen * heads.num_heads * heads.head_dim
            print(
                f"{chunk:6}{before:9}{t.best:9.0f}{t.median:9.0f}{t.cpu:9.0f}"
                f"{flops / t.best / 1e3:9.0f}",
                flush=True,
            )


def bench_growth(heads: Heads, page_size: int) -> None:
    """One line per live context; a column per kind of step and max_model_len."""
    contexts, chunk = [256, 512, 1024, 2048, 4096, 8192], 256
    kinds = {"decode, 1 row": 1, "decode, 16 rows": 16, f"prefill of {chunk}": 0}
    columns = [(kind, longest) for kind in kinds for longest in (8192, 32768)]
    print(f"\n{_MODEL.value}, {_DTYPE.value}, page_size {page_size}: us per layer, best (median)\n")
    print("| live context |", *(f"{kind}, {longest >> 10}k |" for kind, longest in columns))
    print("|---:|" + "---:|" * len(columns))
    for context in contexts:
        print(f"| {context} |", end="", flush=True)
        for kind, longest in columns:
            rows = [(context, 1)] * kinds[kind] or [(context, chunk)]
            t = measure(workload(heads, page_size, rows, longest))
            print(f" {t.best:.0f} ({t.median:.0f}) |", end="", flush=True)
        print()


def main(argv: list[str]) -> None:
    del argv
    heads = HEADS[_MODEL.value]
    for page_size in map(int, _PAGE_SIZES.value):
        if _SUITE.value in ("all", "decode"):
            bench_decode(heads, page_size)
        if _SUITE.value in ("all", "prefill"):
            bench_prefill(heads, page_size)
        if _SUITE.value == "growth":
            bench_growth(heads, page_size)


if __name__ == "__main__":
    app.run(main)
