"""Named ragged-paged-attention workloads and a float64 oracle. Knows numpy and how a backend lays
out its pool.

Shared by the tests of all backends: CASES for those that run at a fair speed, TINY_CASES for slow
interpreters. The oracle never sees pages: it attends over each row's dense keys and values, so a
mistake in paging cannot cancel out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

from pallas_kernels.kv_layout import PoolLayout

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
KV_DTYPES = {**DTYPES, "int8": np.int8, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}
# Largest error of a number, as a part of the largest number in the same head's output, by the dtype
# of the queries. Outputs are between 0.05 (8k keys) and 4 (one key), so an absolute bound that one
# key can keep would prove nothing about many.
# float32: sums of up to 256 products and 8k weights in any order, and an exp that is right to some
#   units in the last place (2**-24); 1e-6 on a CPU.
# bfloat16: scaled queries, weights and outputs are each rounded to 2**-9 of themselves, the output
#   twice where v_scale is not 1; 4e-3 and 7e-3 on a CPU.
# A quantised pool adds nothing: the oracle reads the same numbers, and int8 and float8_e4m3fn are
# exact in bfloat16.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1.6e-2}
_LIMIT = {"int8": 127, "float8_e4m3fn": 448}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step. `rows` is (kv_len, q_len) per row, without the padding rows that follow them."""

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    num_layers: int = 2
    layer: int = 1
    sliding_window: int = 0
    soft_cap: float | None = None
    dtype: str = "float32"
    kv_dtype: str | None = None  # None: dtype
    sinks: bool = False
    # (decode_end, prefill_end); None: rows of one token as long as they last, and all others
    distribution: tuple[int, int] | None = None
    padding_tokens: int = 3
    padding_rows: int = 1
    spare_pages: int = 2  # pages of the pool that no row uses
    spare_columns: int = 2  # entries of page_indices past the longest row
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def pool_dtype(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def kv_scales(self) -> np.ndarray:
        """f32[2, K]: what the numbers of keys and values in the pool are multiplied by."""
        if self.pool_dtype not in _LIMIT:
            return np.ones((2, self.num_kv_heads), np.float32)
        scales = 1 + 0.1 * np.arange(2 * self.num_kv_heads, dtype=np.float32)
        return scales.reshape(2, -1) * 4 / _LIMIT[self.pool_dtype]

    @property
    def pages_of_rows(self) -> list[int]:
        return [-(-kv_len // self.page_size) for kv_len, _ in self.rows]


@dataclass
class Step:
    """The arrays of one call, and the dense truth behind them."""

    q: np.ndarray  # [T, N, H]
    k: np.ndarray  # [T, K, H]
    v: np.ndarray  # [T, K, H]
    kv_pool: np.ndarray  # [L, P, p, K, 2, H], this step's rows not yet written
    sinks: np.ndarray | None  # f32[N]
    kv_lens: np.ndarray  # i32[S]
    page_indices: np.ndarray  # i32[S, J]
    cu_q_lens: np.ndarray  # i32[S+1], pad = last value
    distribution: np.ndarray  # i32[3]
    dense: list[np.ndarray] = field(repr=False)  # per row f64[kv_len, K, 2, H], with this step's

    @property
    def num_real_tokens(self) -> int:
        return int(self.cu_q_lens[-1])

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Everything after `layer` in the call's argument order."""
        return self.kv_lens, self.page_indices, self.cu_q_lens, self.distribution


def build(case: Case) -> Step:
    """Draws a step for `case`; history lies in randomly permuted pages, never in page 0."""
    rng = np.random.default_rng(case.seed)
    dtype, kv_dtype = DTYPES[case.dtype], KV_DTYPES[case.pool_dtype]
    K, head_dim, p = case.num_kv_heads, case.head_dim, case.page_size

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32).astype(dtype)

    q_lens = [q_len for _, q_len in case.rows]
    num_rows = len(case.rows) + case.padding_rows
    num_tokens = sum(q_lens) + case.padding_tokens
    pages = case.pages_of_rows
    num_pages = 1 + sum(pages) + case.spare_pages
    order = rng.permutation(np.arange(1, num_pages))
    page_indices = np.zeros((num_rows, max(pages, default=0) + case.spare_columns), np.int32)
    kv_pool = quantised(normal(case.num_layers, num_pages, p, K, 2, head_dim), case)
    k, v = normal(num_tokens, K, head_dim), normal(num_tokens, K, head_dim)
    new = quantised(np.stack([k, v], axis=2), case)
    dense, taken, token = [], 0, 0
    for s, (kv_len, q_len) in enumerate(case.rows):
        mine = order[taken : taken + pages[s]]
        page_indices[s, : pages[s]] = mine
        history = kv_pool[case.layer, mine].reshape(-1, K, 2, head_dim)[: kv_len - q_len]
        values = np.concatenate([history, new[token : token + q_len]]).astype(np.float64)
        dense.append(values * case.kv_scales.T[..., None])
        taken, token = taken + pages[s], token + q_len
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens), [sum(q_lens)] * case.padding_rows])
    ones = next((s for s, n in enumerate(q_lens) if n != 1), len(q_lens))
    decode_end, prefill_end = case.distribution or (ones, len(q_lens))
    kv_lens = [kv_len for kv_len, _ in case.rows] + [0] * case.padding_rows
    assert kv_pool.dtype == kv_dtype
    return Step(
        q=normal(num_tokens, case.num_heads, head_dim),
        k=k,
        v=v,
        kv_pool=kv_pool,
        sinks=rng.standard_normal(case.num_heads, np.float32) if case.sinks else None,
        kv_lens=np.asarray(kv_lens, np.int32),
        page_indices=page_indices,
        cu_q_lens=cu_q_lens.astype(np.int32),
        distribution=np.asarray([decode_end, prefill_end, len(q_lens)], np.int32),
        dense=dense,
    )


