"""Whole steps: the product's own code, from packed batch to sampled tokens, on meshes of devices
that are only described."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from accelerators.cases import GIB, MIB, Case, Found
from accelerators.hlo import collectives
from accelerators.programs import compiled, judge_gpu_kernels, judged
from accelerators.targets import TARGETS, Target, mesh_of
from flax.core import meta

from jserve.config import CacheSettings
from jserve.models.config import ModelConfig
from jserve.models.decoder import BEST_LOOP, init_params
from jserve.models.families import model_config_from_hf
from jserve.models.head_layout import HeadLayout, head_layout
from jserve.models.params import is_norm, layer_shapes, top_shapes
from jserve.runner.compile import trace_step
from jserve.runner.kv_cache import (
    ACCELERATOR_FRACTION,
    DEFAULT_PAGE_SIZE,
    choose_num_pages,
    layout_of,
)
from jserve.runner.mesh import pool_sharding, replicated, sharding_of
from jserve.runner.step import StepOptions, StepState
from pallas_kernels.dispatch import Backend
from pallas_kernels.kv_layout import pool_shape
from scheduler.bucket import Bucket

DTYPE = jnp.dtype(jnp.bfloat16)
NUM_ROWS, MAX_MODEL_LEN = 64, 8192
# 384 tokens: with a power of two, some activations have as many elements as some weights.
BUCKETS = {"decode": Bucket(64, NUM_ROWS, True), "mixed": Bucket(384, NUM_ROWS, False)}
SIZES = (1, 4, 8)  # of the tensor-parallel group
SMALLEST_WEIGHT = MIB // 2  # elements; smaller ones are of no account
MOST_COLLECTIVES_OF_SAMPLING = 32

MODELS = {
    "llama3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
    },
    "qwen3-32b": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 151_936,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
    },
    "gemma3-27b": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
        "sliding_window": 1024,
        "vocab_size": 262_208,
    },
}
QUICK = (
    *("v5e/llama3-8b/tp4", "v6e/llama3-8b/tp1", "7x/qwen3-32b/tp8", "v5p/gemma3-27b/tp4"),
    *("H200/llama3-8b/tp1", "H200/qwen3-32b/tp8"),
)


def step_cases() -> list[Case]:
    """Every model, group size and bucket on every target whose memory holds the weights."""
    cases = []
    for target in TARGETS.values():
        for model, size, bucket in _sizes_that_fit(target):
            name = f"{target.name}/{model}/tp{size}"
            run = partial(_run, target, model, size, bucket)
            cases.append(Case(f"step/{name}/{bucket}", run, name in QUICK, limit_s=240))
    return cases


def _sizes_that_fit(target: Target) -> Iterator[tuple[str, int, str]]:
    for model in MODELS:
        for size in SIZES:
            if pool_budget(target, _config(model), size) > target.spec.hbm_bytes / 20:
                yield from ((model, size, bucket) for bucket in BUCKETS)


def pool_budget(target: Target, model: ModelConfig, size: int) -> int:
    """Returns the bytes that an engine gives to the KV pool on each device, by default."""
    weights = sum(
        count * num_elements * (4 if is_norm(name) else DTYPE.itemsize)
        for name, num_elements, count in _weights(model, head_layout(model, size))
    )
    return int(ACCELERATOR_FRACTION * (target.spec.hbm_bytes - weights))


def _weights(model: ModelConfig, layout: HeadLayout) -> Iterator[tuple[str, int, int]]:
    """Yields every parameter's name, elements on one device, and in how many layers it is."""
    for shapes, count in (
        (top_shapes(model, layout), 1),
        (layer_shapes(model, layout), model.num_layers),
    ):
        for name, (shape, axes) in shapes.items():
            parts = layout.tensor_parallel_size if any(axes) else 1
            yield name, math.prod(shape) // parts, count


def _config(model: str) -> ModelConfig:
    return model_config_from_hf(MODELS[model] | {"max_position_embeddings": MAX_MODEL_LEN})


