"""The attention kernels alone, inside a loop over layers, in the shapes that models give them."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import NamedTuple

import jax
import jax.numpy as jnp
from accelerators.cases import GIB, MIB, Case, Found
from accelerators.programs import compiled, judge_gpu_kernels, judged
from accelerators.targets import TARGETS, Target, mesh_of
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.dispatch import Backend
from pallas_kernels.kv_layout import bytes_per_page, pool_layout, pool_shape
from pallas_kernels.ragged_paged_attention import ragged_paged_attention

NUM_ROWS, NUM_LAYERS, MAX_MODEL_LEN = 64, 4, 8192
MIXED_TOKENS = 512
# Pools of a few megabytes are copied through VMEM unseen.
POOL_BYTES = GIB
MOST_TEMP_BYTES = 64 * MIB


class Heads(NamedTuple):
    """The heads of one device, and what else a family asks of attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int = 0
    soft_cap: float | None = None
    sinks: bool = False


MODELS = {
    "llama3-8b": Heads(32, 8, 128),
    "llama3-8b-tp4": Heads(8, 2, 128),
    "llama3-8b-tp8": Heads(4, 1, 128),
    "qwen3-32b": Heads(64, 8, 128),
    "qwen3-32b-tp8": Heads(8, 1, 128),
    "gemma3-27b": Heads(32, 16, 128, sliding_window=1024),
    "gemma3-27b-tp8": Heads(4, 2, 128, sliding_window=1024),
    "gemma2-9b": Heads(16, 8, 256, sliding_window=4096, soft_cap=50.0),
    "gemma3-1b": Heads(4, 1, 256, sliding_window=512),
    "llama3.2-1b": Heads(32, 8, 64),
    "gpt-oss-20b": Heads(64, 8, 64, sliding_window=128, sinks=True),
    "smollm2-135m": Heads(9, 3, 64),
    "phi2-2.7b": Heads(32, 32, 80),
    "phi3-mini": Heads(32, 32, 96),
    "glm4-9b": Heads(32, 2, 128),
    "heads-of-192": Heads(24, 8, 192),
}
QUICK_MODELS = ("llama3-8b-tp4", "llama3.2-1b", "gemma3-1b")
QUICK_TARGETS = ("v5e", "v6e", "7x", "H200")
BOTH = ("decode", "mixed")


def kernel_cases() -> list[Case]:
    """Every model in bfloat16, one of each head size in every KV dtype, and one in every page size
    and with queries in float32, on every target; not what a backend refuses by name."""

    def case(target: Target, model: str, bucket: str, kv_dtype="bfloat16", page_size=64, dtype=""):
        of_queries = f"{dtype}-queries/" if dtype else ""
        name = f"kernel/{target.name}/{model}/{bucket}/{of_queries}{kv_dtype}/page{page_size}"
        settings = (target, MODELS[model], bucket, kv_dtype, page_size, dtype or "bfloat16")
        plain = (kv_dtype, page_size, dtype) == ("bfloat16", 64, "") and model in QUICK_MODELS
        eight_bit = (kv_dtype, bucket, dtype) == ("int8", "mixed", "") and model == QUICK_MODELS[0]
        quick = target.name in QUICK_TARGETS and (plain or eight_bit)
        return Case(name, partial(_run, *settings), quick)

    def of(target: Target):
        one = "llama3-8b-tp4"
        yield from (case(target, model, bucket) for model in MODELS for bucket in BOTH)
        for bucket in BOTH:
            is_tpu = target.backend is Backend.MOSAIC_TPU
            eight_bit = ("int8", "float8_e4m3fn")
            for model in (one, "llama3.2-1b", *(["gemma3-1b"] if is_tpu else [])):
                yield from (case(target, model, bucket, kv_dtype) for kv_dtype in eight_bit)
            yield from (case(target, one, bucket, page_size=size) for size in (8, 16, 32, 128, 256))
            if is_tpu:
                for kv_dtype in ("float32", "bfloat16", *eight_bit):
                    yield case(target, one, bucket, kv_dtype, dtype="float32")

    return list(chain.from_iterable(of(target) for target in TARGETS.values()))


def _run(
    target: Target, heads: Heads, bucket: str, kv_dtype: str, page_size: int, dtype: str
) -> Found:
    layout = pool_layout(target.backend, heads.num_kv_heads, heads.head_dim, kv_dtype)
    page_bytes = bytes_per_page(NUM_LAYERS, page_size, layout, kv_dtype)
    shape = pool_shape(NUM_LAYERS, POOL_BYTES // page_bytes, page_size, layout)
    pool_elements = POOL_BYTES // page_bytes * page_bytes // jnp.dtype(kv_dtype).itemsize
    mesh = mesh_of(target, 1)
    program = compiled(
        target, mesh, lambda: _trace(target, mesh, heads, bucket, shape, kv_dtype, dtype)
    )
    found = judged(
        target,
        program,
        pool_elements * jnp.dtype(kv_dtype).itemsize,
        {pool_elements, pool_elements // NUM_LAYERS},
        MOST_TEMP_BYTES,
    )
    if target.backend is Backend.MOSAIC_GPU:
        judge_gpu_kernels(program, found)
    return found


def _trace(target, mesh, heads: Heads, bucket: str, shape, kv_dtype: str, dtype: str):
    """Attention in every layer of one donated pool, the layer and its window known at run time."""
    N, K, H = heads[:3]
    decode_only, page_size = bucket == "decode", shape[2]
    T, S = NUM_ROWS if decode_only else MIXED_TOKENS, NUM_ROWS

    def abstract(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def layers(q, k, v, kv_pool, windows, scales, sinks, *rows):
        def layer(index, carry):
            q, kv_pool = carry
            out, kv_pool = ragged_paged_attention(
                q, k, v, kv_pool, index, *rows,
                scale=H**-0.5, sliding_window=windows[index], soft_cap=heads.soft_cap,
                sinks=sinks if heads.sinks else None, k_scale=scales[0], v_scale=scales[1],
                backend=target.backend, device_kind=target.kind, decode_only=decode_only,
            )  # fmt: skip
            return out, kv_pool

        return jax.lax.fori_loop(0, NUM_LAYERS, layer, (q, kv_pool))

    return jax.jit(layers, donate_argnums=3).trace(
        abstract(dtype, T, N, H),
        abstract(dtype, T, K, H),
        abstract(dtype, T, K, H),
        abstract(kv_dtype, *shape),
        abstract(jnp.int32, NUM_LAYERS),
        abstract(jnp.float32, 2, K),
        abstract(jnp.float32, N),
        abstract(jnp.int32, S),
        abstract(jnp.int32, S, MAX_MODEL_LEN // page_size),
        abstract(jnp.int32, S + 1),
        abstract(jnp.int32, 3),
    )