def quantised(kv: np.ndarray, case: Case) -> np.ndarray:
    """`[..., K, 2, H]` as the pool of `case` holds it."""
    limit = _LIMIT.get(case.pool_dtype)
    if limit is None:
        return kv.astype(KV_DTYPES[case.pool_dtype])
    kv = np.clip(kv.astype(np.float32) / case.kv_scales.T[..., None], -limit, limit)
    return (np.rint(kv) if case.pool_dtype == "int8" else kv).astype(KV_DTYPES[case.pool_dtype])


def bucketed(case: Case) -> Case:
    """`case` padded up to one of a few shapes, as an engine does, so that programs are shared."""

    def padding(real: int, *sizes: int) -> int:
        return min(size for size in sizes if size >= real) - real

    pages = case.pages_of_rows
    return replace(
        case,
        padding_tokens=padding(sum(q_len for _, q_len in case.rows), 80, 400),
        padding_rows=padding(len(case.rows), 10, 70, 130),
        spare_pages=padding(sum(pages), 40, 400, 1100),
        spare_columns=padding(max(pages), 20, 130),
    )


def oracle(case: Case, step: Step) -> np.ndarray:
    """Attention in float64 over dense rows, `[T, N, H]`; zero for padding tokens."""
    out = np.zeros(step.q.shape)
    group = case.num_heads // case.num_kv_heads
    for s, (kv_len, q_len) in enumerate(case.rows):
        start = step.cu_q_lens[s]
        dense = step.dense[s]
        for t in range(q_len):
            position = kv_len - q_len + t
            first = max(0, position - case.sliding_window + 1) if case.sliding_window else 0
            for n in range(case.num_heads):
                keys, values = dense[first : position + 1, n // group].swapaxes(0, 1)
                scores = keys @ step.q[start + t, n].astype(np.float64) * case.scale
                if case.soft_cap:
                    scores = case.soft_cap * np.tanh(scores / case.soft_cap)
                sink = -np.inf if step.sinks is None else np.float64(step.sinks[n])
                highest = max(scores.max(), sink)
                weights = np.exp(scores - highest)
                out[start + t, n] = weights @ values / (weights.sum() + np.exp(sink - highest))
    return out


def assert_close(case: Case, out: np.ndarray, wanted: np.ndarray) -> None:
    """Asserts that `out` `[T, N, H]` is `wanted` within TOLERANCE, and zero where that is zero."""
    largest = np.abs(wanted).max(axis=-1, keepdims=True)
    error = np.abs(out.astype(np.float64) - wanted)
    wrong = ~(error <= TOLERANCE[case.dtype] * largest)  # NaN is wrong
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} numbers are wrong, first at {np.argwhere(wrong)[0]}; "
        f"largest error {error.max()}, allowed {TOLERANCE[case.dtype]} of {largest.max()}"
    )


