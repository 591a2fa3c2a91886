"""Moves whole KV pages: inside the pool, and to and from a buffer that crosses to the host.

Plain XLA, as no kernel is needed: a page is a few long runs, which the compilers for CPUs, TPUs and
the H200 copy in place. Knows arrays and page ids, not who owns a page or why it moves.

Every call has a fixed count of ids; unused ones are the null page, whose content nobody reads. One
page is moved at a time, by a loop whose count is static: a scatter of all pages would first copy
the buffer on a TPU, and on a GPU the host would have to wait for a count that the device knows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def copy_pages(
    kv_pool: Float[Array, "L P p R W"], sources: Int[Array, " n"], targets: Int[Array, " n"]
) -> Float[Array, "L P p R W"]:
    """Returns the pool with page targets[i] of all layers equal to page sources[i].

    Donate the pool and it happens in place. Ids are i32 below P, which the host must check; targets
    differ from each other and from all sources, the null page's unused pairs apart.
    """

    def one(i, pool):
        page = jax.lax.dynamic_slice_in_dim(pool, sources[i], 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(pool, page, targets[i], axis=1)

    return jax.lax.fori_loop(0, sources.shape[0], one, kv_pool)


def gather_pages(
    kv_pool: Float[Array, "L P p R W"], page_ids: Int[Array, " n"]
) -> Float[Array, "n L p R W"]:
    """Returns pages of all layers, bit for bit, a page's layers together: what goes to the host.

    Ids are i32 below P, which the host must check.
    """
    return jnp.take(kv_pool, page_ids, axis=1, mode="clip").swapaxes(0, 1)


def scatter_pages(
    kv_pool: Float[Array, "L P p R W"],
    pages: Float[Array, "n L p R W"],
    page_ids: Int[Array, " n"],
) -> Float[Array, "L P p R W"]:
    """Returns the pool with pages[i] in page_ids[i]: what `gather_pages` took, brought back.

    Donate the pool and it happens in place. Ids are i32 below P, which the host must check, and
    differ, the null page's unused ones apart.
    """

    def one(i, pool):
        return jax.lax.dynamic_update_slice_in_dim(pool, pages[i][:, None], page_ids[i], axis=1)

    return jax.lax.fori_loop(0, page_ids.shape[0], one, kv_pool)
