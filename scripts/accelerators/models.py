"""The models whose steps are compiled, and the arrays of an engine that serves one. Knows shapes
and bytes, not programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from accelerators.targets import Target
from flax.core import meta
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jserve.config import CacheSettings
from jserve.models.config import ModelConfig
from jserve.models.decoder import init_params
from jserve.models.families import model_config_from_hf
from jserve.models.head_layout import HeadLayout, head_layout
from jserve.models.params import is_matrix, is_norm, layer_shapes, top_shapes
from jserve.models.quantize import Quantization
from jserve.runner.kv_cache import ACCELERATOR_FRACTION, KV_DTYPES, choose_num_pages, layout_of
from jserve.runner.mesh import MODEL_AXIS, pool_sharding, replicated, sharding_of
from jserve.runner.step import StepOptions, StepState, make_sampler_state
from pallas_kernels.kv_layout import pool_shape
from pallas_kernels.quantized_matmul import quantize

DTYPE = jnp.dtype(jnp.bfloat16)
NUM_ROWS, MAX_MODEL_LEN = 64, 8192  # and as many slots as rows

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


class Bits(NamedTuple):
    """What an engine holds weights and pages in, as its flags say it."""

    quantization: Quantization = "none"
    kv_cache_dtype: str = "auto"

    @property
    def kv_dtype(self) -> jnp.dtype:
        return KV_DTYPES.get(self.kv_cache_dtype, DTYPE)

    def weight_bytes(self, name: str) -> int:
        """Of an element; a row's scale is of no account beside it."""
        if is_norm(name):
            return 4
        return 1 if self.quantization == "w8a8" and is_matrix(name) else DTYPE.itemsize


EIGHT_BITS = {
    "w8a8": Bits("w8a8"),
    "int8-pages": Bits(kv_cache_dtype="int8"),
    "fp8-pages": Bits(kv_cache_dtype="fp8"),
    "w8a8-int8-pages": Bits("w8a8", "int8"),
    "w8a8-fp8-pages": Bits("w8a8", "fp8"),
}


def pool_budget(target: Target, model: ModelConfig, size: int, bits: Bits) -> int:
    """Returns the bytes that an engine gives to the KV pool on each device, by default."""
    weights = sum(
        count * num_elements * bits.weight_bytes(name)
        for name, num_elements, count in weights_of(model, head_layout(model, size))
    )
    return int(ACCELERATOR_FRACTION * (target.spec.hbm_bytes - weights))


def weights_of(model: ModelConfig, layout: HeadLayout) -> Iterator[tuple[str, int, int]]:
    """Yields every parameter's name, elements on one device, and in how many layers it is."""
    for shapes, count in (
        (top_shapes(model, layout), 1),
        (layer_shapes(model, layout), model.num_layers),
    ):
        for name, (shape, axes) in shapes.items():
            parts = layout.tensor_parallel_size if any(axes) else 1
            yield name, math.prod(shape) // parts, count


def config_of(model: str) -> ModelConfig:
    return model_config_from_hf(MODELS[model] | {"max_position_embeddings": MAX_MODEL_LEN})


def abstract_params(
    model: ModelConfig, layout: HeadLayout, mesh: Mesh, stacked: bool, bits: Bits
) -> dict[str, Any]:
    def abstract(path: tuple, box: meta.Partitioned) -> Any:
        array = box.value
        if bits.quantization == "w8a8" and is_matrix(path[-1].key):
            array = jax.eval_shape(partial(quantize, kind="w8a8"), array)
        return jax.tree.map(  # scales lack the last axis
            lambda x: x.update(sharding=sharding_of(mesh, box.names[: x.ndim])), array
        )

    boxed = jax.eval_shape(
        partial(init_params, model, layout, dtype=DTYPE, stacked=stacked), jax.random.key(0)
    )
    params = jax.tree_util.tree_map_with_path(
        abstract, boxed, is_leaf=lambda node: isinstance(node, meta.Partitioned)
    )
    if bits.kv_cache_dtype == "int8":
        shape = (model.num_layers, 2, layout.num_kv_heads, model.head_dim)
        split = NamedSharding(mesh, PartitionSpec(None, None, MODEL_AXIS, None))
        params["kv_scales"] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=split)
    return params


def abstract_state(
    target: Target, options: StepOptions, layout: HeadLayout, page_size: int, bits: Bits
) -> StepState:
    """The state of an engine that takes what memory it takes by default."""
    mesh, model = options.mesh, options.model
    dtype = bits.kv_dtype
    pool = layout_of(target.backend, model, layout, dtype)
    num_pages = choose_num_pages(
        CacheSettings(kv_memory_bytes=pool_budget(target, model, mesh.size, bits)),
        model,
        pool,
        dtype,
        page_size=page_size,
        max_num_seqs=NUM_ROWS,
        max_model_len=MAX_MODEL_LEN,
        device=mesh.devices.flat[0],
    )
    shape = pool_shape(model.num_layers, num_pages, page_size, pool, mesh.size)
    sampler = jax.eval_shape(partial(make_sampler_state, NUM_ROWS, model.vocab_size))
    return StepState(
        jax.ShapeDtypeStruct(shape, dtype, sharding=pool_sharding(mesh)),
        jax.tree.map(lambda x: x.update(sharding=replicated(mesh)), sampler),
    )
