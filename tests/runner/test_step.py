"""The compiled steps: packing and unpacking agree, padding is harmless, state is donated."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.models.decoder import head_of
from jserve.models.head_layout import head_layout
from jserve.runner.compile import compile_steps
from jserve.runner.kv_cache import layout_of, make_pool
from jserve.runner.mesh import make_mesh
from jserve.runner.runner import Runner
from jserve.runner.step import (
    StepOptions,
    StepState,
    make_row_sums,
    make_sampler_state,
    unpack,
)
from pallas_kernels import kv_layout
from pallas_kernels.dispatch import Backend
from scheduler import page_pool
from scheduler.bucket import Bucket, make_buckets
from scheduler.config import SchedulerConfig
from scheduler.packer import PackedBatch, Packer, batch_fields, num_words, sampling_fields, views
from scheduler.request import Request, SamplingView
from scheduler.scheduler import Scheduler
from tests.models.reference import reference_model

PAGE_SIZE, MAX_MODEL_LEN, SLOTS = 8, 64, 3
LIMITS = SchedulerConfig(
    max_num_seqs=SLOTS,
    max_num_batched_tokens=16,
    prefill_chunk=16,
    page_size=PAGE_SIZE,
    num_pages=25,
    max_model_len=MAX_MODEL_LEN,
)
SMALL, LARGE = Bucket(SLOTS, SLOTS, True), Bucket(64, 5, False)
MIXED = Bucket(16, SLOTS, False)


def state_of(config, num_pages=LIMITS.num_pages):
    mesh = make_mesh(1)
    layout = layout_of(Backend.XLA, config, head_layout(config), jnp.float32)
    pool = make_pool(config, layout, jnp.float32, num_pages, PAGE_SIZE, mesh)
    return StepState(pool, make_sampler_state(SLOTS, config.vocab_size))


def compiled_steps(buckets, state=None):
    """(params, programs) of the tiny llama."""
    model = reference_model("llama")
    params = model.params()
    options = StepOptions(
        model.config,
        make_mesh(1),
        Backend.XLA,
        "switched",
        LIMITS.max_pages_per_seq,
        max_tokens=max(bucket.num_tokens for bucket in buckets),
        dtype=jnp.dtype(jnp.float32),
    )
    return params, compile_steps(options, buckets, params, state or state_of(model.config))


@pytest.fixture(scope="module")
def compiled():
    return compiled_steps([SMALL, MIXED, LARGE])


def make_runner(compiled) -> Runner:
    params, programs = compiled
    config = reference_model("llama").config
    return Runner(params, head_of(params, config), state_of(config), programs)


def start(runner: Runner, batch: PackedBatch):
    handle = runner.dispatch(batch)
    runner.choose(handle)
    return handle


def run(compiled, prompts, buckets, num_tokens=4) -> list[list[int]]:
    """Greedy tokens, every step in one of `buckets`."""
    runner = make_runner(compiled)
    scheduler, packer = Scheduler(LIMITS), Packer(LIMITS, buckets)
    requests = [Request(str(i), p, SamplingView(num_tokens)) for i, p in enumerate(prompts)]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_unfinished:
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, start(runner, packer.pack(plan)).result().token_ids)
    return [request.output_token_ids for request in requests]


def test_unpacking_on_the_device_mirrors_packing_on_the_host():
    rng = np.random.default_rng(0)
    for fields in (batch_fields(Bucket(6, 3, False), 4), sampling_fields(3)):
        buffer = rng.integers(0, 2**30, num_words(fields), dtype=np.int32)
        packed = views(buffer, fields)
        unpacked = jax.jit(partial(unpack, fields=fields))(buffer)
        assert set(unpacked) == set(packed)
        for name, array in packed.items():
            assert unpacked[name].dtype == array.dtype
            np.testing.assert_array_equal(unpacked[name], array)


def test_tokens_do_not_depend_on_the_bucket_and_its_padding(compiled):
    prompts = [[5], [7, 8, 9, 10], list(range(20, 31))]
    exact = run(compiled, prompts, [SMALL, MIXED, LARGE])
    assert run(compiled, prompts, [LARGE]) == exact
    assert [run(compiled, [p], [SMALL, MIXED, LARGE])[0] for p in prompts] == exact


def test_a_token_that_only_the_device_knows_is_read_from_its_slot(compiled):
    """A second step, planned before the first one's token is known, continues the same text."""
    prompt = [3, 1, 4, 1, 5]
    runner = make_runner(compiled)
    scheduler, packer = Scheduler(LIMITS), Packer(LIMITS, [SMALL, MIXED])
    request = Request("overlapped", prompt, SamplingView(4))
    scheduler.add(request)
    plans = [scheduler.schedule(0.0)]
    handles = [start(runner, packer.pack(plans[0]))]
    for _ in range(3):
        plans.append(scheduler.schedule(0.0))
        assert plans[-1].rows[0].reads_last_token
        handles.append(start(runner, packer.pack(plans[-1])))
    for plan, handle in zip(plans, handles, strict=True):
        scheduler.update(plan, handle.result().token_ids)
    assert request.output_token_ids == run(compiled, [prompt], [SMALL, MIXED])[0]


