"""Part 2: how near attention comes to the bandwidth and the matmul rate of this very device, and
how its alternatives in JAX do on the same steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Backend, backend_for
from pallas_kernels.ragged_paged_attention.kv_write import scatter
from pallas_kernels.ragged_paged_attention.workloads import (
    HEADS,
    Workload,
    attend_with,
    compile_layers,
    decode,
    layers_for,
    make_step,
    measure,
    prefill,
)
from scripts.device_check.record import Record
from scripts.device_check.sizes import Sizes, num_copies


def run(record: Record, sizes: Sizes, is_small: bool, out: Path) -> None:
    """See `__main__`: records the two ceilings, then each form of each step."""
    del is_small, out
    ceilings = {"decode": copy_bytes_per_s(sizes), "prefill": matmul_flop_per_s(sizes)}
    record.add("copy", gb_per_s=ceilings["decode"] / 1e9)
    record.add("matmul", tflop_per_s=ceilings["prefill"] / 1e12)
    native = backend_for(jax.default_backend())
    settings = (HEADS[sizes.heads], sizes.page_size)
    longest = max(n for _, n in sizes.decode)
    steps = [
        *(decode(settings[0], *step, settings[1], max_model_len=longest) for step in sizes.decode),
        *(prefill(settings[0], *step, settings[1]) for step in sizes.prefill),
    ]
    forms = [("kernel", native, attend_with)]
    forms += [("xla", Backend.XLA, attend_with)] if native is not Backend.XLA else []
    forms += [("gather", Backend.XLA, _gathered)]
    for form, backend, make in forms:
        for workload in steps:
            if form == "gather" and workload.phase == "prefill":
                continue
            with record.guard(f"{workload.name} {form}"):
                num_layers = layers_for(workload, backend, sizes.pool_bytes)
                step = make_step(workload, backend, num_layers)
                program = compile_layers(make(workload, backend), step, num_layers)
                repeats, calls = (sizes.repeats, sizes.calls) if form == "kernel" else (2, 1)
                seconds, _, _ = measure(program, step, num_layers, repeats, calls)
                record.add(
                    f"{workload.name} {form}", form=form, **_figures(workload, seconds, ceilings)
                )
    for workload in steps:
        with record.guard(f"{workload.name} cudnn"):
            seconds = _cudnn_s(workload, sizes)
            record.add(
                f"{workload.name} cudnn", form="cudnn", **_figures(workload, seconds, ceilings)
            )


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


def _gathered(workload: Workload, backend: Backend) -> Callable:
    """Decode as one gather of all pages that a row may have, and a dense attention."""
    layout = workload.layout(backend)

    def attend(q, k, v, pool, layer, kv_lens, page_indices, cu_q_lens, distribution):
        del distribution
        pool = scatter(layout.rows(k, v), pool, layer, kv_lens, page_indices, cu_q_lens)
        num_rows, heads = kv_lens.shape[0], workload.heads
        kv = pool[layer, page_indices].reshape(num_rows, -1, heads.num_kv_heads, 2, heads.head_dim)
        out = jax.nn.dot_product_attention(
            q[:, None], kv[..., 0, :], kv[..., 1, :], key_value_seq_lengths=kv_lens
        )
        return out[:, 0], pool

    return attend


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
