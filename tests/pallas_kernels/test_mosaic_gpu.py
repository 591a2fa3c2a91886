"""What the GPU backend refuses, how it sizes blocks, and a step of decode and prefill rows."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.devices import device_spec
from pallas_kernels.dispatch import Backend
from pallas_kernels.kv_layout import pool_layout
from pallas_kernels.ragged_paged_attention import mosaic_gpu, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.config import (
    AttentionShape,
    GpuConfig,
    gpu_config,
    gpu_decode_bytes,
    gpu_prefill_bytes,
)
from tests.rpa_cases import TINY_CASES, assert_close, build, laid_out, oracle, plain, written_pool

H200 = "NVIDIA H200"
LLAMA = AttentionShape(
    num_tokens=64,
    num_rows=64,
    pages_per_row=512,
    page_size=16,
    num_kv_heads=8,
    group=4,
    pool_rows=16,
    width=128,
    q_dtype="bfloat16",
    kv_dtype="bfloat16",
)
needs_jax_0_11 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="needs jax 0.11")


@needs_jax_0_11
@pytest.mark.parametrize(
    ("width", "kv_dtype"),
    [(256, "bfloat16")]
    + [(w, dtype) for w in (64, 128, 192) for dtype in ("bfloat16", "int8", "float8_e4m3fn")],
)
@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128, 256])
def test_what_models_have_is_supported_and_fits(page_size, width, kv_dtype):
    shape = replace(LLAMA, page_size=page_size, width=width, kv_dtype=kv_dtype)
    assert mosaic_gpu.why_unsupported(shape, H200) is None
    config = gpu_config(shape, H200)
    assert config.decode_stages >= 2
    most = device_spec(H200).on_chip_bytes
    assert gpu_decode_bytes(shape, config.decode_stages) <= most
    assert config.prefill_stages >= 2
    assert gpu_prefill_bytes(shape, config.prefill_block, config.prefill_stages) <= most


REFUSED = {
    "float32 queries": (dict(q_dtype="float32"), "bfloat16, not float32"),
    "a float32 pool": (dict(kv_dtype="float32"), "int8, float8_e4m3fn, not float32"),
    "a width between": (dict(width=96), "64, not 96"),
    "a large width": (dict(width=512), "256 lanes in multiples of 64, not 512"),
    "wide pages of 8 bits": (dict(width=256, kv_dtype="int8"), "int8 pages of up to 192 lanes"),
    "many query heads": (dict(group=17), "not 17"),
    "pages that share no block": (dict(page_size=48), "not 48"),
    "small pages": (dict(page_size=4), "not 4"),
}


@needs_jax_0_11
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernels_cannot_do_is_refused_by_name_with_the_remedy(name):
    change, message = REFUSED[name]
    reason = mosaic_gpu.why_unsupported(replace(LLAMA, **change), H200)
    assert message in reason
    assert "use attention_backend=xla" in reason


@needs_jax_0_11
@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA B200", "TPU v4", "cpu"])
def test_other_devices_than_hopper_gpus_are_refused_by_name(kind):
    assert kind in mosaic_gpu.why_unsupported(LLAMA, kind)


def test_an_older_jax_is_refused_by_version(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert "needs jax 0.11" in mosaic_gpu.why_unsupported(LLAMA, H200)


def test_decode_parts_fill_the_multiprocessors_once_but_hold_two_blocks():
    assert gpu_config(LLAMA, H200).decode_splits == 50  # 50 * 8 heads for 3 * 132 places
    assert gpu_config(replace(LLAMA, num_rows=1), H200).decode_splits == 50
    assert gpu_config(replace(LLAMA, num_rows=1, pages_per_row=32), H200).decode_splits == 4
    assert gpu_config(replace(LLAMA, width=256), H200).decode_splits == 17  # 1 place each


def test_a_row_too_wide_for_shared_memory_is_refused_with_the_bytes():
    with pytest.raises(ValueError, match=r"takes \d+ bytes of shared memory, more than the 232448"):
        gpu_config(replace(LLAMA, width=1024), H200)


@needs_jax_0_11
def test_a_step_of_decode_and_prefill_rows_matches_the_oracle():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    case = TINY_CASES["mixed_bfloat16"]
    step = build(case)
    layout = pool_layout(Backend.MOSAIC_GPU, case.num_kv_heads, case.head_dim, case.pool_dtype)
    k_scale, v_scale = case.kv_scales
    out, pool = ragged_paged_attention(
        step.q, step.k, step.v, jnp.array(laid_out(step.kv_pool, layout)), case.layer, *step.arrays,
        scale=case.scale, sliding_window=case.sliding_window, soft_cap=case.soft_cap,
        sinks=step.sinks, k_scale=k_scale, v_scale=v_scale,
        config=GpuConfig(decode_splits=1, decode_stages=2, prefill_stages=2, prefill_block=64),
        backend=Backend.MOSAIC_GPU, interpret=plgpu.InterpretGPUParams(),
    )  # fmt: skip
    out = np.asarray(out).astype(np.float32)
    assert_close(case, out, oracle(case, step))
    pool = plain(np.asarray(pool), layout)
    np.testing.assert_array_equal(pool[:, 1:], written_pool(case, step)[:, 1:])
