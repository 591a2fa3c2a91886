"""Compiles every bucket's step before the first request, and counts what is compiled after.

Knows buckets and executables, not requests.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import logging
import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jserve.runner.mesh import replicated
from jserve.runner.step import StepOptions, StepState, make_step
from jserve.runner.swap import COPY_PAGES, page_sharding, put_pages, take_pages
from scheduler.bucket import Bucket
from scheduler.packer import batch_words

log = logging.getLogger(__name__)
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
COMPILE_THREADS = min(8, os.cpu_count() or 1)  # compiling lets go of the interpreter


def enable_compilation_cache(folder: Path) -> None:
    """Keeps compiled programs in `folder`, whatever their size or compile time."""
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def on_each_compilation(callback: Callable[[], None]) -> None:
    """Calls `callback` whenever this process compiles, or loads from the cache, any program; a
    bound method for as long as its object lives."""
    is_method = inspect.ismethod(callback)
    reference = weakref.WeakMethod(callback) if is_method else lambda: callback

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        live = reference() if event == _COMPILE_EVENT else None
        if live is not None:
            live()

    jax.monitoring.register_event_duration_secs_listener(listen)


def compile_steps(
    options: StepOptions, buckets: list[Bucket], params: Any, state: StepState
) -> dict[Bucket, jax.stages.Compiled]:
    """Returns one executable per bucket: (params, state donated, buffer) -> (state, sampled).

    Logs each bucket with its temporary bytes and seconds.
    """
    begin = time.perf_counter()
    param_shapes = jax.tree.map(_abstract, params)
    state_shapes = jax.tree.map(_abstract, state)

    def compile_one(bucket: Bucket) -> jax.stages.Compiled:
        start = time.perf_counter()
        compiled = trace_step(options, bucket, param_shapes, state_shapes).lower().compile()
        memory = compiled.memory_analysis()
        log.info(
            "bucket tokens=%d rows=%d%s: %.1f MiB temporary, %.2f s",
            bucket.num_tokens,
            bucket.num_rows,
            " decode" if bucket.decode_only else "",
            (memory.temp_size_in_bytes if memory else 0) / 2**20,
            time.perf_counter() - start,
        )
        return compiled

    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        compiled = dict(zip(buckets, pool.map(compile_one, buckets), strict=True))
    log.info("%d buckets compiled in %.2f s", len(buckets), time.perf_counter() - begin)
    return compiled


def trace_step(
    options: StepOptions, bucket: Bucket, params: Any, state: StepState
) -> jax.stages.Traced:
    """Returns the step of one bucket, ready to be lowered for the devices of its mesh. Of `params`
    and `state` only shapes, dtypes and shardings matter: there may be no such devices here."""
    whole = replicated(options.mesh)
    words = batch_words(bucket, options.max_pages_per_seq)
    step = jax.jit(
        make_step(options, bucket),
        donate_argnums=1,
        out_shardings=(jax.tree.map(lambda array: array.sharding, state), whole),
    )
    return step.trace(params, state, jax.ShapeDtypeStruct((words,), jnp.int32, sharding=whole))


def compile_page_copies(
    mesh: Mesh, kv_pool: jax.Array
) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
    """Returns swap.take_pages and swap.put_pages for one pool, which the second has donated."""
    begin = time.perf_counter()
    take, put = (x.lower().compile() for x in trace_page_copies(mesh, _abstract(kv_pool)))
    log.info("page copies compiled in %.2f s", time.perf_counter() - begin)
    return take, put


def trace_page_copies(mesh: Mesh, kv_pool: Any) -> tuple[jax.stages.Traced, jax.stages.Traced]:
    """Returns swap.take_pages and swap.put_pages, ready to be lowered; see `trace_step`."""
    whole, split = replicated(mesh), page_sharding(mesh)
    L, _, *rest = kv_pool.shape
    page_ids = jax.ShapeDtypeStruct((COPY_PAGES,), jnp.int32, sharding=whole)
    page = jax.ShapeDtypeStruct((L, *rest), kv_pool.dtype, sharding=split)
    put = jax.jit(put_pages, donate_argnums=0, out_shardings=(kv_pool.sharding, whole))
    return (
        jax.jit(take_pages, out_shardings=split).trace(kv_pool, page_ids),
        put.trace(kv_pool, (page,) * COPY_PAGES, page_ids),
    )


def give_back_memory() -> None:
    """Returns what compiling used and freed to the system, which glibc would keep: hundreds of
    megabytes. Elsewhere it does nothing."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