def _run(target: Target, name: str, size: int, bucket_name: str) -> Found:
    model, bucket = _config(name), BUCKETS[bucket_name]
    layout = head_layout(model, size)
    mesh = mesh_of(target, size)
    loop = BEST_LOOP[target.spec.platform]
    page_size = DEFAULT_PAGE_SIZE[target.spec.platform]
    options = StepOptions(model, mesh, target.backend, loop, MAX_MODEL_LEN // page_size)
    params = _abstract_params(model, layout, mesh, stacked=loop == "scanned")
    state = _abstract_state(target, options, layout, page_size)
    program = compiled(target, mesh, lambda: trace_step(options, bucket, params, state))

    pool = math.prod(state.kv_pool.sharding.shard_shape(state.kv_pool.shape))
    sizes = {pool, pool // model.num_layers}
    for _, num_elements, count in _weights(model, layout):
        if num_elements >= SMALLEST_WEIGHT:
            sizes |= {num_elements, num_elements * count}
    alias_bytes = pool * DTYPE.itemsize + state.last_tokens.size * 4
    found = judged(target, program, alias_bytes, sizes, _most_temp_bytes(model, bucket))
    _judge_collectives(program.text, model, bucket, size, loop, found)
    if target.backend is Backend.MOSAIC_GPU:
        judge_gpu_kernels(program, found)
    found.figures["pool GiB"] = round(pool * DTYPE.itemsize / GIB, 2)
    return found


def _abstract_params(model: ModelConfig, layout: HeadLayout, mesh, stacked: bool):
    def abstract(box: meta.Partitioned) -> jax.ShapeDtypeStruct:
        sharding = sharding_of(mesh, box.names)
        return jax.ShapeDtypeStruct(box.value.shape, box.value.dtype, sharding=sharding)

    boxed = jax.eval_shape(
        partial(init_params, model, layout, dtype=DTYPE, stacked=stacked), jax.random.key(0)
    )
    return jax.tree.map(abstract, boxed, is_leaf=lambda node: isinstance(node, meta.Partitioned))


def _abstract_state(
    target: Target, options: StepOptions, layout: HeadLayout, page_size: int
) -> StepState:
    """The state of an engine that takes what memory it takes by default."""
    mesh, model = options.mesh, options.model
    pool = layout_of(target.backend, model, layout, DTYPE)
    num_pages = choose_num_pages(
        CacheSettings(kv_memory_bytes=pool_budget(target, model, mesh.size)),
        model,
        pool,
        DTYPE,
        page_size=page_size,
        max_num_seqs=NUM_ROWS,
        max_model_len=MAX_MODEL_LEN,
        device=mesh.devices.flat[0],
    )
    shape = pool_shape(model.num_layers, num_pages, page_size, pool, mesh.size)
    return StepState(
        jax.ShapeDtypeStruct(shape, DTYPE, sharding=pool_sharding(mesh)),
        jax.ShapeDtypeStruct((NUM_ROWS + 1,), jnp.int32, sharding=replicated(mesh)),
    )


def _most_temp_bytes(model: ModelConfig, bucket: Bucket) -> int:
    """What a step may take besides its arguments: six times all logits in float32, for sampling
    (three, but for a v5p that is nearly full), and twice the activations of a layer; nothing that
    grows with layers or pool."""
    logits = bucket.num_rows * model.vocab_size
    activations = bucket.num_tokens * (model.intermediate_size * 2 + model.hidden_size * 4)
    return 4 * (6 * logits + 2 * activations) + 16 * MIB


def _judge_collectives(
    text: str, model: ModelConfig, bucket: Bucket, size: int, loop: str, found: Found
) -> None:
    """Two sums over the devices in each layer, of the residual stream's size, and one for the split
    embedding; what else there is is sampling's, over the split vocabulary."""
    counts = collectives(text)
    stream = ("all-reduce", model.hidden_size * bucket.num_tokens)
    in_layers = counts.pop(stream, 0)
    others = sum(counts.values())
    expected = 0 if size == 1 else 1 + 2 * (1 if loop == "scanned" else model.num_layers)
    found.figures |= {"sums of x": in_layers, "other collectives": others}
    found.expect(in_layers == expected, f"sums x over devices {in_layers} times, not {expected}")
    most = 0 if size == 1 else MOST_COLLECTIVES_OF_SAMPLING
    found.expect(
        others <= most, f"has {others} other collectives, more than {most}: {dict(counts)}"
    )
