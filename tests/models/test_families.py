"""Hugging Face configs, old and new, become the right ModelConfig or are refused by name."""

from __future__ import annotations

import pytest

from jserve.errors import CheckpointError
from jserve.models.config import RopeConfig
from jserve.models.families import SUPPORTED_ARCHITECTURES, model_config_from_hf

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def config_of(architecture="LlamaForCausalLM", generation_config=None, **changes):
    hf = BASE | {"architectures": [architecture]} | changes
    return model_config_from_hf(hf, generation_config)


def refusal(**changes) -> str:
    with pytest.raises(CheckpointError) as caught:
        config_of(**changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0},
}


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_O77_rope_scaling_is_read_under_both_names_of_its_kind(kind, key):
    rope = config_of(rope_theta=5e5, rope_scaling={key: kind, **SCALINGS[kind]}).rope
    assert (rope.theta, rope.kind, rope.factor) == (5e5, kind, SCALINGS[kind]["factor"])
    expected = SCALINGS[kind].get("original_max_position_embeddings", 512)
    assert rope.original_max_position == expected
    assert rope.beta_fast == SCALINGS[kind].get("beta_fast", 32.0)


@pytest.mark.parametrize("kind", SCALINGS)
def test_O77_rope_parameters_of_transformers_5_say_the_same(kind):
    old = config_of(rope_theta=5e5, rope_scaling={"rope_type": kind, **SCALINGS[kind]})
    parameters = {"rope_type": kind, "rope_theta": 5e5, **SCALINGS[kind]}
    assert config_of(rope_parameters=parameters) == old


def test_O77_an_unknown_rope_kind_is_named_with_those_supported():
    message = refusal(rope_scaling={"rope_type": "longrope", "factor": 2.0})
    assert "'longrope'" in message
    assert "default, linear, dynamic, llama3, yarn" in message


def test_O77_scaling_without_its_parameters_is_refused():
    assert "'linear' lacks its parameters" in refusal(rope_scaling={"type": "linear"})
    assert "'llama3' lacks" in refusal(rope_scaling={"rope_type": "llama3", "factor": 8.0})


def test_yarn_derives_a_missing_factor_from_the_lengths():
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128}
    assert config_of(rope_scaling=scaling).rope.factor == 4.0


@pytest.mark.parametrize(
    "parameters", [{"partial_rotary_factor": 0.5}, {"rope_type": "yarn", "truncate": False}]
)
def test_rope_settings_that_are_not_built_are_refused(parameters):
    assert "is not supported" in refusal(rope_parameters={"factor": 2.0, **parameters})


def test_rope_defaults_to_base_ten_thousand():
    assert config_of().rope == RopeConfig(theta=10_000.0)
    assert config_of(rope_scaling=None).rope_local is None


def test_O78_head_dim_is_taken_from_the_config_where_it_is_given():
    config = config_of(hidden_size=96, head_dim=32)
    assert (config.head_dim, config.query_scale) == (32, 32**-0.5)
    assert config_of().head_dim == 16
    assert config_of(head_dim=None).head_dim == 16


def test_O78_heads_need_not_divide_the_width():
    config = config_of("Qwen3ForCausalLM", hidden_size=100, num_attention_heads=6, head_dim=32)
    assert (config.hidden_size, config.num_heads, config.head_dim) == (100, 6, 32)


def test_each_family_has_its_biases_and_norms():
    has = lambda c: (c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm, c.post_norms)  # noqa: E731
    assert has(config_of()) == (False, False, False, False, False)
    with_biases = config_of(attention_bias=True, mlp_bias=True)
    assert has(with_biases) == (True, True, True, False, False)
    assert has(config_of("MistralForCausalLM")) == (False, False, False, False, False)
    assert has(config_of("Qwen2ForCausalLM")) == (True, False, False, False, False)
    assert has(config_of("Qwen3ForCausalLM")) == (False, False, False, True, False)
    assert has(config_of("Gemma2ForCausalLM")) == (False, False, False, False, True)
    assert has(config_of("Gemma3ForCausalLM")) == (False, False, False, True, True)


def test_gemma_scales_embeddings_and_queries_and_offsets_norms():
    config = config_of("Gemma2ForCausalLM", query_pre_attn_scalar=144)
    assert config.embedding_scale == 8.0
    assert config.query_scale == 1 / 12
    assert config.norm_offset == 1.0
    assert config.activation == "gelu_tanh"
    assert config.tie_word_embeddings
    assert (config.attn_soft_cap, config.final_soft_cap) == (50.0, 30.0)


def test_an_explicit_null_turns_a_default_off():
    config = config_of(
        "Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None
    )
    assert (config.attn_soft_cap, config.final_soft_cap) == (None, None)
    assert config_of("MistralForCausalLM", sliding_window=None).sliding_windows == (0,) * 4


