"""Part 2: how near attention comes to the bandwidth and the matmul rate of this very device, and
how its alternatives in JAX do on the same steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Backend, backend_for
from pallas_kernels.ragged_paged_attention.workloads import (
    HEADS,
    Workload,
    attend_with,
    compile_layers,
    decode,
    gathered,
    layers_for,
    make_step,
    measure,
    prefill,
)
from scripts.device_check.record import Record
from scripts.device_check.sizes import Sizes, num_copies

COMPILE_THREADS = 8


class Form(NamedTuple):
    """One way to do one step; `make(workload, backend)` gives its `attend`."""

    name: str
    workload: Workload
    backend: Backend
    num_layers: int
    make: Callable


def run(record: Record, sizes: Sizes, is_small: bool, out: Path) -> None:
    """See `__main__`: records the two ceilings, then each form of each step."""
    del is_small, out
    ceilings = {"decode": copy_bytes_per_s(sizes), "prefill": matmul_flop_per_s(sizes)}
    record.add("copy", gb_per_s=ceilings["decode"] / 1e9)
    record.add("matmul", tflop_per_s=ceilings["prefill"] / 1e12)
    steps = _steps(sizes)
    # All are compiled before any is timed: XLA tries its own choices out on the device meanwhile.
    begin = time.perf_counter()
    with ThreadPoolExecutor(COMPILE_THREADS) as threads:
        compiled = [(form, threads.submit(_compile, form)) for form in _paged_forms(steps, sizes)]
    record.add("compiled", seconds=time.perf_counter() - begin, programs=len(compiled))
    for form, program in compiled:
        name = f"{form.workload.name} {form.name}"
        with record.guard(name):
            step = make_step(form.workload, form.backend, form.num_layers)
            repeats, calls = (sizes.repeats, sizes.calls) if form.name == "kernel" else (2, 1)
            seconds, _, _ = measure(program.result(), step, form.num_layers, repeats, calls)
            record.add(name, form=form.name, **_figures(form.workload, seconds, ceilings))
    for workload in steps:
        with record.guard(f"{workload.name} cudnn"):
            figures = _figures(workload, _cudnn_s(workload, sizes), ceilings)
            record.add(f"{workload.name} cudnn", form="cudnn", **figures)


def _steps(sizes: Sizes) -> list[Workload]:
    heads, page_size = HEADS[sizes.heads], sizes.page_size
    longest = max(context for _, context in sizes.decode)
    return [
        *(decode(heads, *step, page_size, max_model_len=longest) for step in sizes.decode),
        *(prefill(heads, *step, page_size) for step in sizes.prefill),
    ]


def _paged_forms(steps: list[Workload], sizes: Sizes) -> Iterator[Form]:
    """Yields the kernel, then the XLA backend and the gather, which are slow, and only compared
    with: two layers of them do."""
    native = backend_for(jax.default_backend())
    for workload in steps:
        num_layers = layers_for(workload, native, sizes.pool_bytes)
        yield Form("kernel", workload, native, num_layers, attend_with)
    for workload in steps if native is not Backend.XLA else ():
        yield Form("xla", workload, Backend.XLA, 2, attend_with)
    for workload in steps:
        if workload.phase == "decode":
            yield Form("gather", workload, Backend.XLA, 2, gathered)


def _compile(form: Form) -> jax.stages.Compiled:
    shapes = jax.eval_shape(lambda: make_step(form.workload, form.backend, form.num_layers))
    return compile_layers(form.make(form.workload, form.backend), shapes, form.num_layers)


def copy_bytes_per_s(sizes: Sizes) -> float:
    """Measures a copy on the device, counting bytes read and written."""
    x = jnp.arange(sizes.copy_bytes // 4, dtype=jnp.uint32)
    seconds = _median_s(jax.jit(lambda x: x ^ 1), x, sizes=sizes)
    return 2 * x.nbytes / seconds


def matmul_flop_per_s(sizes: Sizes) -> float:
    """Measures a square product of random bfloat16 numbers; zeros would run faster."""
    n = sizes.matmul_width
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    return 2 * n**3 / _median_s(jax.jit(jnp.dot), a, b, sizes=sizes)


def _median_s(call: Callable, *arrays: Any, sizes: Sizes) -> float:
    times = []
    for _ in range(sizes.repeats + 1):
        begin = time.perf_counter()
        for _ in range(sizes.calls):
            out = call(*arrays)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin) / sizes.calls)
    return float(np.median(times[1:]))


def _figures(workload: Workload, seconds: float, ceilings: dict[str, float]) -> dict[str, Any]:
    """Bytes and FLOPs are the least that the step needs, whatever a form moves or computes."""
    work = workload.work(Backend.XLA)
    us = seconds * 1e6
    if workload.phase == "decode":
        share = work.hbm_bytes / seconds / ceilings["decode"]
        gb_per_s = work.hbm_bytes / seconds / 1e9
        return {"us": us, "gb_per_s": gb_per_s, "share": share, "bytes": work.hbm_bytes}
    share = work.flops / seconds / ceilings["prefill"]
    tflop_per_s = work.flops / seconds / 1e12
    return {"us": us, "tflop_per_s": tflop_per_s, "share": share, "chunk": workload.num_tokens}


def _cudnn_s(workload: Workload, sizes: Sizes) -> float:
    """Times cuDNN's attention over dense keys and values, which no pages have to be followed to."""
    if jax.default_backend() != "gpu":
        raise NotImplementedError("needs a GPU")
    kv_len, q_len = workload.rows[0]
    if workload.phase == "prefill" and kv_len != q_len:
        raise NotImplementedError("is causal from the first key on: it has no tokens before")
    heads, num_rows = workload.heads, len(workload.rows)
    keys = jax.random.split(jax.random.key(0), 1 + num_copies(num_rows, kv_len, sizes))
    shape = (num_rows, kv_len, heads.num_kv_heads, heads.head_dim)
    caches = [jax.random.normal(key, (2, *shape), jnp.bfloat16) for key in keys[1:]]
    caches = [(kv[0], kv[1]) for kv in caches]
    q = jax.random.normal(keys[0], (num_rows, q_len, heads.num_heads, shape[3]), jnp.bfloat16)

    @jax.jit
    def layers(q, caches):
        for k, v in caches:
            out = jax.nn.dot_product_attention(
                q, k, v, is_causal=workload.phase == "prefill", implementation="cudnn"
            )
            q = q + out * jnp.asarray(1e-3, q.dtype)
        return q

    return _median_s(layers, q, caches, sizes=sizes) / len(caches)
