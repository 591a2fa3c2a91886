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
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jserve.models.decoder import head_of
from jserve.runner.mesh import replicated
from jserve.runner.platform import compiler_options
from jserve.runner.step import (
    SCORED_TOKENS,
    StepOptions,
    StepState,
    make_choose,
    make_forward,
    make_row_sums,
    make_score,
    remember,
)
from jserve.runner.swap import COPY_PAGES, page_sharding, put_pages, take_pages
from scheduler.bucket import Bucket
from scheduler.packer import MAX_LOGIT_BIAS, batch_fields, num_words, sampling_fields

log = logging.getLogger(__name__)
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h
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


class Programs(NamedTuple):
    """All that an engine runs on its devices for steps; each is a compiled executable."""

    forward: dict[Bucket, jax.stages.Compiled]
    choose: dict[int, jax.stages.Compiled]  # by number of rows
    score: jax.stages.Compiled
    row_sums: jax.stages.Compiled
    remember: jax.stages.Compiled


def compile_steps(
    options: StepOptions, buckets: list[Bucket], params: Any, state: StepState
) -> Programs:
    """Returns the programs of all buckets. Logs each with its temporary bytes and seconds."""
    begin = time.perf_counter()
    traces = step_traces(options, buckets, jax.tree.map(_abstract, params), state)
    told = compiler_options(options.mesh.devices.flat[0].platform)

    def compile_one(name: str) -> jax.stages.Compiled:
        start = time.perf_counter()
        compiled = traces[name]().lower().compile(told)
        memory = compiled.memory_analysis()
        temp_bytes = memory.temp_size_in_bytes if memory else 0
        seconds = time.perf_counter() - start
        log.info("%s: %.1f MiB temporary, %.2f s", name, temp_bytes / 2**20, seconds)
        return compiled

    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        compiled = dict(zip(traces, pool.map(compile_one, traces), strict=True))
    log.info("%d programs compiled in %.2f s", len(compiled), time.perf_counter() - begin)
    return Programs(
        {bucket: compiled[_forward_name(bucket)] for bucket in buckets},
        {bucket.num_rows: compiled[_choose_name(bucket.num_rows)] for bucket in buckets},
        compiled["score"],
        compiled["row_sums"],
        compiled["remember"],
    )


def _forward_name(bucket: Bucket) -> str:
    kind = " decode" if bucket.decode_only else ""
    return f"forward tokens={bucket.num_tokens} rows={bucket.num_rows}{kind}"


def _choose_name(num_rows: int) -> str:
    return f"choose rows={num_rows}"


def step_traces(
    options: StepOptions, buckets: list[Bucket], params: Any, state: StepState
) -> dict[str, Callable[[], jax.stages.Traced]]:
    """Returns, by name, what traces each program of an engine's steps, the longest to compile
    first. Of `params` and `state` only shapes, dtypes and shardings matter: the devices of the mesh
    need not be there."""
    state = jax.tree.map(_abstract, state)
    largest_first = sorted(buckets, key=lambda bucket: -bucket.num_tokens)
    traces: dict[str, Callable[[], jax.stages.Traced]] = {
        _forward_name(bucket): partial(trace_forward, options, bucket, params, state)
        for bucket in largest_first
    }
    head = head_of(params, options.model)
    for num_rows in sorted({bucket.num_rows for bucket in buckets}, reverse=True):
        name = _choose_name(num_rows)
        traces[name] = partial(trace_choose, options, num_rows, head, state)
    traces["score"] = partial(trace_score, options, head)
    most_rows = max(bucket.num_rows for bucket in buckets)
    traces["row_sums"] = partial(trace_row_sums, options, most_rows)
    traces["remember"] = partial(trace_remember, options, state)
    return traces


def trace_forward(
    options: StepOptions, bucket: Bucket, params: Any, state: StepState
) -> jax.stages.Traced:
    """Returns a bucket's forward pass, ready to be lowered; see `step_traces`."""
    whole = replicated(options.mesh)
    words = num_words(batch_fields(bucket, options.max_pages_per_seq))
    forward = jax.jit(
        make_forward(options, bucket),
        donate_argnums=1,
        out_shardings=(state.kv_pool.sharding, whole),
    )
    buffer = _array((words,), jnp.int32, whole)
    return forward.trace(params, state.kv_pool, state.sampler.last_tokens, buffer)


