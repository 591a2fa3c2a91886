"""The compiled steps: packing and unpacking agree, padding is harmless, state is donated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.models.head_layout import head_layout
from jserve.runner.compile import compile_steps
from jserve.runner.kv_cache import layout_of, make_pool
from jserve.runner.mesh import make_mesh
from jserve.runner.runner import Runner
from jserve.runner.step import StepOptions, StepState, unpack
from pallas_kernels import kv_layout
from pallas_kernels.dispatch import Backend
from scheduler import page_pool
from scheduler.bucket import Bucket, make_buckets
from scheduler.config import SchedulerConfig
from scheduler.packer import Packer, batch_words, views
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
    return StepState(pool, jnp.zeros(SLOTS + 1, jnp.int32))


@pytest.fixture(scope="module")
def compiled():
    """(params, steps) of the tiny llama, for three buckets."""
    model = reference_model("llama")
    params = model.params()
    options = StepOptions(
        model.config, make_mesh(1), Backend.XLA, "switched", LIMITS.max_pages_per_seq
    )
    buckets = [SMALL, MIXED, LARGE]
    return params, compile_steps(options, buckets, params, state_of(model.config))


def run(compiled, prompts, buckets, num_tokens=4) -> list[list[int]]:
    """Greedy tokens, every step in one of `buckets`."""
    params, steps = compiled
    runner = Runner(params, state_of(reference_model("llama").config), steps)
    scheduler, packer = Scheduler(LIMITS), Packer(LIMITS, buckets)
    requests = [Request(str(i), p, SamplingView(num_tokens)) for i, p in enumerate(prompts)]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_unfinished:
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, runner.dispatch(packer.pack(plan)).result().token_ids)
    return [request.output_token_ids for request in requests]


def test_unpacking_on_the_device_mirrors_packing_on_the_host():
    bucket, J = Bucket(6, 3, False), 4
    rng = np.random.default_rng(0)
    buffer = rng.integers(0, 2**30, batch_words(bucket, J), dtype=np.int32)
    packed = views(buffer, bucket, J)
    unpacked = jax.jit(lambda b: unpack(b, bucket, J))(buffer)
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
    params, steps = compiled
    prompt = [3, 1, 4, 1, 5]
    runner = Runner(params, state_of(reference_model("llama").config), steps)
    scheduler, packer = Scheduler(LIMITS), Packer(LIMITS, [SMALL, MIXED])
    request = Request("overlapped", prompt, SamplingView(4))
    scheduler.add(request)
    plans = [scheduler.schedule(0.0)]
    handles = [runner.dispatch(packer.pack(plans[0]))]
    for _ in range(3):
        plans.append(scheduler.schedule(0.0))
        assert plans[-1].rows[0].reads_last_token
        handles.append(runner.dispatch(packer.pack(plans[-1])))
    for plan, handle in zip(plans, handles, strict=True):
        scheduler.update(plan, handle.result().token_ids)
    assert request.output_token_ids == run(compiled, [prompt], [SMALL, MIXED])[0]


def test_padding_rows_write_nothing_but_the_null_page_and_slot(compiled):
    params, steps = compiled
    state = state_of(reference_model("llama").config)
    scheduler, packer = Scheduler(LIMITS), Packer(LIMITS, [LARGE])
    request = Request("alone", [9, 8, 7], SamplingView(1))
    scheduler.add(request)
    plan = scheduler.schedule(0.0)
    pages = scheduler.slots.pages(request).tolist()
    state, _ = steps[LARGE](params, state, packer.pack(plan).buffer)
    written = {int(p) for p in np.flatnonzero(np.abs(state.kv_pool).sum(axis=(0, 2, 3, 4)))}
    assert written <= {0, *pages}
    assert pages[0] in written
    assert not np.asarray(state.kv_pool)[:, pages[0], 3:].any()  # nothing behind its 3 tokens
    slots = np.flatnonzero(np.asarray(state.last_tokens))
    assert set(slots.tolist()) <= {request.slot, SLOTS}


def test_the_pool_is_donated_and_updated_in_place(compiled):
    params, steps = compiled
    state = state_of(reference_model("llama").config)
    pool_bytes = state.kv_pool.nbytes
    for bucket, step in steps.items():
        assert step.memory_analysis().alias_size_in_bytes >= pool_bytes, bucket
    scheduler, packer = Scheduler(LIMITS), Packer(LIMITS, [SMALL])
    scheduler.add(Request("one", [1], SamplingView(1)))
    before = state.kv_pool.unsafe_buffer_pointer()
    new, _ = steps[SMALL](params, state, packer.pack(scheduler.schedule(0.0)).buffer)
    assert state.kv_pool.is_deleted()
    assert new.kv_pool.unsafe_buffer_pointer() == before


def test_no_bucket_copies_the_pool():
    """XLA on a CPU once laid out the pool anew in each step of one row: 1750 ms, not 22."""
    model = reference_model("llama")
    options = StepOptions(
        model.config, make_mesh(1), Backend.XLA, "switched", LIMITS.max_pages_per_seq
    )
    state = state_of(model.config, num_pages=5000)
    steps = compile_steps(options, make_buckets(4, 16), model.params(), state)
    assert Bucket(1, 1, True) in steps
    for bucket, step in steps.items():
        assert step.memory_analysis().temp_size_in_bytes < state.kv_pool.nbytes / 4, bucket


def test_scheduler_and_kernels_mean_the_same_null_page():
    """Neither may import the other, so each names it."""
    assert page_pool.NULL_PAGE == kv_layout.NULL_PAGE
