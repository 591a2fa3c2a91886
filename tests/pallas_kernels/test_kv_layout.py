"""The pool's shape, weight and row order."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_layout import bytes_per_page, interleave_kv, pool_shape


def test_pool_shape_has_layers_pages_tokens_heads():
    assert pool_shape(30, 100, 16, 3, 64) == (30, 100, 16, 6, 64)


def test_bytes_per_page_counts_all_layers_keys_and_values():
    assert bytes_per_page(30, 16, 3, 64, jnp.bfloat16) == 30 * 16 * 3 * 2 * 64 * 2


def test_rows_alternate_keys_and_values_of_a_head():
    k = jnp.arange(12.0).reshape(2, 3, 2)
    rows = np.asarray(interleave_kv(k, -k))
    np.testing.assert_array_equal(rows[:, 0::2], k)
    np.testing.assert_array_equal(rows[:, 1::2], -k)