def test_sliding_windows_follow_each_family():
    windows = lambda *args, **kw: config_of(*args, sliding_window=64, **kw).sliding_windows  # noqa: E731
    assert windows() == (0, 0, 0, 0)
    assert windows("MistralForCausalLM") == (64,) * 4
    assert windows("Qwen2ForCausalLM", max_window_layers=2) == (0,) * 4
    used = {"use_sliding_window": True, "max_window_layers": 2}
    assert windows("Qwen2ForCausalLM", **used) == (0, 0, 64, 64)
    assert windows("Gemma2ForCausalLM") == (64, 0, 64, 0)
    assert windows("Gemma3ForCausalLM") == (64, 64, 64, 64)
    assert windows("Gemma3ForCausalLM", sliding_window_pattern=3) == (64, 64, 0, 64)
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    assert windows("Gemma3ForCausalLM", layer_types=kinds) == (0, 64, 0, 64)
    assert windows("Qwen3ForCausalLM", layer_types=kinds, **used) == (0, 64, 0, 64)


def test_unknown_layer_types_are_refused():
    message = refusal(architecture="Gemma3ForCausalLM", layer_types=["chunked_attention"] * 4)
    assert "chunked_attention" in message


def test_gemma3_ropes_are_the_same_in_old_and_new_files():
    old = config_of(
        "Gemma3ForCausalLM",
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    new = config_of(
        "Gemma3ForCausalLM",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    assert old == new
    assert (old.rope.kind, old.rope.theta) == ("linear", 1e6)
    assert old.rope_local == RopeConfig(theta=1e4)


def test_the_text_model_of_a_multimodal_gemma3_is_taken():
    # as published: whatever equals the default is left out
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = model_config_from_hf(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "text_config": text,
            "vision_config": {"hidden_size": 1152},
        }
    )
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (2560, 34, 262_208)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.eos_token_ids == (1, 106)
    assert config.sliding_windows[:6] == (1024,) * 5 + (0,)


def test_a_familys_default_eos_id_counts_only_where_the_files_name_none():
    assert config_of(generation_config={"eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    assert config_of().eos_token_ids == (2,)
    assert config_of(eos_token_id=None).eos_token_ids == ()


def test_eos_ids_of_the_generation_config_come_first_and_are_joined():
    config = config_of(generation_config={"eos_token_id": [7, 8]}, eos_token_id=2)
    assert config.eos_token_ids == (7, 8, 2)
    assert config_of(generation_config={"eos_token_id": 2}, eos_token_id=[2, 3]).eos_token_ids == (
        2,
        3,
    )
    assert config_of("Qwen2ForCausalLM").eos_token_ids == ()


@pytest.mark.parametrize("architectures", [["MambaForCausalLM"], [], None])
def test_an_unknown_architecture_is_named_with_those_supported(architectures):
    with pytest.raises(CheckpointError, match="is not supported") as caught:
        model_config_from_hf(BASE | {"architectures": architectures})
    assert all(name in str(caught.value) for name in SUPPORTED_ARCHITECTURES)


def test_quantised_weights_are_refused_with_their_method():
    message = refusal(quantization_config={"quant_method": "gptq", "bits": 4})
    assert "'gptq'" in message


def test_an_unknown_activation_is_refused():
    assert "'relu2'" in refusal(hidden_act="relu2")


@pytest.mark.parametrize("value", [None, 0, -1, "64", 6.5, True])
def test_a_size_that_is_no_positive_integer_is_named(value):
    assert f"hidden_size={value!r}" in refusal(hidden_size=value)


def test_query_heads_must_be_a_multiple_of_kv_heads():
    assert "num_key_value_heads=3" in refusal(num_key_value_heads=3)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3Text"])
def test_a_config_written_by_transformers_keeps_its_meaning(name):
    import transformers  # a second to import

    sizes = {key: value for key, value in BASE.items() if key != "architectures"}
    hf = getattr(transformers, f"{name}Config")(**sizes, head_dim=32)
    architecture = f"{name.removesuffix('Text')}ForCausalLM"
    config = model_config_from_hf({**hf.to_dict(), "architectures": [architecture]})
    assert config.head_dim == 32
    assert config.max_position == 512
    assert config.tie_word_embeddings == hf.tie_word_embeddings
    assert config.rms_norm_eps == hf.rms_norm_eps
    ropes = hf.rope_parameters
    full = ropes.get("full_attention", ropes)
    assert config.rope.theta == full["rope_theta"]
    if name == "Gemma3Text":
        assert config.rope_local.theta == ropes["sliding_attention"]["rope_theta"]
    kinds = getattr(hf, "layer_types", None)
    if kinds is not None:
        local = tuple(window > 0 for window in config.sliding_windows)
        assert local == tuple(kind == "sliding_attention" for kind in kinds)
