"""Whole pages moved on the device: which bytes end where, and that the pool is never copied."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_layout import NULL_PAGE
from pallas_kernels.page_copy import copy_pages, gather_pages, scatter_pages

L, P, PAGE_SIZE, R, W = 3, 12, 4, 4, 8
DTYPES = ["float32", "bfloat16", "int8", "float8_e4m3fn"]
copy_jit = jax.jit(copy_pages, donate_argnums=0)
gather_jit = jax.jit(gather_pages)
scatter_jit = jax.jit(scatter_pages, donate_argnums=0)


def bits_of(array) -> np.ndarray:
    return np.asarray(array).view(np.uint8)


def pool_of(dtype: str) -> jax.Array:
    """A pool of random bits, numbers that are none and both zeros among them."""
    dtype = jnp.dtype(dtype)
    shape = (L, P, PAGE_SIZE, R, W * dtype.itemsize)
    bits = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    values = bits.view(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        # Quiet ones: jax 0.10 moves bfloat16 through float32 on a CPU, which quiets all others.
        values[np.isnan(values)] = np.nan
    return jnp.asarray(values)


def ids(*pages: int) -> jax.Array:
    return jnp.asarray(pages, jnp.int32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copied_pages_equal_their_sources_and_no_other_page_changes(dtype):
    before = bits_of(pool_of(dtype))
    unused = NULL_PAGE, NULL_PAGE
    after = bits_of(copy_jit(pool_of(dtype), ids(7, 3, 7, *unused), ids(2, 11, 5, *unused)))
    expected = before.copy()
    expected[:, [2, 11, 5]] = before[:, [7, 3, 7]]
    np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_that_leave_and_come_back_to_other_places_keep_every_bit(dtype):
    before = bits_of(pool_of(dtype))
    out = np.asarray(gather_jit(pool_of(dtype), ids(9, 1, 4, NULL_PAGE)))
    assert out.shape == (4, L, PAGE_SIZE, R, W)
    pool = scatter_jit(pool_of(dtype), jnp.asarray(out), ids(5, 8, 1, NULL_PAGE))
    expected = before.copy()
    expected[:, [5, 8, 1]] = before[:, [9, 1, 4]]
    np.testing.assert_array_equal(bits_of(pool), expected)


def test_unused_places_of_a_buffer_reach_the_null_page_alone():
    before = np.asarray(pool_of("int8"))
    pages = jnp.full((3, L, PAGE_SIZE, R, W), 77, jnp.int8)
    after = np.asarray(scatter_jit(pool_of("int8"), pages, ids(6, NULL_PAGE, NULL_PAGE)))
    changed = (after != before).any(axis=(0, 2, 3, 4))
    assert set(np.flatnonzero(changed)) == {NULL_PAGE, 6}


@pytest.mark.parametrize("count", [1, 2, 16])
def test_a_donated_pool_is_changed_in_place(count):
    pool = jnp.zeros((2, 256, 16, 8, 32))
    page_ids, pages = jnp.arange(count, dtype=jnp.int32), jnp.zeros((count, 2, 16, 8, 32))
    for program, arguments in ((copy_jit, (page_ids, page_ids)), (scatter_jit, (pages, page_ids))):
        compiled = program.lower(pool, *arguments).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == pool.nbytes
        assert memory.temp_size_in_bytes <= 2 * pages.nbytes
        place = pool.unsafe_buffer_pointer()
        pool = compiled(pool, *arguments)
        assert pool.unsafe_buffer_pointer() == place
