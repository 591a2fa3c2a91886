"""Pages that leave for host memory and come back: which bits end where, who waits, what is held."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.models.decoder import head_of
from jserve.runner.compile import compile_page_copies, compile_steps, on_each_compilation
from jserve.runner.mesh import make_mesh, pool_sharding
from jserve.runner.runner import Runner
from jserve.runner.step import StepOptions
from jserve.runner.swap import COPY_PAGES, MOST_CALLS_ON_THEIR_WAY, SwapSpace
from pallas_kernels.dispatch import Backend
from scheduler.bucket import make_buckets
from scheduler.packer import NO_COPIES, Packer, batch_fields, views
from scheduler.request import Request, SamplingView
from scheduler.scheduler import Scheduler
from tests.models.reference import reference_model
from tests.runner.test_step import LIMITS, state_of

ROOT = Path(__file__).parents[2]
L, P, PAGE_SIZE, R, W = 3, 60, 4, 4, 8
NUM_HOST_PAGES = 50
DTYPES = ["float32", "bfloat16", "int8", "float8_e4m3fn"]
MANY = 2 * COPY_PAGES + 3


def bits_of(array) -> np.ndarray:
    return np.asarray(array).view(np.uint8)


def pool_of(dtype: str = "float32", mesh=None) -> jax.Array:
    """A pool of random bits, whatever they mean as numbers."""
    dtype = jnp.dtype(dtype)
    shape = (L, P, PAGE_SIZE, R, W * dtype.itemsize)
    values = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8).view(dtype)
    if jnp.issubdtype(dtype, jnp.floating) and jax.__version_info__ < (0, 11):
        values[np.isnan(values)] = np.nan  # through float32 on a CPU, which changes all others
    return jax.device_put(values, pool_sharding(mesh or make_mesh(1)))


def space_of(kv_pool: jax.Array, num_host_pages: int = NUM_HOST_PAGES) -> SwapSpace:
    mesh = kv_pool.sharding.mesh
    return SwapSpace(mesh, kv_pool, *compile_page_copies(mesh, kv_pool), num_host_pages)


def copies(sources, targets) -> np.ndarray:
    return np.stack([np.asarray(sources), np.asarray(targets)], axis=1).astype(np.int32)


def distinct(seed: int, most: int, count: int, least: int = 0) -> np.ndarray:
    return least + np.random.default_rng(seed).permutation(most - least)[:count]


@pytest.fixture
def compilations():
    seen: list[int] = []
    on_each_compilation(lambda: seen.append(1))
    return seen


@pytest.mark.parametrize("count", [1, COPY_PAGES - 1, COPY_PAGES, MANY])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_come_back_elsewhere_bit_for_bit_and_no_other_page_changes(dtype, count):
    kv_pool = pool_of(dtype)
    before, space = bits_of(kv_pool).copy(), space_of(kv_pool)
    sources, host, targets = (distinct(s, P, count, 1) for s in range(3))
    host = distinct(1, NUM_HOST_PAGES, count)
    kv_pool = space.move(kv_pool, copies(sources, host), NO_COPIES)
    kv_pool = space.move(kv_pool, NO_COPIES, copies(host, targets))
    expected = before.copy()
    expected[:, targets] = before[:, sources]
    np.testing.assert_array_equal(bits_of(kv_pool)[:, 1:], expected[:, 1:])


def test_pages_that_leave_and_come_back_in_one_batch_trade_places():
    """What leaves is read before what comes in is written, however far the first has got."""
    kv_pool = pool_of()
    before, space = bits_of(kv_pool).copy(), space_of(kv_pool)
    sources, host = distinct(3, P, MANY, 1), distinct(4, NUM_HOST_PAGES, MANY)
    targets = np.roll(sources, 1)
    kv_pool = space.move(kv_pool, copies(sources, host), copies(host, targets))
    expected = before.copy()
    expected[:, targets] = before[:, sources]
    np.testing.assert_array_equal(bits_of(kv_pool)[:, 1:], expected[:, 1:])


def test_a_host_page_holds_what_came_last():
    kv_pool = pool_of()
    before, space = bits_of(kv_pool).copy(), space_of(kv_pool, num_host_pages=1)
    kv_pool = space.move(kv_pool, copies([7], [0]), NO_COPIES)
    kv_pool = space.move(kv_pool, copies([8], [0]), copies([0], [9]))
    np.testing.assert_array_equal(bits_of(kv_pool)[:, 9], before[:, 8])
    kv_pool = space.move(kv_pool, copies([7], [0]), NO_COPIES)
    kv_pool = space.move(kv_pool, NO_COPIES, copies([0], [10]))
    np.testing.assert_array_equal(bits_of(kv_pool)[:, 10], before[:, 7])


@pytest.mark.parametrize(
    ("out", "back"),
    [
        ([[P, 0]], NO_COPIES),
        ([[1, NUM_HOST_PAGES]], NO_COPIES),
        ([[1, -1]], NO_COPIES),
        ([[1, 0]], [[0, P]]),
        ([[1, 0]], [[0, 0]]),
        ([[0, 0]], NO_COPIES),
        ([[1, 0]], [[1, 2]]),
    ],
)
def test_ids_that_name_no_page_or_an_empty_one_are_caught_on_the_host(out, back):
    kv_pool = pool_of()
    with pytest.raises(AssertionError):
        space_of(kv_pool).move(kv_pool, np.array(out), np.array(back))


def test_no_more_is_held_than_the_pages_that_are_out_and_those_on_their_way():
    kv_pool = pool_of()
    space = space_of(kv_pool, num_host_pages=MANY)
    page_bytes = kv_pool.nbytes // P
    on_their_way = COPY_PAGES * MOST_CALLS_ON_THEIR_WAY * page_bytes
    rng = np.random.default_rng(5)
    assert host_bytes() == 0
    for _ in range(20):
        count = int(rng.integers(1, MANY + 1))
        host = rng.permutation(MANY)[:count]
        kv_pool = space.move(kv_pool, copies(1 + rng.permutation(P - 1)[:count], host), NO_COPIES)
        assert host_bytes() <= MANY * page_bytes + on_their_way
        kv_pool = space.move(kv_pool, NO_COPIES, copies(host, 1 + rng.permutation(P - 1)[:count]))
        assert host_bytes() <= (MANY - count) * page_bytes + on_their_way


def host_bytes() -> int:
    live = jax.live_arrays()
    return sum(a.nbytes for a in live if a.sharding.memory_kind == "pinned_host")


@jax.jit
def slow(kv_pool):
    """A step of about half a second, which changes nothing."""
    x = jnp.full((1000, 1000), 1e-3)
    y = jax.lax.fori_loop(0, 50, lambda _, y: y @ x, x)
    zero = (y[0, 0] > 1).astype(jnp.int32)
    return jax.lax.dynamic_update_slice_in_dim(kv_pool, kv_pool[:, :1], zero, axis=1)


def test_copies_do_not_wait_for_the_step_before_them():
    kv_pool = pool_of()
    before, space = bits_of(kv_pool).copy(), space_of(kv_pool)
    slow(kv_pool).block_until_ready()
    count = COPY_PAGES * MOST_CALLS_ON_THEIR_WAY // 2
    sources, host = distinct(6, P, count, 1), distinct(7, NUM_HOST_PAGES, count)
    targets = np.roll(sources, 1)
    kv_pool = space.move(slow(kv_pool), copies(sources, host), copies(host, targets))
    assert not kv_pool.is_ready()
    np.testing.assert_array_equal(bits_of(kv_pool)[:, targets], before[:, sources])


def test_more_calls_than_the_device_should_hold_wait_for_the_oldest():
    kv_pool = pool_of()
    space = space_of(kv_pool)
    host = np.arange(COPY_PAGES * (MOST_CALLS_ON_THEIR_WAY + 1))
    space.move(slow(kv_pool), copies(1 + host, host), NO_COPIES)
    assert all(page.is_ready() for page in space._pages[:COPY_PAGES])


def test_warm_up_measures_a_page_and_changes_none():
    kv_pool = pool_of()
    before, space = bits_of(kv_pool).copy(), space_of(kv_pool)
    assert space.seconds_per_page == 0
    kv_pool = space.warm_up(kv_pool)
    assert 0 < space.seconds_per_page < 1
    np.testing.assert_array_equal(bits_of(kv_pool), before)


def test_the_pool_is_changed_in_place_and_copied_by_neither_program():
    kv_pool = pool_of()
    take, put = compile_page_copies(kv_pool.sharding.mesh, kv_pool)
    for program, aliased in ((take, 0), (put, kv_pool.nbytes)):
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes == aliased
        assert memory.temp_size_in_bytes <= COPY_PAGES * kv_pool.nbytes / P
    space = space_of(kv_pool)
    kv_pool = space.warm_up(kv_pool)  # the first pool was numpy's
    place = kv_pool.unsafe_buffer_pointer()
    moved = space.move(kv_pool, copies([1], [0]), copies([0], [2]))
    assert moved.unsafe_buffer_pointer() == place


@pytest.fixture(scope="module")
def compiled():
    """(params, buckets, steps) of the tiny llama."""
    model = reference_model("llama")
    params, buckets = model.params(), make_buckets(3, 16)
    options = StepOptions(
        model.config,
        make_mesh(1),
        Backend.XLA,
        "switched",
        LIMITS.max_pages_per_seq,
        max_tokens=16,
        dtype=jnp.dtype(jnp.float32),
    )
    return params, buckets, compile_steps(options, buckets, params, state_of(model.config))


def run(compiled, prompts, *, shuffled: bool) -> list[list[int]]:
    """Greedy tokens; if `shuffled`, all pages trade places through the host before each step."""
    params, buckets, steps = compiled
    config = reference_model("llama").config
    state = state_of(config)
    swap = space_of(state.kv_pool, LIMITS.num_pages)
    state = state._replace(kv_pool=swap.warm_up(state.kv_pool))
    runner = Runner(params, head_of(params, config), state, steps, swap)
    scheduler, packer = Scheduler(LIMITS), Packer(LIMITS, buckets)
    requests = [Request(str(i), p, SamplingView(9)) for i, p in enumerate(prompts)]
    for request in requests:
        scheduler.add(request)
    rng = np.random.default_rng(8)
    place = np.arange(LIMITS.num_pages)  # of each page that the scheduler knows
    compilations: list[int] = []
    on_each_compilation(lambda: compilations.append(1))
    while scheduler.has_unfinished:
        plan = scheduler.schedule(0.0)
        batch = packer.pack(plan)
        if shuffled:
            before, place = place, np.append(0, 1 + rng.permutation(LIMITS.num_pages - 1))
            host = rng.permutation(LIMITS.num_pages)[1:]
            batch = dataclasses.replace(
                batch,
                copies_out=copies(before[1:], host),
                copies_in=copies(host, place[1:]),
            )
            fields = batch_fields(batch.bucket, LIMITS.max_pages_per_seq)
            pages = views(batch.buffer, fields)["page_indices"]
            pages[:] = place[pages]
        handle = runner.dispatch(batch)
        runner.choose(handle)
        scheduler.update(plan, handle.result().token_ids)
    assert not compilations
    return [request.output_token_ids for request in requests]


def test_steps_between_copies_give_the_same_tokens_and_compile_nothing(compiled):
    prompts = [[5], list(range(20, 51)), [7, 8, 9, 10]]
    assert run(compiled, prompts, shuffled=True) == run(compiled, prompts, shuffled=False)


def test_a_runner_without_a_swap_space_moves_no_pages(compiled):
    params, buckets, steps = compiled
    scheduler, packer = Scheduler(LIMITS), Packer(LIMITS, buckets)
    scheduler.add(Request("one", [1], SamplingView(1)))
    batch = packer.pack(scheduler.schedule(0.0))
    config = reference_model("llama").config
    runner = Runner(params, head_of(params, config), state_of(config), steps)
    with pytest.raises(AssertionError, match="swap space"):
        runner.dispatch(dataclasses.replace(batch, copies_out=copies([1], [0])))


TWO_DEVICES = """
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
from jserve.runner.compile import on_each_compilation
from jserve.runner.mesh import make_mesh
from tests.runner.test_swap import *
for dtype in DTYPES:
    kv_pool = pool_of(dtype, make_mesh(2))
    assert kv_pool.addressable_shards[0].data.shape[3] == R // 2
    for program in compile_page_copies(make_mesh(2), kv_pool):
        assert not [w for w in ("all-", "collective-permute") if w in program.as_text()]
    before, space = bits_of(kv_pool).copy(), space_of(kv_pool)
    kv_pool, compilations = space.warm_up(kv_pool), []
    on_each_compilation(lambda: compilations.append(1))
    sources, host, targets = distinct(0, P, MANY, 1), np.arange(MANY), distinct(2, P, MANY, 1)
    kv_pool = space.move(kv_pool, copies(sources, host), NO_COPIES)
    for page in space._pages[:MANY]:
        assert page.sharding.memory_kind == "pinned_host" and len(page.addressable_shards) == 2
        assert page.addressable_shards[1].data.shape[2] == R // 2
    kv_pool = space.move(kv_pool, NO_COPIES, copies(host, targets))
    assert not compilations and kv_pool.sharding == pool_sharding(make_mesh(2))
    expected = before.copy()
    expected[:, targets] = before[:, sources]
    np.testing.assert_array_equal(bits_of(kv_pool)[:, 1:], expected[:, 1:])
"""


def test_a_pool_split_over_two_devices_comes_back_as_exactly_and_each_part_moves_alone():
    """In a process of its own, as the number of devices is fixed once jax has started."""
    command = [sys.executable, "-c", TWO_DEVICES]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stderr
