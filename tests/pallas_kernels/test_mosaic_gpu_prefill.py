"""The GPU prefill kernel in Mosaic's interpreter: the float64 oracle, its properties, and races."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Backend
from pallas_kernels.kv_layout import pool_layout
from pallas_kernels.ragged_paged_attention.config import GpuConfig
from tests.rpa_cases import Case, Step, assert_close, build, laid_out, oracle, written_pool
from tests.rpa_properties import AttentionProperties

if jax.__version_info__ < (0, 11):
    pytest.skip("the GPU kernels need jax 0.11", allow_module_level=True)

from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
    reset_gpu_interpret_mode_state,
)
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention import mosaic_gpu_prefill

CONFIG = GpuConfig(
    decode_splits=1, decode_stages=2, prefill_stages=2, prefill_block=64, prefill_programs=2
)
UNTOUCHED = 7.0  # what the output holds before


def prefill(*rows: tuple[int, int], **settings) -> Case:
    """Chunks of bfloat16, padded to shapes that share a program where nothing else differs."""
    settings = dict(dtype="bfloat16", num_heads=2, num_kv_heads=1) | settings
    case = Case(rows=rows, padding_rows=0, padding_tokens=0, **settings)
    pages = case.pages_of_rows
    padding = dict(
        padding_rows=4 - len(rows),
        padding_tokens=-sum(q_len for _, q_len in rows) % 80,
        spare_pages=-sum(pages) % 32,
        spare_columns=-max(pages) % 20,
    )
    return replace(case, **padding)


@functools.cache
def compiled(soft_cap: float | None, config: GpuConfig, races: bool):
    call = functools.partial(
        mosaic_gpu_prefill.prefill,
        soft_cap=soft_cap,
        config=config,
        interpret=plgpu.InterpretGPUParams(detect_races=races),
    )
    return jax.jit(call)


def run(case: Case, step: Step, pool: np.ndarray | None = None, config=CONFIG, races=False):
    """Returns numpy `[T, N, H]`; `pool` has this step's rows written, and is its own by default."""
    layout = pool_layout(Backend.MOSAIC_GPU, case.num_kv_heads, case.head_dim, case.pool_dtype)
    k_scale, v_scale = np.repeat(case.kv_scales, case.num_heads // case.num_kv_heads, axis=1)
    q = step.q.astype(np.float32) * (case.scale * k_scale[:, None])
    q = layout.queries(jnp.array(q.astype(step.q.dtype)))
    pool = laid_out(written_pool(case, step) if pool is None else pool, layout)
    sinks = None if step.sinks is None else step.sinks.reshape(case.num_kv_heads, -1)
    out = compiled(case.soft_cap, config, races)(
        q, jnp.full_like(q, UNTOUCHED), jnp.array(pool), np.int32(case.layer), *step.arrays,
        window=np.int32(case.sliding_window), sinks=sinks,
    )  # fmt: skip
    return np.asarray(layout.outputs(out)).astype(np.float32) * v_scale[:, None]


def mine(step: Step) -> slice:
    """The tokens that prefill answers for."""
    decode_end, _, num_seqs = step.distribution
    return slice(step.cu_q_lens[decode_end], step.cu_q_lens[num_seqs])


def check(case: Case, **settings):
    step = build(case)
    out = run(case, step, **settings)
    assert_close(case, out[mine(step)], oracle(case, step)[mine(step)])


LONG = ((150, 40), (60, 33))
CASES = {
    "ragged chunks that start at any token": prefill((200, 64), (90, 9), (5, 5), (65, 2)),
    "one token, alone in its context and not": prefill((1, 1), (130, 1), distribution=(0, 2)),
    "rows of any length, and none": prefill((60, 20), (21, 1), (44, 0), (40, 30)),
    "page edges": prefill((15, 15), (16, 16), (17, 17), (33, 2)),
    "a context of whole KV blocks": prefill((128, 70)),
    "more tiles than thread blocks": prefill((150, 150), (100, 70), num_heads=8, num_kv_heads=2),
    "a window shorter than the context": prefill((300, 70), (64, 3), sliding_window=30),
    "a window of one": prefill(*LONG, sliding_window=1, page_size=8),
    "a soft cap": prefill(*LONG, soft_cap=2.0),
    "sinks": prefill(*LONG, sinks=True, num_heads=6, num_kv_heads=2),
    "16 query heads to a KV head": prefill((70, 20), (9, 9), num_heads=16),
    "pages of 256": prefill((300, 40), (33, 33), page_size=256),
    "heads of 80": prefill(*LONG, head_dim=80),
    "heads of 256": prefill(*LONG, head_dim=256, page_size=64),
    "int8 pages": prefill(*LONG, kv_dtype="int8", num_kv_heads=2),
    "float8 pages": prefill(*LONG, kv_dtype="float8_e4m3fn", head_dim=80),
}


@pytest.mark.parametrize("name", CASES)
def test_output_matches_the_oracle(name):
    check(CASES[name])


@pytest.mark.parametrize(("block", "stages"), [(128, 2), (64, 3)])
def test_blocks_and_stages_change_nothing(block, stages):
    config = replace(CONFIG, prefill_block=block, prefill_stages=stages, prefill_programs=1)
    check(prefill((300, 40), (130, 30), sinks=True), config=config)


@pytest.mark.parametrize("change", [dict(prefill_stages=1), dict(prefill_block=96)])
def test_blocks_that_the_kernel_cannot_take_are_refused_with_the_remedy(change):
    with pytest.raises(ValueError, match="must be a multiple of 64"):
        check(prefill((70, 20)), config=replace(CONFIG, **change))


def test_tokens_of_other_rows_are_left_alone():
    case = prefill((40, 1), (9, 1), (70, 20))
    step = build(case)
    out = run(case, step)
    assert (np.delete(out, np.r_[mine(step)], axis=0) == UNTOUCHED).all()
    assert step.distribution[0] == 2


class TestProperties(AttentionProperties):
    run = staticmethod(lambda case, step: (run(case, step), None))
    case = prefill((131, 40), (40, 9))
    poisoned = tuple({"sliding_window": 24, "kv_dtype": d} for d in ("bfloat16", "float8_e4m3fn"))
    skips_what_the_window_left = True


@pytest.mark.parametrize("chunk", [7, 64])
def test_splitting_a_prompt_into_chunks_changes_nothing_o104(chunk):
    """All chunks in one step, as rows of one pool: each sees what those before it have written."""
    whole = prefill((75, 75))
    step = build(whole)
    ends = [*range(chunk, 75, chunk), 75]
    starts = [0, *ends[:-1]]
    case = replace(whole, rows=tuple((end, end - s) for s, end in zip(starts, ends, strict=True)))
    case = replace(case, padding_rows=0)
    parts = replace(
        step,
        kv_lens=np.asarray(ends, np.int32),
        page_indices=np.repeat(step.page_indices[:1], len(ends), axis=0),
        cu_q_lens=np.asarray([0, *ends], np.int32),
        distribution=np.asarray([0, len(ends), len(ends)], np.int32),
    )
    pool = written_pool(whole, step)
    together, apart = run(whole, step, pool), run(case, parts, pool)
    assert_close(whole, apart[:75], together[:75])


@pytest.fixture
def plant(monkeypatch):
    """Replaces a step of the kernel; what was traced with it, and what a race left, go after."""

    def replaced(name, step):
        jax.clear_caches()
        monkeypatch.setattr(mosaic_gpu_prefill, name, step)

    yield replaced
    monkeypatch.undo()
    jax.clear_caches()
    reset_gpu_interpret_mode_state()


@pytest.fixture
def reads_seen(plant):
    """Makes the race detector see what wgmma reads."""

    def read_and_multiply(acc, a, b):
        a[...], b[...]
        plgpu.commit_smem()  # else a copy that follows would race with these reads
        plgpu.wgmma(acc, a, b)

    plant("_matmul", read_and_multiply)


RACES = {
    "a short block": prefill((150, 40), (40, 5)),
    "a window and pages of 64": prefill((200, 20), sliding_window=70, page_size=64),
    "int8 pages": prefill((150, 9), kv_dtype="int8"),
}


@pytest.mark.parametrize("name", RACES)
@pytest.mark.usefixtures("reads_seen")
def test_no_race_is_found(name, capfd):
    check(RACES[name], races=True)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())  # jax 0.12 has raised instead


FAULTS = {
    "matrices multiplied before they arrive": ("_wait", lambda barrier: None),
    "blocks copied over those in use": ("_slot", lambda count, stages: 0 * count),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.usefixtures("reads_seen")
def test_a_planted_race_is_found(name, plant, capfd):
    plant(*FAULTS[name])
    try:
        check(prefill((100, 9)), races=True)
        raised = ""
    except Exception as error:  # jax 0.12 raises the race; 0.11 prints it, and may fail after that
        raised = str(error)
    assert "RACE DETECTED" in raised + "".join(capfd.readouterr())


def test_a_page_id_out_of_bounds_shows_in_the_numbers(plant):
    """The interpreter itself says nothing of it."""
    plant("_page", lambda pages_ref, row, number: pages_ref[row, number] + 1000)
    with pytest.raises(AssertionError, match="numbers are wrong"):
        check(prefill((200, 9)))
