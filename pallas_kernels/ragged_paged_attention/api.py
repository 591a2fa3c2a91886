"""Ragged paged attention: the one signature, its static checks, the choice of backend."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Backend
from pallas_kernels.kv_layout import PoolLayout, pool_layout
from pallas_kernels.ragged_paged_attention import reference
from pallas_kernels.ragged_paged_attention.config import AttentionShape, Config
from pallas_kernels.ragged_paged_attention.kv_write import quantised
from pallas_kernels.ragged_paged_attention.tuning import config_for

# What the tests cover.
Q_DTYPES = ("float32", "bfloat16")
KV_DTYPES = (*Q_DTYPES, "int8", "float8_e4m3fn")
MAX_GROUP = 16  # query heads per KV head


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv_pool: Float[Array, "L P p R W"],
    layer: Int[Array, ""] | int,
    kv_lens: Int[Array, " S"],
    page_indices: Int[Array, "S J"],
    cu_q_lens: Int[Array, " S+1"],
    distribution: Int[Array, " 3"],
    *,
    scale: float | Float[Array, ""],
    sliding_window: int | Int[Array, ""] = 0,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    k_scale: float | Float[Array, ""] | Float[Array, " K"] | Float[Array, "K H"] = 1.0,
    v_scale: float | Float[Array, ""] | Float[Array, " K"] | Float[Array, "K H"] = 1.0,
    config: Config | None = None,
    backend: Backend,
    device_kind: str | None = None,
    decode_only: bool = False,
    interpret: Any = False,
) -> tuple[Float[Array, "T N H"], Float[Array, "L P p R W"]]:
    """Writes this step's keys and values into their pages, then attends causally to the pages.

    Row s of the step owns tokens cu_q_lens[s] to cu_q_lens[s + 1]; they are the last ones of its
    kv_lens[s] tokens of context. The contract is that of jax's own ragged paged attention (Ragged
    Paged Attention, arXiv 2604.15464), with all layers in one pool.

    Args:
      q: queries, rotated; token t of the step has N = K * G heads, head n reads KV head n // G.
      k: this step's keys, rotated.
      v: this step's values.
      kv_pool: pages of all layers, laid out as `kv_layout.pool_layout` says for the backend; donate
        it, and the write happens in place. bfloat16, float32, int8 or float8_e4m3fn.
      layer: which layer of the pool; may be traced.
      kv_lens: i32, tokens of context per row, this step's included; 0 for a padding row.
      page_indices: i32, pages of each row in order; entries past a row's last page are not used.
      cu_q_lens: i32, where each row's tokens start; padding rows repeat the last value. Tokens from
        there on are padding: they are written to the null page or nowhere; their output is zero.
      distribution: i32 (decode_end, prefill_end, num_seqs): rows [0, decode_end) have one token,
        [decode_end, prefill_end) are prefill chunks, [prefill_end, num_seqs) are of any length.
        Rows from num_seqs on are padding. A prefill chunk may be one token long.
      scale: multiplies q . k; may be traced.
      sliding_window: a token sees itself and the sliding_window - 1 tokens before it; 0 is all.
        May be traced.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap); static.
      sinks: a logit per query head that takes part in the softmax's sum and has no value
        (Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453).
      k_scale, v_scale: what the pool's numbers are multiplied by to give keys and values, for all
        heads, per KV head or per lane of each; may be traced.
      config: block sizes, of the backend's own class; None takes `tuning.config_for`'s.
      backend: from `dispatch.backend_for`.
      device_kind: what block sizes are chosen for; None takes the default device's kind.
      decode_only: static promise that T == S and that every row has at most one token, at the
        index of its row; the prefill code is then left out of the program.
      interpret: runs a Mosaic kernel on a CPU: True (TPU only), or the backend's InterpretParams.

    Returns:
      The attention output in the dtype of q, and the pool with this step's rows written.

    Raises:
      ValueError: shapes, dtypes or settings contradict each other, or the backend cannot do them.
    """
    q, k, v, kv_pool, kv_lens, page_indices, cu_q_lens, distribution = map(
        jnp.asarray, (q, k, v, kv_pool, kv_lens, page_indices, cu_q_lens, distribution)
    )
    layout = pool_layout(backend, k.shape[-2], k.shape[-1], kv_pool.dtype)
    _check_arrays(q, k, v, kv_pool, layout)
    _check_rows(kv_lens, page_indices, cu_q_lens, distribution)
    if decode_only and q.shape[0] != kv_lens.shape[0]:
        raise ValueError(f"decode_only needs T={q.shape[0]} equal to S={kv_lens.shape[0]}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"{soft_cap=} must be above 0, or None for no cap")
    shape = attention_shape(q, kv_pool, page_indices, layout)
    if reason := _why_unsupported_by_all(shape):
        raise ValueError(reason)
    if config is None:
        config = config_for(backend, shape, device_kind or jax.devices()[0].device_kind)

    # All that is per lane happens here, once for all backends: they see scaled queries, quantised
    # rows of the pool's own layout, and heads in groups.
    num_heads, group = q.shape[1], q.shape[1] // k.shape[1]
    k_scale, v_scale = (_per_lane(s, k.shape[1:]) for s in (k_scale, v_scale))
    rows = layout.rows(quantised(k, k_scale, kv_pool.dtype), quantised(v, v_scale, kv_pool.dtype))
    scaled = (q.astype(jnp.float32) * jnp.repeat(scale * k_scale, group, axis=0)).astype(q.dtype)
    if sinks is not None:
        sinks = layout.queries(sinks.astype(jnp.float32).reshape(1, num_heads, 1))[0, ..., 0]
    out, kv_pool = _module_of(backend).attend(
        layout.queries(scaled), rows, kv_pool, jnp.asarray(layer, jnp.int32),
        kv_lens, page_indices, cu_q_lens, distribution,
        window=jnp.asarray(sliding_window, jnp.int32), soft_cap=soft_cap, sinks=sinks,
        layout=layout, config=config, decode_only=decode_only, interpret=interpret,
    )  # fmt: skip
    out = layout.outputs(out).astype(jnp.float32) * jnp.repeat(v_scale, group, axis=0)
    return out.astype(q.dtype), kv_pool


def _per_lane(scale: Any, shape: tuple[int, ...]) -> Float[Array, "K H"]:
    scale = jnp.asarray(scale)
    return jnp.broadcast_to(scale.reshape(*scale.shape, *[1] * (2 - scale.ndim)), shape)


def _module_of(backend: Backend) -> Any:
    """Returns the backend's module, which has two functions.

    attend(q [T, K, G, W] scaled, rows [T, R, W], kv_pool, layer i32[], kv_lens, page_indices,
      cu_q_lens, distribution, *, window i32[], soft_cap, sinks f32[K, G] or None, layout, config,
      decode_only, interpret) -> (out [T, K, G, W], zero for padding tokens, and the pool).
    why_unsupported(shape: AttentionShape, device_kind: str) -> what it cannot do, or None.

    Imported when asked for: Pallas takes time to import, and its GPU part needs a recent jax.
    """
    if backend is Backend.XLA:
        return reference
    return import_module(f"pallas_kernels.ragged_paged_attention.{backend.value}")


def why_unsupported(backend: Backend, shape: AttentionShape, device_kind: str) -> str | None:
    """Returns what `backend` cannot do of a call, with the remedy, or None if it can do it all."""
    by_all = _why_unsupported_by_all(shape)
    return by_all or _module_of(backend).why_unsupported(shape, device_kind)


def _why_unsupported_by_all(shape: AttentionShape) -> str | None:
    if shape.q_dtype not in Q_DTYPES or shape.kv_dtype not in KV_DTYPES:
        return f"queries in {shape.q_dtype}, pages in {shape.kv_dtype}; use {Q_DTYPES}, {KV_DTYPES}"
    if shape.page_size & (shape.page_size - 1):
        return f"page_size={shape.page_size} must be a power of two"
    if shape.group > MAX_GROUP:
        return f"{shape.group} query heads per KV head are more than attention's {MAX_GROUP}"
    return None


def attention_shape(q, kv_pool, page_indices, layout: PoolLayout) -> AttentionShape:
    """Returns what block sizes depend on, of arrays or their shapes."""
    return AttentionShape(
        num_tokens=q.shape[0],
        num_rows=page_indices.shape[0],
        pages_per_row=page_indices.shape[1],
        page_size=kv_pool.shape[2],
        num_kv_heads=layout.padded_kv_heads,
        group=q.shape[1] // layout.num_kv_heads,
        pool_rows=layout.num_rows,
        width=layout.width,
        q_dtype=q.dtype.name,
        kv_dtype=kv_pool.dtype.name,
    )


def _check_arrays(q, k, v, kv_pool, layout: PoolLayout):
    """Raises ValueError with the values and the remedy where static facts contradict."""
    if q.ndim != 3 or k.ndim != 3 or kv_pool.ndim != 5:
        raise ValueError(
            f"{q.shape=}, {k.shape=}, {kv_pool.shape=}; "
            "use [T, N, H], [T, K, H] and [L, P, p, R, W]"
        )
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    if k.shape != v.shape or k.shape != (num_tokens, num_kv_heads, head_dim):
        raise ValueError(f"{q.shape=}, {k.shape=} and {v.shape=} must agree on T, K and H")
    if kv_pool.shape[3:] != (layout.num_rows, layout.width):
        raise ValueError(
            f"{kv_pool.shape=} must end in {(layout.num_rows, layout.width)} for {k.shape=}: make "
            "it with kv_layout.pool_shape"
        )
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads=} query heads over {num_kv_heads=}; use a multiple of it")


def _check_rows(kv_lens, page_indices, cu_q_lens, distribution):
    num_rows = kv_lens.shape[0]
    if page_indices.ndim != 2 or page_indices.shape[0] != num_rows:
        raise ValueError(f"{page_indices.shape=} must have a line for each of {num_rows=}")
    if cu_q_lens.shape != (num_rows + 1,) or distribution.shape != (3,):
        raise ValueError(
            f"{cu_q_lens.shape=} must be ({num_rows + 1},) and {distribution.shape=} must be (3,)"
        )
    for name, x in dict(
        kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens, distribution=distribution
    ).items():
        if x.dtype != jnp.int32:
            raise ValueError(f"{name} has dtype {x.dtype}; use int32")
