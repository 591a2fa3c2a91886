"""A checkpoint loaded in int8 is the loaded checkpoint rounded to int8, whatever kind it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.checkpoint.gguf import open_gguf
from jserve.checkpoint.mapping import load_params
from jserve.checkpoint.orbax import open_orbax, write_orbax
from jserve.checkpoint.safetensors import open_safetensors
from jserve.models.families import model_config_from_hf
from jserve.models.head_layout import head_layout
from jserve.models.params import is_matrix
from pallas_kernels.quantized_matmul import QuantizedTensor, quantize
from tests.checkpoint.builders import GEMMA3, LLAMA, random_tensors, write_folder, write_gguf

CONFIG = LLAMA | {"attention_bias": True, "mlp_bias": True}


def load(checkpoint, quantization: str, dtype: str = "float32", stacked: bool = False):
    config = model_config_from_hf(checkpoint.config)
    layout = head_layout(config)
    return load_params(
        checkpoint, config, layout, dtype, stacked=stacked, quantization=quantization
    )


def opened(kind: str, hf_config: dict, folder):
    tensors = random_tensors(hf_config)
    if kind == "gguf":
        return open_gguf(write_gguf(folder / "model.gguf", hf_config, tensors))
    source = open_safetensors(write_folder(folder / "hf", hf_config, tensors))
    if kind == "safetensors":
        return source
    write_orbax(source, folder / "orbax", "float32")
    return open_orbax(folder / "orbax")


def named(tree):
    """The parameters of a tree by the last part of their names."""
    is_param = lambda node: isinstance(node, QuantizedTensor)  # noqa: E731
    return [
        (str(path[-1].key), param)
        for path, param in jax.tree.leaves_with_path(tree, is_leaf=is_param)
    ]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("kind", "hf_config"),
    [("safetensors", CONFIG), ("safetensors", GEMMA3), ("orbax", CONFIG), ("gguf", LLAMA)],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_a_model_loaded_in_int8_is_the_loaded_model_rounded(tmp_path, kind, hf_config, stacked):
    checkpoint = opened(kind, hf_config, tmp_path)
    plain = named(load(checkpoint, "none", stacked=stacked))
    rounded = named(load(checkpoint, "w8a8", stacked=stacked))
    assert [name for name, _ in plain] == [name for name, _ in rounded]
    for (name, param), (_, found) in zip(plain, rounded, strict=True):
        assert isinstance(found, QuantizedTensor) == is_matrix(name), name
        expected = quantize(param, "w8a8") if is_matrix(name) else param
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrices_are_rounded_from_float32_and_take_a_byte_a_weight(tmp_path, dtype):
    checkpoint = opened("safetensors", CONFIG, tmp_path)
    tensor = checkpoint.entries["model.layers.0.mlp.down_proj.weight"].read()
    layer = load(checkpoint, "w8a8", dtype)["layers"][0]
    down = layer["down"]
    assert down.values.dtype == jnp.int8
    assert down.values.nbytes == tensor.size
    assert down.scales.dtype == layer["attn_norm"].dtype == jnp.float32
    assert layer["down_bias"].dtype == dtype
    scale = np.abs(tensor).max(axis=1, keepdims=True) / np.float32(127)
    np.testing.assert_array_equal(down.values, np.round(tensor / scale))
