#!/usr/bin/env python
"""Times the small primitives beside what they stand in for, and prints a table of each.

    python scripts/bench_primitives.py --suite=matmul --shapes=576x1536,1024x4096 --tokens=1,16,256
    python scripts/bench_primitives.py --suite=pages --dtype=bfloat16

The rivals of a table run in turns, in one process. `wall` is the best time, `cpu` the best
processor time of all threads: on a busy machine it is the steadier one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from absl import app, flags

from jserve.models.layers import linear
from pallas_kernels.dispatch import Backend
from pallas_kernels.kv_layout import pool_layout, pool_shape
from pallas_kernels.page_copy import copy_pages, gather_pages, scatter_pages
from pallas_kernels.quantized_matmul import quantize, quantized_matmul
from pallas_kernels.ragged_paged_attention.kv_write import scatter

_SUITE = flags.DEFINE_enum("suite", "all", ["all", "matmul", "pages"], "what to time")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of activations and pages")
_SHAPES = flags.DEFINE_list("shapes", ["576x1536", "1024x4096"], "inputs x outputs of a matmul")
_TOKENS = flags.DEFINE_list("tokens", ["1", "2", "4", "8", "16", "64", "256"], "of a matmul")
_WEIGHT_MIB = flags.DEFINE_integer(
    "weight_mib", 200, "float32 weights that a matmul's time is taken over: more than caches hold"
)
_GROUP_SIZE = flags.DEFINE_integer("group_size", 64, "inputs that share a scale")
_PAGES = flags.DEFINE_list("pages", ["1", "16"], "moved at a time")
_REPEATS = flags.DEFINE_integer("repeats", 7, "timed calls of each program", lower_bound=1)


def times_of(programs: Mapping[str, Callable[[], object]]) -> dict[str, tuple[float, float]]:
    """Returns each program's best wall and processor seconds, the programs called in turns."""
    best = dict.fromkeys(programs, (float("inf"), float("inf")))
    for program in programs.values():
        jax.block_until_ready(program())
    for _ in range(_REPEATS.value):
        for name, program in programs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(program())
            now = time.perf_counter() - wall, time.process_time() - cpu
            best[name] = min(best[name][0], now[0]), min(best[name][1], now[1])
    return best


def table(title: str, unit: float, rows: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
    """Prints wall / cpu in `unit` seconds, a line for each of `rows`."""
    names = list(next(iter(rows.values())))
    print(f"\n| {title}, wall / cpu | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for label, times in rows.items():
        cells = (f"{wall / unit:.2f} / {cpu / unit:.2f}" for wall, cpu in times.values())
        print(f"| {label} | {' | '.join(cells)} |", flush=True)


def chained(multiply: Callable, weights: Sequence, x: jax.Array) -> jax.Array:
    """Multiplies one weight after the other, each by what the one before gave."""
    y = x
    for w in weights:
        y = x + 1e-3 * jnp.resize(multiply(w, y), x.shape)
    return y


def matmuls() -> None:
    """Milliseconds of one matmul in a chain over many weights, each read from memory."""
    rows = {}
    for num_in, num_out in (map(int, shape.split("x")) for shape in _SHAPES.value):
        count = max(1, _WEIGHT_MIB.value * 2**20 // (4 * num_in * num_out))
        keys = jax.random.split(jax.random.key(0), count)
        floats = [jax.random.normal(key, (num_out, num_in)) for key in keys]
        weights = {"float": (linear, [w.astype(_DTYPE.value) for w in floats])}
        for kind in ("w8a8", "int8", "int4"):
            size = None if kind == "w8a8" else _GROUP_SIZE.value
            weights[kind] = quantized_matmul, [quantize(w, kind, group_size=size) for w in floats]

        for num_tokens in map(int, _TOKENS.value):
            x = jax.random.normal(jax.random.key(1), (num_in, num_tokens), _DTYPE.value)
            times = times_of(
                {
                    name: partial(jax.jit(partial(chained, multiply)), w, x)
                    for name, (multiply, w) in weights.items()
                }
            )
            rows[f"{num_in} x {num_out}, {num_tokens} tokens"] = {
                name: (wall / count, cpu / count) for name, (wall, cpu) in times.items()
            }
    table("ms of one matmul", 1e-3, rows)


def page_moves() -> None:
    """Microseconds of moving pages of SmolLM2-135M, and of writing 16 new tokens into one layer."""
    layout = pool_layout(Backend.XLA, 3, 64, _DTYPE.value)
    shape = pool_shape(30, 512, 16, layout)
    pools = [jnp.zeros(shape, _DTYPE.value)]

    def in_place(function, *arguments):
        program = jax.jit(function, donate_argnums=0)

        def call():
            pools[0] = program(pools[0], *arguments)
            return pools[0]

        return call

    rows, gather = {}, jax.jit(gather_pages)
    for count in map(int, _PAGES.value):
        ids = jnp.arange(1, count + 1, dtype=jnp.int32)
        pages = gather_pages(pools[0], ids)
        token = jnp.arange(16, dtype=jnp.int32)
        new = pages[0, 0, :, :, :]
        ends, starts = token + 1, jnp.arange(17, dtype=jnp.int32)
        rows[f"{count} of {pages.nbytes / count / 2**10:.0f} KiB"] = times_of(
            {
                "copy": in_place(copy_pages, ids, ids + count),
                "out": lambda ids=ids: gather(pools[0], ids),
                "in": in_place(scatter_pages, pages, ids),
                "KV write": in_place(
                    lambda pool, *rest: scatter(rest[0], pool, *rest[1:]),
                    new, 3, ends, 1 + token[:, None], starts,
                ),
            }
        )  # fmt: skip
    table(f"us of {pools[0].nbytes / 2**20:.0f} MiB pool's pages", 1e-6, rows)


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"{argv[1:]} are no flags")
    suites = {"matmul": matmuls, "pages": page_moves}
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    for name, suite in suites.items():
        if _SUITE.value in ("all", name):
            suite()


if __name__ == "__main__":
    app.run(main)