def trace_choose(
    options: StepOptions, num_rows: int, head: Any, state: StepState
) -> jax.stages.Traced:
    """Returns the choice of a token for each of so many rows, ready to be lowered."""
    whole = replicated(options.mesh)
    model, words = options.model, num_words(sampling_fields(num_rows))
    bias_shape = num_rows, MAX_LOGIT_BIAS
    choose = jax.jit(
        make_choose(options, num_rows),
        donate_argnums=1,
        out_shardings=(jax.tree.map(lambda array: array.sharding, state.sampler), whole),
    )
    return choose.trace(
        head,
        state.sampler,
        _array((model.hidden_size, num_rows), options.dtype, whole),
        _array((words,), jnp.int32, whole),
        (_array(bias_shape, jnp.int32, whole), _array(bias_shape, jnp.float32, whole)),
        _array((num_rows, -(-model.vocab_size // 32)), jnp.uint32, whole),
    )


def trace_score(options: StepOptions, head: Any) -> jax.stages.Traced:
    """Returns the rating of a prompt's tokens, ready to be lowered."""
    whole = replicated(options.mesh)
    score = jax.jit(make_score(options), out_shardings=whole)
    tokens = _array((options.model.hidden_size, options.max_tokens), options.dtype, whole)
    start, target_ids = _array((), jnp.int32, whole), _array((SCORED_TOKENS,), jnp.int32, whole)
    return score.trace(head, tokens, start, target_ids)


def trace_row_sums(options: StepOptions, num_rows: int) -> jax.stages.Traced:
    """Returns the sums of a step's hidden states, ready to be lowered."""
    whole = replicated(options.mesh)
    tokens = _array((options.model.hidden_size, options.max_tokens), options.dtype, whole)
    program = jax.jit(make_row_sums(num_rows), out_shardings=whole)
    return program.trace(tokens, _array((options.max_tokens,), jnp.int32, whole))


def trace_remember(options: StepOptions, state: StepState) -> jax.stages.Traced:
    """Returns the replacement of one slot's token counts, ready to be lowered."""
    whole, counts = replicated(options.mesh), state.sampler.counts
    program = jax.jit(remember, donate_argnums=0, out_shardings=counts.sharding)
    row = _array(counts.shape[1:], counts.dtype, whole)
    return program.trace(counts, _array((), jnp.int32, whole), row)


def _array(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def compile_page_copies(
    mesh: Mesh, kv_pool: jax.Array
) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
    """Returns swap.take_pages and swap.put_pages for one pool, which the second has donated."""
    begin = time.perf_counter()
    take, put = (x.lower().compile() for x in trace_page_copies(mesh, _abstract(kv_pool)))
    log.info("page copies compiled in %.2f s", time.perf_counter() - begin)
    return take, put


def trace_page_copies(mesh: Mesh, kv_pool: Any) -> tuple[jax.stages.Traced, jax.stages.Traced]:
    """Returns swap.take_pages and swap.put_pages, ready to be lowered; see `step_traces`."""
    whole, split = replicated(mesh), page_sharding(mesh)
    L, _, *rest = kv_pool.shape
    page_ids = jax.ShapeDtypeStruct((COPY_PAGES,), jnp.int32, sharding=whole)
    page = jax.ShapeDtypeStruct((L, *rest), kv_pool.dtype, sharding=split)
    put = jax.jit(put_pages, donate_argnums=0, out_shardings=(kv_pool.sharding, whole))
    return (
        jax.jit(take_pages, out_shardings=split).trace(kv_pool, page_ids),
        put.trace(kv_pool, (page,) * COPY_PAGES, page_ids),
    )


def keep_freed_memory() -> None:
    """Has glibc keep what is freed for whatever is allocated next, on a CPU the temporary memory of
    each program, which is one block. Those above 32 MiB come from the system each time otherwise,
    and to touch new pages takes longer than most of the sampler.

    Has to come before jax starts its threads, whose own arenas hold no block above 64 MiB. Does
    nothing without glibc, or where jax may find other devices.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(map(find_spec, ("jax_plugins", "libtpu"))):
        mallopt(_M_MMAP_THRESHOLD, 2**31 - 1)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_ARENA_MAX, 1)


def give_back_memory() -> None:
    """Returns what compiling used and freed to the system, which glibc would keep: hundreds of
    megabytes. Elsewhere it does nothing."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