def written_pool(case: Case, step: Step) -> np.ndarray:
    """The pool after the step, but for the null page, whose content is of no account."""
    pool = step.kv_pool.copy()
    new = quantised(np.stack([step.k, step.v], axis=2), case)
    for s, (kv_len, q_len) in enumerate(case.rows):
        for t in range(q_len):
            position = kv_len - q_len + t
            page = step.page_indices[s, position // case.page_size]
            pool[case.layer, page, position % case.page_size] = new[step.cu_q_lens[s] + t]
    return pool


def laid_out(kv_pool: np.ndarray, layout: PoolLayout) -> np.ndarray:
    """A pool `[L, P, p, K, 2, H]` as a backend's `[L, P, p, R, W]`."""
    K, H = layout.padded_kv_heads, layout.padded_head_dim
    shape = (*kv_pool.shape[:3], K, 2, H)
    out = np.zeros(shape, kv_pool.dtype)
    out[..., : layout.num_kv_heads, :, : layout.head_dim] = kv_pool
    return out.reshape(*kv_pool.shape[:3], layout.num_rows, layout.width)


def plain(kv_pool: np.ndarray, layout: PoolLayout) -> np.ndarray:
    """The inverse of `laid_out`."""
    shape = (*kv_pool.shape[:3], layout.padded_kv_heads, 2, layout.padded_head_dim)
    return kv_pool.reshape(shape)[..., : layout.num_kv_heads, :, : layout.head_dim]


def _decode(*kv_lens: int, **settings) -> Case:
    return Case(rows=tuple((n, 1) for n in kv_lens), **settings)


def _mixed(**settings) -> Case:
    return Case(rows=((40, 1), (9, 1), (200, 64), (30, 30)), **settings)


def _tiny(*rows: tuple[int, int], **settings) -> Case:
    """At most 4 pages of 16 tokens in a row, few rows and tokens."""
    return Case(rows=rows, spare_pages=1, spare_columns=1, padding_tokens=1, **settings)


CASES = {
    "decode_one_row": _decode(37),
    "decode_one_token_of_context": _decode(1),
    "decode_ragged": _decode(5, 130, 16, 77, 300),
    "decode_page_edges": _decode(15, 16, 17, 31, 32, 33),
    "decode_block_edges": _decode(63, 64, 65, 127, 128, 129),
    "decode_64_rows": _decode(*(1 + 7 * i % 90 for i in range(64))),
    "decode_128_rows": _decode(*(1 + 11 * i % 120 for i in range(128))),
    "decode_many_padding_rows": _decode(40, 50, padding_rows=30, padding_tokens=30),
    "decode_2k": _decode(2048, 3, 1999, num_heads=9, num_kv_heads=3),
    "decode_8k": _decode(8192, 1, 8191, num_heads=2, num_kv_heads=1, page_size=64),
    "decode_full_pool": _decode(64, 48, 80, spare_pages=0, spare_columns=0),
    "decode_window_shorter": _decode(300, 40, 129, sliding_window=33),
    "decode_window_longer": _decode(30, 40, 129, sliding_window=512),
    "decode_window_of_one": _decode(30, 40, sliding_window=1),
    "decode_soft_cap": _decode(100, 40, soft_cap=2.0),
    "decode_sinks": _decode(1, 17, 130, sinks=True),
    "decode_int8": _decode(1, 17, 130, kv_dtype="int8"),
    "decode_float8": _decode(1, 17, 130, kv_dtype="float8_e4m3fn"),
    "prefill_whole_prompt": Case(rows=((50, 50),)),
    "prefill_one_token_prompt": Case(rows=((1, 1),), distribution=(0, 1)),
    "prefill_chunk_of_long": Case(rows=((700, 70),)),
    "prefill_two_chunks": Case(rows=((300, 130), (90, 5))),
    "prefill_page_edges": Case(rows=((15, 15), (16, 16), (17, 17), (33, 2))),
    "prefill_tile_edges": Case(rows=((127, 127), (128, 128), (129, 129))),
    "prefill_window_shorter": Case(rows=((400, 200),), sliding_window=50),
    "prefill_window_longer": Case(rows=((100, 60),), sliding_window=500),
    "prefill_window_of_one": Case(rows=((100, 60),), sliding_window=1),
    "prefill_soft_cap": Case(rows=((100, 60),), soft_cap=3.0),
    "prefill_2k": Case(rows=((2048, 256),), num_heads=2, num_kv_heads=1),
    "prefill_8k": Case(rows=((8192, 70),), num_heads=2, num_kv_heads=1, page_size=64),
    "prefill_no_padding": Case(rows=((50, 50), (20, 14)), padding_rows=0, padding_tokens=0),
    "prefill_full_pool": Case(rows=((64, 64), (80, 20)), spare_pages=0, spare_columns=0),
    "mixed": _mixed(),
    "mixed_window_soft_cap": _mixed(sliding_window=40, soft_cap=5.0),
    "mixed_sinks": _mixed(sinks=True, sliding_window=20),
    "mixed_bfloat16": _mixed(dtype="bfloat16", sinks=True, sliding_window=20),
    "mixed_bfloat16_pool": _mixed(kv_dtype="bfloat16"),
    "mixed_int8": _mixed(kv_dtype="int8"),
    "mixed_int8_bfloat16": _mixed(kv_dtype="int8", dtype="bfloat16"),
    "mixed_float8": _mixed(kv_dtype="float8_e4m3fn"),
    "mixed_float8_bfloat16": _mixed(kv_dtype="float8_e4m3fn", dtype="bfloat16"),
    "mixed_empty_rows": Case(rows=((37, 1), (0, 0), (50, 20), (44, 0), (0, 0), (9, 1), (3, 3))),
    "mixed_rows_of_any_length": Case(
        rows=((37, 1), (60, 20), (21, 1), (33, 1), (0, 0), (40, 30)), distribution=(1, 3)
    ),
    "mixed_many_rows": Case(
        rows=(*((1 + 13 * i % 200, 1) for i in range(40)), (140, 100), (64, 3), (5, 2))
    ),
    "mixed_more_rows_than_tokens": Case(rows=((40, 1), (3, 3)), padding_rows=20),
    "mixed_nothing_live": Case(rows=((0, 0), (0, 0))),
    "smollm2": Case(rows=((90, 1), (33, 1), (100, 40)), num_heads=9, num_kv_heads=3),
    "gemma3_270m": Case(
        rows=((600, 1), (33, 1), (600, 40)),
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        sliding_window=512,
    ),
}

TINY_CASES = {
    "decode": _tiny((37, 1), (1, 1), (17, 1)),
    "decode_page_edges": _tiny((15, 1), (16, 1), (33, 1)),
    "decode_window": _tiny((50, 1), (9, 1), sliding_window=18),
    "decode_soft_cap": _tiny((37, 1), (16, 1), soft_cap=2.0),
    "decode_sinks": _tiny((37, 1), (1, 1), sinks=True),
    "decode_full_pool": Case(
        rows=((32, 1), (16, 1)), spare_pages=0, spare_columns=0, padding_rows=0, padding_tokens=0
    ),
    "prefill_whole_prompt": _tiny((18, 18)),
    "prefill_chunk": _tiny((50, 15)),
    "prefill_page_edges": _tiny((16, 16), (33, 2), (1, 1), distribution=(0, 3)),
    "prefill_window": _tiny((50, 15), sliding_window=18),
    "prefill_soft_cap": _tiny((40, 9), soft_cap=2.0),
    "prefill_sinks": _tiny((40, 9), sinks=True),
    "mixed": _tiny((37, 1), (50, 15)),
    "mixed_empty_row": _tiny((37, 1), (0, 0), (18, 5)),
    "mixed_any_length": _tiny((37, 1), (18, 5), (20, 1), distribution=(1, 2)),
    "mixed_bfloat16": _tiny((37, 1), (50, 15), dtype="bfloat16", sinks=True, sliding_window=18),
    "mixed_int8": _tiny((37, 1), (50, 15), dtype="bfloat16", kv_dtype="int8"),
    "mixed_float8": _tiny((37, 1), (50, 15), dtype="bfloat16", kv_dtype="float8_e4m3fn"),
}
