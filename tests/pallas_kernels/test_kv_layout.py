"""The pool's shape and weight, and where each head lies for each backend."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Backend
from pallas_kernels.kv_layout import bytes_per_page, pool_layout, pool_shape
from tests.rpa_cases import laid_out, plain

SMOLLM2 = pool_layout(Backend.XLA, 3, 64, jnp.bfloat16)


def test_pool_shape_has_layers_pages_tokens_rows():
    assert pool_shape(30, 100, 16, SMOLLM2) == (30, 100, 16, 6, 64)


def test_pool_shape_holds_the_rows_of_all_devices():
    assert pool_shape(30, 100, 16, SMOLLM2, num_devices=4) == (30, 100, 16, 24, 64)


def test_bytes_per_page_counts_all_layers_keys_and_values():
    assert bytes_per_page(30, 16, SMOLLM2, jnp.bfloat16) == 30 * 16 * 3 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("backend", "num_kv_heads", "head_dim", "dtype", "rows_and_width"),
    [
        (Backend.XLA, 3, 80, jnp.bfloat16, (6, 80)),
        (Backend.MOSAIC_GPU, 3, 64, jnp.bfloat16, (6, 64)),
        (Backend.MOSAIC_GPU, 3, 80, jnp.bfloat16, (6, 128)),
        (Backend.MOSAIC_GPU, 1, 256, jnp.int8, (2, 256)),
        (Backend.MOSAIC_TPU, 8, 128, jnp.bfloat16, (16, 128)),
        (Backend.MOSAIC_TPU, 3, 128, jnp.bfloat16, (8, 128)),
        (Backend.MOSAIC_TPU, 5, 128, jnp.bfloat16, (16, 128)),
        (Backend.MOSAIC_TPU, 1, 96, jnp.bfloat16, (2, 128)),
        (Backend.MOSAIC_TPU, 1, 256, jnp.int8, (4, 256)),
        (Backend.MOSAIC_TPU, 3, 64, jnp.bfloat16, (4, 128)),
        (Backend.MOSAIC_TPU, 1, 64, jnp.float32, (1, 128)),
        (Backend.MOSAIC_TPU, 1, 64, jnp.float8_e4m3fn, (4, 128)),
        (Backend.MOSAIC_TPU, 9, 64, jnp.bfloat16, (16, 128)),
    ],
)
def test_rows_and_width_are_what_each_backend_wants(
    backend, num_kv_heads, head_dim, dtype, rows_and_width
):
    layout = pool_layout(backend, num_kv_heads, head_dim, dtype)
    assert (layout.num_rows, layout.width) == rows_and_width


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rows_hold_keys_and_values_and_queries_meet_keys_only(backend, head_dim):
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 5, 3, head_dim), np.float32)
    q = rng.standard_normal((5, 6, head_dim), np.float32)
    layout = pool_layout(backend, 3, head_dim, jnp.float32)
    rows = np.asarray(layout.rows(k, v))
    assert rows.shape == (5, layout.num_rows, layout.width)
    back = plain(rows[None, None], layout)[0, 0]
    np.testing.assert_array_equal(back, np.stack([k, v], axis=2))
    np.testing.assert_array_equal(laid_out(back[None, None], layout)[0, 0], rows)
    queries = np.asarray(layout.queries(q))
    keys = rows if layout.side_by_side else rows[:, ::2]
    scores = np.einsum("tkgw,tkw->tkg", queries, keys)[:, :3].reshape(5, 6)
    np.testing.assert_allclose(scores, np.einsum("tnh,tnh->tn", q, k.repeat(2, 1)), rtol=1e-5)


def test_outputs_take_the_values_side_of_the_real_heads():
    layout = pool_layout(Backend.MOSAIC_TPU, 3, 64, jnp.bfloat16)
    out = np.arange(2 * 4 * 2 * 128).reshape(2, 4, 2, 128)
    np.testing.assert_array_equal(layout.outputs(out), out[:, :3, :, 64:].reshape(2, 6, 64))