def test_padding_rows_write_nothing_but_the_null_page_and_slot(compiled):
    runner = make_runner(compiled)
    scheduler, packer = Scheduler(LIMITS), Packer(LIMITS, [LARGE])
    request = Request("alone", [9, 8, 7], SamplingView(1))
    scheduler.add(request)
    plan = scheduler.schedule(0.0)
    pages = scheduler.slots.pages(request).tolist()
    start(runner, packer.pack(plan))
    state = runner.state
    written = {int(p) for p in np.flatnonzero(np.abs(state.kv_pool).sum(axis=(0, 2, 3, 4)))}
    assert written <= {0, *pages}
    assert pages[0] in written
    assert not np.asarray(state.kv_pool)[:, pages[0], 3:].any()  # nothing behind its 3 tokens
    slots = np.flatnonzero(np.asarray(state.sampler.last_tokens))
    assert set(slots.tolist()) <= {request.slot, SLOTS}


def test_the_pool_is_donated_and_updated_in_place(compiled):
    _, programs = compiled
    runner = make_runner(compiled)
    state = runner.state
    for bucket, program in programs.forward.items():
        aliased = program.memory_analysis().alias_size_in_bytes
        assert aliased >= state.kv_pool.nbytes, bucket
    for program in (*programs.choose.values(), programs.remember):
        aliased = program.memory_analysis().alias_size_in_bytes
        assert aliased >= state.sampler.counts.nbytes
    scheduler, packer = Scheduler(LIMITS), Packer(LIMITS, [SMALL])
    scheduler.add(Request("one", [1], SamplingView(1)))
    before = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(state)]
    start(runner, packer.pack(scheduler.schedule(0.0)))
    assert all(array.is_deleted() for array in jax.tree.leaves(state))
    assert [array.unsafe_buffer_pointer() for array in jax.tree.leaves(runner.state)] == before


def test_no_bucket_copies_the_pool():
    """XLA on a CPU once laid out the pool anew in each step of one row: 1750 ms, not 22."""
    state = state_of(reference_model("llama").config, num_pages=5000)
    _, programs = compiled_steps(make_buckets(4, 16), state)
    assert Bucket(1, 1, True) in programs.forward
    for bucket, program in programs.forward.items():
        assert program.memory_analysis().temp_size_in_bytes < state.kv_pool.nbytes / 4, bucket


def test_row_sums_are_each_rows_own():
    tokens = np.arange(12, dtype=np.float32).reshape(2, 6)
    tokens[1, 4], tokens[0, 5] = np.nan, np.inf
    found = jax.jit(make_row_sums(4))(tokens, np.array([1, 0, 1, -1, 3, -1], np.int32))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, [[1, 7], [2, 14], [0, 0], [np.nan, np.nan]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_row_sums_lose_no_more_than_float32_does(dtype):
    tokens = jax.random.normal(jax.random.key(0), (8, 1024)).astype(dtype)
    [found] = jax.jit(make_row_sums(1))(tokens, np.zeros(1024, np.int32))
    expected = np.asarray(tokens, np.float64).sum(axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_scheduler_and_kernels_mean_the_same_null_page():
    """Neither may import the other, so each names it."""
    assert page_pool.NULL_PAGE == kv_layout.NULL_PAGE
