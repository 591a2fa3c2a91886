"""Ragged paged attention: the one signature, its static checks, the choice of backend."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Backend
from pallas_kernels.ragged_paged_attention import reference
from pallas_kernels.ragged_paged_attention.config import XlaConfig, xla_config

MAX_GROUP = 16  # query heads per KV head that the tests cover


def ragged_paged_attention(
    q: Float[Array, "T N H"],
    kv: Float[Array, "T 2K H"],
    kv_pool: Float[Array, "L P p 2K H"],
    layer: Int[Array, ""] | int,
    kv_lens: Int[Array, " S"],
    page_indices: Int[Array, "S J"],
    cu_q_lens: Int[Array, " S+1"],
    distribution: Int[Array, " 3"],
    *,
    scale: float | Float[Array, ""],
    sliding_window: int | Int[Array, ""] = 0,
    soft_cap: float | None = None,
    backend: Backend,
    config: XlaConfig | None = None,
    decode_only: bool = False,
) -> tuple[Float[Array, "T N H"], Float[Array, "L P p 2K H"]]:
    """Writes this step's keys and values into their pages, then attends causally to the pages.

    Row s of the step owns tokens cu_q_lens[s] to cu_q_lens[s + 1]; they are the last ones of its
    kv_lens[s] tokens of context. The contract is that of jax's own ragged paged attention (Ragged
    Paged Attention, arXiv 2604.15464), with all layers in one pool.

    Args:
      q: queries, rotated; token t of the step has N = K * G heads, head n reads KV head n // G.
      kv: this step's keys (rotated) and values, heads interleaved K0 V0 K1 V1 ...
      kv_pool: pages of all layers; donate it, and the write happens in place.
      layer: which layer of the pool; may be traced.
      kv_lens: i32, tokens of context per row, this step's included; 0 for a padding row.
      page_indices: i32, pages of each row in order; entries past a row's last page are not used.
      cu_q_lens: i32, where each row's tokens start; padding rows repeat the last value. Tokens from
        there on are padding: they are written to the null page, and their output is zero.
      distribution: i32 (decode_end, prefill_end, num_seqs): rows [0, decode_end) have one token,
        [decode_end, prefill_end) are prefill chunks, [prefill_end, num_seqs) are of any length.
        Rows from num_seqs on are padding. A prefill chunk may be one token long.
      scale: multiplies q . k; may be traced.
      sliding_window: a token sees itself and the sliding_window - 1 tokens before it; 0 is all.
        May be traced.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap); static.
      backend: from `dispatch.backend_for`.
      config: block sizes; None takes the backend's own choice.
      decode_only: static promise that T == S and that every row has at most one token, at the
        index of its row; the prefill code is then left out of the program.

    Returns:
      The attention output, and the pool with this step's rows written.

    Raises:
      ValueError: shapes, dtypes or settings contradict each other.
      NotImplementedError: the backend is not built.
    """
    q, kv, kv_pool, kv_lens, page_indices, cu_q_lens, distribution = map(
        jax.numpy.asarray, (q, kv, kv_pool, kv_lens, page_indices, cu_q_lens, distribution)
    )
    _check(q, kv, kv_pool, kv_lens, page_indices, cu_q_lens, distribution, soft_cap, decode_only)
    if backend is not Backend.XLA:
        raise NotImplementedError(f"{backend=} has no ragged paged attention; use Backend.XLA")
    if config is None:
        config = xla_config(q.shape[0], kv_lens.shape[0], kv_pool.shape[2])
    return reference.ragged_paged_attention(
        q, kv, kv_pool, layer, kv_lens, page_indices, cu_q_lens, distribution,
        scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, config=config,
        decode_only=decode_only,
    )  # fmt: skip


def _check(q, kv, kv_pool, kv_lens, page_indices, cu_q_lens, distribution, soft_cap, decode_only):
    """Raises ValueError with the values and the remedy where static facts contradict."""
    if q.ndim != 3 or kv.ndim != 3 or kv_pool.ndim != 5:
        raise ValueError(
            f"{q.shape=}, {kv.shape=}, {kv_pool.shape=}; "
            "use [T, N, H], [T, 2K, H] and [L, P, p, 2K, H]"
        )
    (num_tokens, num_heads, head_dim), num_rows = q.shape, kv_lens.shape[0]
    two_k = kv_pool.shape[3]
    if kv.shape != (num_tokens, two_k, head_dim) or kv_pool.shape[4] != head_dim:
        raise ValueError(f"{q.shape=}, {kv.shape=} and {kv_pool.shape=} must agree on T, 2K and H")
    if two_k % 2 or num_heads % (two_k // 2) or num_heads // (two_k // 2) > MAX_GROUP:
        raise ValueError(
            f"{num_heads=} query heads over 2K={two_k} pool heads; use an even 2K and a multiple "
            f"of K, at most {MAX_GROUP} * K"
        )
    if kv.dtype != kv_pool.dtype:
        raise ValueError(f"{kv.dtype=} must be {kv_pool.dtype=}; cast the new rows first")
    if page_indices.ndim != 2 or page_indices.shape[0] != num_rows:
        raise ValueError(f"{page_indices.shape=} must have a line for each of {num_rows=}")
    if cu_q_lens.shape != (num_rows + 1,) or distribution.shape != (3,):
        raise ValueError(
            f"{cu_q_lens.shape=} must be ({num_rows + 1},) and {distribution.shape=} must be (3,)"
        )
    for name, x in dict(
        kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens, distribution=distribution
    ).items():
        if x.dtype != jax.numpy.int32:
            raise ValueError(f"{name} has dtype {x.dtype}; use int32")
    if decode_only and num_tokens != num_rows:
        raise ValueError(f"decode_only needs {num_tokens=} equal to {num_rows=}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"{soft_cap=} must be above 0, or None for no cap")
