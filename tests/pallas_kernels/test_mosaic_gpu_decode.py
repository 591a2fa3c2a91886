"""The GPU decode kernel in Mosaic's interpreter: the float64 oracle, its properties, and races."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Backend
from pallas_kernels.kv_layout import pool_layout
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.config import GpuConfig
from tests.rpa_cases import Case, Step, assert_close, build, laid_out, oracle, plain, written_pool
from tests.rpa_properties import AttentionProperties

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11", allow_module_level=True)

from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
    reset_gpu_interpret_mode_state,
)
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention import mosaic_gpu_decode

CONFIG = GpuConfig(decode_splits=2, decode_stages=2, prefill_stages=2, prefill_block=64)


def decode(*kv_lens: int, **settings) -> Case:
    """Rows of one token, padded to shapes that share a program where nothing else differs."""
    settings = dict(dtype="bfloat16", num_heads=2, num_kv_heads=1) | settings
    case = Case(rows=tuple((n, 1) for n in kv_lens), padding_rows=0, padding_tokens=0, **settings)
    pages = case.pages_of_rows
    padding = dict(
        padding_rows=4 - len(kv_lens),
        padding_tokens=4 - len(kv_lens),
        spare_pages=32 - sum(pages),
        spare_columns=20 - max(pages),
    )
    return replace(case, **padding)


@functools.cache
def compiled(soft_cap: float | None, config: GpuConfig, races: bool):
    call = functools.partial(
        ragged_paged_attention,
        soft_cap=soft_cap,
        config=config,
        backend=Backend.MOSAIC_GPU,
        decode_only=True,
        interpret=plgpu.InterpretGPUParams(detect_races=races),
    )
    return jax.jit(call)


def run(case: Case, step: Step, config=CONFIG, races=False):
    """Returns numpy (out, pool)."""
    layout = pool_layout(Backend.MOSAIC_GPU, case.num_kv_heads, case.head_dim, case.pool_dtype)
    k_scale, v_scale = case.kv_scales
    out, pool = compiled(case.soft_cap, config, races)(
        step.q, step.k, step.v, jnp.array(laid_out(step.kv_pool, layout)), np.int32(case.layer),
        *step.arrays, scale=np.float32(case.scale), sliding_window=np.int32(case.sliding_window),
        sinks=step.sinks, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    return np.asarray(out).astype(np.float32), plain(np.asarray(pool), layout)


def check(case: Case, **settings):
    step = build(case)
    out, pool = run(case, step, **settings)
    assert_close(case, out, oracle(case, step))
    np.testing.assert_array_equal(pool[:, 1:], written_pool(case, step)[:, 1:])


CASES = {
    "block edges": decode(1, 64, 65, 300),
    "a full pool, no padding": replace(decode(64, 127, 128, 64), spare_pages=0, spare_columns=0),
    "a window shorter than the context": decode(300, 40, sliding_window=70, page_size=64),
    "a window longer than the context": decode(1, 129, sliding_window=512, head_dim=128),
    "a window of one": decode(30, 65, sliding_window=1, page_size=8),
    "a soft cap": decode(100, 40, soft_cap=2.0, num_kv_heads=2),
    "sinks, of an empty row too": decode(1, 130, sinks=True, num_heads=6, num_kv_heads=2),
    "pages of 256": decode(255, 257, page_size=256),
    "16 query heads to a KV head": decode(130, num_heads=16),
    "heads of 80": decode(70, head_dim=80),
    "heads of 256": decode(70, head_dim=256),
    "int8 pages": decode(17, 130, kv_dtype="int8", num_kv_heads=2),
    "float8 pages": decode(17, 130, kv_dtype="float8_e4m3fn", head_dim=80),
}


@pytest.mark.parametrize("name", CASES)
def test_output_and_pool_match_the_oracle(name):
    check(CASES[name])


@pytest.mark.parametrize(("splits", "stages"), [(1, 2), (3, 4)])
def test_splits_and_stages_change_nothing(splits, stages):
    config = replace(CONFIG, decode_splits=splits, decode_stages=stages)
    check(decode(40, 300, sinks=True), config=config)


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("num_splits", [1, 7, 50])
def test_each_block_that_is_seen_is_in_one_part_and_no_part_is_long(num_splits, window):
    rng = np.random.default_rng(num_splits)
    kv_lens = rng.integers(0, 2000, 30, dtype=np.int32)
    kv_lens[[3, 4, 29]] = 0, 1, 30_000  # one row has as much as all others together
    parts, ends = map(np.asarray, mosaic_gpu_decode._parts_of(kv_lens, window, num_splits))
    first = np.maximum(kv_lens - window, 0) // 64 if window else 0 * kv_lens
    last = -(-kv_lens // 64)
    begin = 0
    for row, end in enumerate(ends):
        blocks = [range(a, b) for r, a, b, _ in parts[begin:end] if r == row]
        assert [i for part in blocks for i in part] == list(range(first[row], last[row]))
        assert all(blocks), "a part of a row has no blocks"
        begin = end
    lengths = parts[:, 2] - parts[:, 1]
    assert (lengths[ends[-1] :] <= 0).all()
    assert lengths.max() <= max(2, -(-sum(last - first) // num_splits))


class TestProperties(AttentionProperties):
    run = staticmethod(run)
    case = decode(40, 9, 131)
    poisoned = tuple({"sliding_window": 24, "kv_dtype": d} for d in ("bfloat16", "float8_e4m3fn"))
    skips_what_the_window_left = True


@pytest.fixture
def plant(monkeypatch):
    """Replaces a step of the kernel; what was traced with it, and what a race left, go after."""

    def replaced(name, step):
        jax.clear_caches()
        monkeypatch.setattr(mosaic_gpu_decode, name, step)

    yield replaced
    monkeypatch.undo()
    jax.clear_caches()
    reset_gpu_interpret_mode_state()


@pytest.fixture
def reads_seen(plant):
    """Makes the race detector see what wgmma reads."""

    def read(*operands):
        for operand in operands:
            operand[...]
        plgpu.commit_smem()  # else a copy that follows would race with these reads

    plant("_before_matmul", read)


RACES = {
    "bfloat16 pages": decode(1, 37, 200),
    "a window and pages of 64": decode(200, sliding_window=70, page_size=64),
    "int8 pages": decode(200, kv_dtype="int8"),
}


def check_races(case: Case, capfd):
    check(case, races=True)
    printed = "".join(capfd.readouterr())
    assert "RACE DETECTED" not in printed  # jax 0.11 prints where 0.12 raises


@pytest.mark.parametrize("name", RACES)
@pytest.mark.usefixtures("reads_seen")
def test_no_race_is_found(name, capfd):
    check_races(RACES[name], capfd)


FAULTS = {
    "matrices multiplied before they arrive": ("_wait", lambda barrier: None),
    "blocks copied over those in use": ("_slot", lambda number, num_stages: 0 * number),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.usefixtures("reads_seen")
def test_a_planted_race_is_found(name, plant, capfd):
    plant(*FAULTS[name])
    # jax 0.11 prints the race and goes on, and may then find that nobody waited for the first copy.
    with pytest.raises(Exception, match=r"RACE DETECTED|no threads observed"):
        check_races(decode(200), capfd)


def test_a_page_id_out_of_bounds_shows_in_the_numbers(plant):
    """The interpreter itself says nothing of it."""
    plant("_page", lambda pages_ref, row, number: pages_ref[row, number] + 1000)
    with pytest.raises(AssertionError, match="numbers are wrong"):
        check(decode(200))
