"""Named steps of ragged paged attention, and how long a layer of one takes on the device at hand.

Shared by the tuner, the device check and scripts/bench_attention.py. Knows shapes, random arrays
and the clock; not what a good time is.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Backend
from pallas_kernels.kv_layout import PoolLayout, pool_layout, pool_shape
from pallas_kernels.ragged_paged_attention.api import attention_shape, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.config import AttentionShape, Config
from pallas_kernels.ragged_paged_attention.kv_write import scatter
from pallas_kernels.roofline import Work, attention_work


class Heads(NamedTuple):
    """The heads that one device holds, and the model's window (0: none)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int = 0


HEADS = {
    "llama3-8b": Heads(32, 8, 128),
    "llama3-8b-tp8": Heads(4, 1, 128),
    "llama3.2-1b": Heads(32, 8, 64),
    "qwen3-32b-tp4": Heads(16, 2, 128),
    "gemma3-27b-tp4": Heads(8, 4, 128, 1024),
    "gemma3-1b": Heads(4, 1, 256, 512),  # and gemma3-270m
    "smollm2": Heads(9, 3, 64),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step: `rows` of (kv_len, q_len), all of one token (decode) or a chunk (prefill).

    `max_model_len` is the width of the page table in tokens; 0 takes the longest row.
    """

    heads: Heads
    rows: tuple[tuple[int, int], ...]
    page_size: int
    max_model_len: int = 0
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"

    @property
    def phase(self) -> str:
        return "decode" if self.num_tokens == len(self.rows) else "prefill"

    @property
    def num_tokens(self) -> int:
        return sum(q_len for _, q_len in self.rows)

    @property
    def name(self) -> str:
        kv_len, q_len = max(self.rows)
        if self.phase == "decode":
            return f"decode_{len(self.rows)}_rows_{kv_len}"
        return f"prefill_{q_len}_after_{kv_len - q_len}"

    @property
    def pages_of_rows(self) -> list[int]:
        return [-(-kv_len // self.page_size) for kv_len, _ in self.rows]

    @property
    def pages_per_row(self) -> int:
        return max(*self.pages_of_rows, -(-self.max_model_len // self.page_size))

    def layout(self, backend: Backend) -> PoolLayout:
        heads = self.heads
        return pool_layout(backend, heads.num_kv_heads, heads.head_dim, self.kv_dtype)

    def pool_shape(self, backend: Backend, num_layers: int) -> tuple[int, int, int, int, int]:
        num_pages = 1 + sum(self.pages_of_rows)
        return pool_shape(num_layers, num_pages, self.page_size, self.layout(backend))

    def shape(self, backend: Backend) -> AttentionShape:
        heads = self.heads
        q = jax.ShapeDtypeStruct((self.num_tokens, heads.num_heads, heads.head_dim), self.dtype)
        pool = jax.ShapeDtypeStruct(self.pool_shape(backend, 1), self.kv_dtype)
        table = jax.ShapeDtypeStruct((len(self.rows), self.pages_per_row), np.int32)
        return attention_shape(q, pool, table, self.layout(backend))

    def work(self, backend: Backend) -> Work:
        return attention_work(self.shape(backend), self.rows, self.heads.sliding_window)


def decode(heads: Heads, num_rows: int, kv_len: int, page_size: int, **settings: Any) -> Workload:
    rows = ((kv_len, 1),) * num_rows
    return Workload(heads=heads, rows=rows, page_size=page_size, **settings)


def prefill(heads: Heads, chunk: int, before: int, page_size: int, **settings: Any) -> Workload:
    rows = ((before + chunk, chunk),)
    return Workload(heads=heads, rows=rows, page_size=page_size, **settings)


class Step(NamedTuple):
    """The arrays of a call, in its order but for the layer; `pool` is donated."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    pool: jax.Array
    rows: tuple[jax.Array, ...]  # kv_lens, page_indices, cu_q_lens, distribution


def make_step(workload: Workload, backend: Backend, num_layers: int) -> Step:
    """Draws a step on the device; the rows lie in randomly permuted pages."""
    heads, pages = workload.heads, workload.pages_of_rows
    num_rows, q_lens = len(workload.rows), [q_len for _, q_len in workload.rows]
    order = 1 + np.random.default_rng(0).permutation(sum(pages))
    page_indices = np.zeros((num_rows, workload.pages_per_row), np.int32)
    for s, (end, count) in enumerate(zip(np.cumsum(pages), pages, strict=True)):
        page_indices[s, :count] = order[end - count : end]
    decode_end = num_rows if workload.phase == "decode" else 0
    rows = ([kv_len for kv_len, _ in workload.rows], page_indices, [0, *np.cumsum(q_lens)],
            [decode_end, num_rows, num_rows])  # fmt: skip
    keys = jax.random.split(jax.random.key(0), 4)
    tokens = (workload.num_tokens, heads.num_kv_heads, heads.head_dim)
    return Step(
        q=_normal(keys[0], (tokens[0], heads.num_heads, tokens[2]), workload.dtype),
        k=_normal(keys[1], tokens, workload.dtype),
        v=_normal(keys[2], tokens, workload.dtype),
        pool=_normal(keys[3], workload.pool_shape(backend, num_layers), workload.kv_dtype),
        rows=tuple(jnp.asarray(array, jnp.int32) for array in rows),
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape, dtype):
    return jax.random.normal(key, shape).astype(dtype)


def attend_with(workload: Workload, backend: Backend, config: Config | None = None) -> Callable:
    """Returns attend(q, k, v, pool, layer, *rows) for `measure`."""

    def attend(q, k, v, pool, layer, *rows):
        return ragged_paged_attention(
            q, k, v, pool, layer, *rows, scale=workload.heads.head_dim**-0.5, config=config,
            sliding_window=workload.heads.sliding_window, backend=backend,
            decode_only=workload.phase == "decode",
        )  # fmt: skip

    return attend


def gathered(workload: Workload, backend: Backend) -> Callable:
    """The same for decode as one gather of all pages that a row may have, and a dense attention:
    what following pages has to be better than."""
    layout, heads = workload.layout(backend), workload.heads

    def attend(q, k, v, pool, layer, kv_lens, page_indices, cu_q_lens, distribution):
        del distribution
        pool = scatter(layout.rows(k, v), pool, layer, kv_lens, page_indices, cu_q_lens)
        kv = pool[layer, page_indices]
        kv = kv.reshape(len(kv_lens), -1, heads.num_kv_heads, 2, heads.head_dim)
        key = jnp.arange(kv.shape[1])
        seen = key < kv_lens[:, None]
        if heads.sliding_window:
            seen &= key >= kv_lens[:, None] - heads.sliding_window
        out = jax.nn.dot_product_attention(
            q[:, None], kv[..., 0, :], kv[..., 1, :], mask=seen[:, None, None]
        )
        return out[:, 0], pool

    return attend


def compile_layers(attend: Callable, step: Step, num_layers: int) -> jax.stages.Compiled:
    """Compiles a loop over layers, whose output feeds the next one's queries: keys and values then
    come from memory, as they do in a model. Its pool is donated: (q, pool, ...) in and out."""

    def layers(q, k, v, pool, rows):
        def one(layer, carry):
            q, pool, other = carry
            out, pool = attend(q, k, v, pool, layer, *rows)
            return q + out * jnp.asarray(1e-3, q.dtype), pool, other * 0.5

        # `other` stands in for the rest of a layer: XLA:CPU compiles a loop that touches few bytes
        # into one scalar kernel, loops inside it included, which no real layer meets.
        return jax.lax.fori_loop(0, num_layers, one, (q, pool, jnp.ones(2**14)))

    return jax.jit(layers, donate_argnums=3).lower(*step).compile()


def measure(
    program: jax.stages.Compiled, step: Step, num_layers: int, repeats: int, calls: int = 1
) -> tuple[float, jax.Array, Step]:
    """Returns the median seconds of one layer, the output, and the step with its pool, which the
    program has written to. Each repeat queues `calls` calls before it waits, so that a GPU's short
    layers are not timed with the host's way to it."""
    times: list[float] = []
    out: Any = None
    for _ in range(repeats + 1):  # the first one warms up
        begin = time.perf_counter()
        for _ in range(calls):
            out, pool, _ = program(*step)
            step = step._replace(pool=pool)
        jax.block_until_ready((out, step.pool))
        times.append((time.perf_counter() - begin) / (calls * num_layers))
    return float(np.median(times[1:])), out, step


def layers_for(workload: Workload, backend: Backend, most_bytes: int, most: int = 16) -> int:
    """Returns how many layers of the pool `most_bytes` hold, at most `most`; at least one."""
    shape = workload.pool_shape(backend, 1)
    page_bytes = int(np.prod(shape)) * jnp.dtype(workload.kv_dtype).itemsize
    return max(1, min(most, most_bytes // page_bytes))
