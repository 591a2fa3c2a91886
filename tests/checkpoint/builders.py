"""Tiny checkpoints for tests, written with the public safetensors and gguf libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from jserve.checkpoint.mapping import expected_tensors
from jserve.models.families import model_config_from_hf

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
GEMMA3 = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 32,
    "sliding_window": 16,
    "rope_theta": 1_000_000.0,
}
GEMMA2 = GEMMA3 | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Returns float32 tensors under Hugging Face names, exactly representable in bfloat16."""
    rng = np.random.default_rng(seed)
    shapes = expected_tensors(model_config_from_hf(config))
    return {
        name: (rng.integers(-64, 64, shape) / 64).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_folder(
    folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], num_shards: int = 1
) -> Path:
    """Writes a Hugging Face folder: one file, or `num_shards` files and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names, weight_map = sorted(tensors), {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


_GGUF_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_NORMS = {
    False: {"post_attention_layernorm": "ffn_norm"},
    True: {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
_GGUF_TOP = {"embed_tokens": "token_embd", "norm": "output_norm"}


def gguf_name(name: str, is_gemma: bool) -> str:
    """Returns llama.cpp's name of a Hugging Face tensor."""
    stem, suffix = name.removeprefix("model.").rsplit(".", 1)
    if stem == "lm_head":
        return f"output.{suffix}"
    if stem in _GGUF_TOP:
        return f"{_GGUF_TOP[stem]}.{suffix}"
    _, layer, part = stem.split(".", 2)
    return f"blk.{layer}.{(_GGUF_PARTS | _GGUF_NORMS[is_gemma])[part]}.{suffix}"


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k rows: halves of a head become adjacent pairs."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    arch: str = "llama",
    kind: str = "F32",
    extra: dict[str, np.ndarray] | None = None,
    settings: dict[str, Any] | None = None,
) -> Path:
    """Writes a GGUF file as llama.cpp's converter would; matrices in `kind`, the rest in F32."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "é"])
    writer.add_token_scores([0.0, -1.5, -2.0])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (settings or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_array)(key, value)
    quantised = gguf.GGMLQuantizationType[kind]
    for name, array in tensors.items():
        if arch == "llama" and "q_proj" in name:
            array = permuted(array, config["num_attention_heads"])
        if arch == "llama" and "k_proj" in name:
            array = permuted(array, config["num_key_value_heads"])
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + np.float32(1)
        stored = gguf_name(name, arch.startswith("gemma"))
        if array.ndim == 1:
            writer.add_tensor(stored, array)
        else:
            writer.add_tensor(stored, gguf.quants.quantize(array, quantised), raw_dtype=quantised)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
