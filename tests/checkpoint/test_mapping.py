"""Every tensor lands in its place, and a checkpoint that does not match its config is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.checkpoint.mapping import load_params
from jserve.checkpoint.safetensors import open_safetensors
from jserve.errors import CheckpointError, ConfigError
from jserve.models.families import model_config_from_hf
from jserve.models.head_layout import ZERO_HEAD, head_layout
from jserve.models.params import ParamShape, param_shapes
from tests.checkpoint.builders import GEMMA3, LLAMA, QWEN2, random_tensors, write_folder

H = 32


def load(folder, tensor_parallel_size=1, dtype="float32", **kwargs):
    checkpoint = open_safetensors(folder)
    config = model_config_from_hf(checkpoint.config)
    layout = head_layout(config, tensor_parallel_size)
    return load_params(checkpoint, config, layout, dtype, **kwargs), config, layout


def load_error(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_tensor_of_an_untied_llama_lands_in_its_place(tmp_path):
    tensors = random_tensors(LLAMA)
    params, _, _ = load(write_folder(tmp_path, LLAMA, tensors))
    np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["final_norm"], tensors["model.norm.weight"])
    np.testing.assert_array_equal(params["lm_head"], tensors["lm_head.weight"])
    for i, layer in enumerate(params["layers"]):
        of = {n.split(f"layers.{i}.")[-1]: t for n, t in tensors.items() if f"layers.{i}." in n}
        for kv_head in range(2):
            for g in range(2):
                head = kv_head * 2 + g
                rows = slice(head * H, (head + 1) * H)
                q = of["self_attn.q_proj.weight"][rows]
                np.testing.assert_array_equal(layer["qkv"][kv_head, g], q)
                o = of["self_attn.o_proj.weight"][:, rows]
                np.testing.assert_array_equal(layer["o"][:, rows], o)
            rows = slice(kv_head * H, (kv_head + 1) * H)
            k, v = of["self_attn.k_proj.weight"][rows], of["self_attn.v_proj.weight"][rows]
            np.testing.assert_array_equal(layer["qkv"][kv_head, 2], k)
            np.testing.assert_array_equal(layer["qkv"][kv_head, 3], v)
        np.testing.assert_array_equal(layer["gate_up"][0], of["mlp.gate_proj.weight"])
        np.testing.assert_array_equal(layer["gate_up"][1], of["mlp.up_proj.weight"])
        np.testing.assert_array_equal(layer["down"], of["mlp.down_proj.weight"])
        np.testing.assert_array_equal(layer["attn_norm"], of["input_layernorm.weight"])
        np.testing.assert_array_equal(layer["mlp_norm"], of["post_attention_layernorm.weight"])


def test_biases_land_beside_their_weights(tmp_path):
    config = LLAMA | {"attention_bias": True, "mlp_bias": True}
    tensors = random_tensors(config)
    layer = load(write_folder(tmp_path, config, tensors))[0]["layers"][1]
    of = {n.removeprefix("model.layers.1."): t for n, t in tensors.items() if "layers.1." in n}
    q = of["self_attn.q_proj.bias"].reshape(2, 2, H)
    np.testing.assert_array_equal(layer["qkv_bias"][:, :2], q)
    np.testing.assert_array_equal(layer["qkv_bias"][1, 2], of["self_attn.k_proj.bias"][H:])
    np.testing.assert_array_equal(layer["qkv_bias"][0, 3], of["self_attn.v_proj.bias"][:H])
    np.testing.assert_array_equal(layer["o_bias"], of["self_attn.o_proj.bias"])
    np.testing.assert_array_equal(layer["gate_up_bias"][1], of["mlp.up_proj.bias"])
    np.testing.assert_array_equal(layer["down_bias"], of["mlp.down_proj.bias"])


def test_gemma_norm_scales_gain_one_and_stay_float32(tmp_path):
    tensors = random_tensors(GEMMA3)
    params, _, _ = load(write_folder(tmp_path, GEMMA3, tensors), dtype="bfloat16")
    layer, prefix = params["layers"][0], "model.layers.0."
    for leaf, name in {
        "attn_norm": "input_layernorm",
        "post_attn_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
    }.items():
        assert layer[leaf].dtype == jnp.float32
        np.testing.assert_array_equal(layer[leaf], tensors[f"{prefix}{name}.weight"] + 1)
    np.testing.assert_array_equal(params["final_norm"], tensors["model.norm.weight"] + 1)
    assert layer["qkv"].dtype == params["embed"].dtype == jnp.bfloat16


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 4])
@pytest.mark.parametrize("hf_config", [LLAMA, QWEN2, GEMMA3], ids=lambda c: c["model_type"])
def test_parameters_have_the_declared_shapes(tmp_path, hf_config, tensor_parallel_size, stacked):
    folder = write_folder(tmp_path, hf_config, random_tensors(hf_config))
    params, config, layout = load(folder, tensor_parallel_size, stacked=stacked)
    declared = param_shapes(config, layout, stacked)
    shapes = jax.tree.map(lambda s: s.shape, declared, is_leaf=lambda n: isinstance(n, ParamShape))
    assert jax.tree.map(lambda a: a.shape, params) == shapes


def test_stacked_layers_equal_unrolled_ones(tmp_path):
    folder = write_folder(tmp_path, QWEN2, random_tensors(QWEN2))
    unrolled, stacked = load(folder)[0]["layers"], load(folder, stacked=True)[0]["layers"]
    for leaf, array in stacked.items():
        np.testing.assert_array_equal(array, np.stack([layer[leaf] for layer in unrolled]))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tensor_parallel_size", "laid_out"),
    [
        (4, 4, 2, (4, 1)),  # divides
        (9, 3, 2, (4, 3)),  # one KV head of zeros
        (4, 1, 4, (4, 1)),  # each copy takes one query head
        (6, 2, 4, (4, 2)),  # groups of 3 split in 2 and 1
    ],
)
def test_heads_that_do_not_divide_are_copied_or_padded(
    tmp_path, num_heads, num_kv_heads, tensor_parallel_size, laid_out
):
    hf = LLAMA | {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    tensors = random_tensors(hf)
    params, _, layout = load(write_folder(tmp_path, hf, tensors), tensor_parallel_size)
    assert (layout.num_kv_heads, layout.group_size) == laid_out
    layer, prefix = params["layers"][0], "model.layers.0.self_attn."
    laid_out_o = layer["o"].reshape(-1, *laid_out, H)
    q = tensors[f"{prefix}q_proj.weight"].reshape(num_heads, H, -1)
    k = tensors[f"{prefix}k_proj.weight"].reshape(num_kv_heads, H, -1)
    o = tensors[f"{prefix}o_proj.weight"].reshape(-1, num_heads, H)
    seen = []
    heads = zip(layout.kv_heads, layout.query_heads, strict=True)
    for row, (kv_head, query_heads) in enumerate(heads):
        stored_k = layer["qkv"][row, layout.group_size]
        np.testing.assert_array_equal(stored_k, 0 if kv_head == ZERO_HEAD else k[kv_head])
        for column, head in enumerate(query_heads):
            is_zero = head == ZERO_HEAD
            np.testing.assert_array_equal(layer["qkv"][row, column], 0 if is_zero else q[head])
            np.testing.assert_array_equal(laid_out_o[:, row, column], 0 if is_zero else o[:, head])
            if not is_zero:
                seen.append(head)
                assert head // (num_heads // num_kv_heads) == kv_head
    assert seen == list(range(num_heads))


def test_O102_a_tensor_parallel_size_that_cannot_work_is_refused_with_those_that_can():
    config = model_config_from_hf(LLAMA | {"intermediate_size": 128})
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3 .* use one of 1, 2, 4$"):
        head_layout(config, 3)
    with pytest.raises(ConfigError, match="use one of 1, 2, 4"):
        head_layout(config, 8)


def test_a_vocabulary_that_does_not_divide_is_replicated():
    config = model_config_from_hf(LLAMA | {"vocab_size": 97})
    assert param_shapes(config, head_layout(config, 2))["embed"].logical_axes == (None, None)
    config = model_config_from_hf(LLAMA)
    assert param_shapes(config, head_layout(config, 2))["embed"].logical_axes == ("vocab", None)


def test_O73_tied_embeddings_need_no_lm_head(tmp_path):
    config = LLAMA | {"tie_word_embeddings": True}
    params, _, _ = load(write_folder(tmp_path, config, random_tensors(config)))
    assert "lm_head" not in params


def test_O74_a_stored_lm_head_is_ignored_when_embeddings_are_tied(tmp_path):
    config = LLAMA | {"tie_word_embeddings": True}
    stale = random_tensors(config) | {"lm_head.weight": np.ones((96, 64), np.float32)}
    params, _, _ = load(write_folder(tmp_path, config, stale))
    assert "lm_head" not in params


def test_a_missing_tensor_is_named(tmp_path):
    tensors = random_tensors(LLAMA)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    folder = write_folder(tmp_path, LLAMA, tensors)
    assert load_error(folder) == f"{folder}: tensor model.layers.1.mlp.up_proj.weight is missing"


def test_an_untied_model_without_lm_head_is_refused(tmp_path):
    tensors = random_tensors(LLAMA)
    del tensors["lm_head.weight"]
    assert "lm_head.weight is missing" in load_error(write_folder(tmp_path, LLAMA, tensors))


def test_an_unknown_tensor_is_named_with_its_file(tmp_path):
    extra = {"model.layers.2.mlp.up_proj.weight": np.zeros((4, 4), np.float32)}
    folder = write_folder(tmp_path, LLAMA, random_tensors(LLAMA) | extra)
    message = load_error(folder)
    assert "model.layers.2.mlp.up_proj.weight" in message
    assert message.startswith(str(folder / "model.safetensors"))


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path):
    tensors = random_tensors(LLAMA)
    tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((64, 127), np.float32)
    message = load_error(write_folder(tmp_path, LLAMA, tensors))
    assert "model.layers.0.mlp.down_proj.weight has shape [64, 127]" in message
    assert "[64, 128]" in message


def test_buffers_of_old_files_are_ignored(tmp_path):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(16, np.float32)}
    load(write_folder(tmp_path, LLAMA, random_tensors(LLAMA) | buffer))


@pytest.mark.parametrize(
    ("prefix", "other_part"),
    [
        ("model.language_model.", "model.vision_tower."),
        ("language_model.model.", "vision_tower."),
    ],
)
def test_the_text_model_of_a_multimodal_gemma_is_found(tmp_path, prefix, other_part):
    tensors = random_tensors(GEMMA3)
    renamed = {prefix + n.removeprefix("model."): t for n, t in tensors.items()}
    renamed[other_part + "patch.weight"] = np.zeros((2, 2), np.float32)
    text = {k: v for k, v in GEMMA3.items() if k != "architectures"}
    multimodal = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    params, config, _ = load(write_folder(tmp_path, multimodal, renamed))
    assert config.num_layers == 2
    np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"])


def test_each_parameter_goes_to_the_sharding_of_its_axes(tmp_path):
    asked = set()

    def sharding(axes):
        asked.add(axes)
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])

    load(write_folder(tmp_path, LLAMA, random_tensors(LLAMA)), sharding=sharding)
    assert ("vocab", None) in asked
    assert ("kv_heads", None, None, None) in asked
    assert (None, "mlp", None) in asked
