"""Presents a GGUF file as a Hugging Face checkpoint: its config, names, row order and norm scales.

Knows llama.cpp's conventions for the architectures below; the bytes are `gguf_format.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jserve.checkpoint.gguf_format import GgufFile, GgufTensor, read_gguf, read_rows
from jserve.checkpoint.source import Checkpoint, Tensor
from jserve.errors import CheckpointError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # Mistral too
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_GEMMA = ("gemma2", "gemma3")
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}  # scales its queries by width / heads
_SLIDING_PATTERN = {"gemma2": 2, "gemma3": 6}
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
ROPE_FACTORS = "rope_freqs.weight"
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_NAMES = _LAYER_NAMES | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def open_gguf(path: Path) -> Checkpoint:
    """Opens a GGUF file. Tensors are dequantised to float32 a few rows at a time, when read.

    Undone on the way: the permutation of q and k rows in files of the llama architecture, and the
    one added to Gemma's norm scales.

    Raises:
      CheckpointError: the file is damaged (`gguf_format.read_gguf`), or its architecture, a
        tensor name or a rope setting is not supported.
    """
    file = read_gguf(path)
    metadata = file.metadata
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture={arch!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    if metadata.get("split.count", 1) > 1:
        raise CheckpointError(
            f"{path}: is one of {metadata['split.count']} parts of a split file; merge them first"
        )
    config = _config(file, arch)
    entries = {}
    for tensor in file.tensors.values():
        if tensor.name != ROPE_FACTORS:
            entry = _entry(file, arch, tensor, config["head_dim"])
            entries[entry.name] = entry
    eos = [metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS]
    return Checkpoint(
        kind="gguf",
        source=path,
        config=config,
        generation_config={"eos_token_id": [i for i in dict.fromkeys(eos) if i is not None]},
        entries=entries,
        gguf_metadata=metadata,
    )


def _entry(file: GgufFile, arch: str, tensor: GgufTensor, head_dim: int) -> Tensor:
    order = None
    if arch == "llama" and tensor.name.rpartition(".")[0].endswith((".attn_q", ".attn_k")):
        order = row_order(tensor.shape[0], head_dim)
    read: Callable[[int, int], np.ndarray] = partial(read_rows, file, tensor, order)
    if arch in _GEMMA and tensor.name.endswith("norm.weight"):
        read = partial(_minus_one, read)
    return Tensor(_hugging_face_name(file.path, arch, tensor.name), tensor.shape, file.path, read)


def row_order(num_rows: int, head_dim: int) -> np.ndarray:
    """Returns, for each row of a Hugging Face q or k weight or bias, its row in a llama-type file.

    llama.cpp rotates adjacent pairs of rows, Hugging Face the two halves of a head.
    # one head of 6 rows -> 0 2 4 1 3 5
    """
    return np.arange(num_rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).ravel()


def _minus_one(read: Callable[[int, int], np.ndarray], start: int, stop: int) -> np.ndarray:
    return read(start, stop) - np.float32(1)


def _hugging_face_name(path: Path, arch: str, name: str) -> str:
    stem, _, suffix = name.rpartition(".")  # suffix: weight or bias
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    block, _, part = stem.removeprefix("blk.").partition(".")
    names = _GEMMA_LAYER_NAMES if arch in _GEMMA else _LAYER_NAMES
    if not stem.startswith("blk.") or part not in names:
        raise CheckpointError(f"{path}: tensor {name} is no part of a supported {arch} model")
    return f"model.layers.{block}.{names[part]}.{suffix}"


def _config(file: GgufFile, arch: str) -> dict[str, Any]:
    """Returns a Hugging Face config dict of the file's settings."""
    get = partial(_setting, file, arch)
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing")
    width, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", get("rope.dimension_count", width // heads))
    if get("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(
            f"{file.path}: {arch}.rope.dimension_count is not the head size {head_dim}: rotating "
            "a part of a head is not supported"
        )
    if get("rope.scale_linear", 1.0) != 1.0:
        raise CheckpointError(f"{file.path}: {arch}.rope.scale_linear is not supported")
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "rope_parameters": _rope(file, get),
    }
    if arch != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    if arch in _GEMMA:
        config |= _gemma_config(get, arch, config)
    elif arch == "llama" and get("attention.sliding_window", 0):
        config |= {
            "architectures": ["MistralForCausalLM"],
            "sliding_window": get("attention.sliding_window"),
        }
    return config


def _gemma_config(get: Callable[..., Any], arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that only Gemma has; several are fixed in llama.cpp, not in the file."""
    num_layers = config["num_hidden_layers"]
    query_scalar = config["head_dim"]
    if num_layers == _GEMMA_27B_LAYERS[arch]:
        query_scalar = config["hidden_size"] // config["num_attention_heads"]
    pattern = get("attention.sliding_window_pattern", _SLIDING_PATTERN[arch])
    if isinstance(pattern, int):
        local = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    else:
        local = [bool(here) for here in pattern]
    rope = config["rope_parameters"]
    if arch == "gemma3":
        local_rope = {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 10_000.0)}
        rope = {"full_attention": rope, "sliding_attention": local_rope}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": query_scalar,
        "sliding_window": get("attention.sliding_window"),
        "layer_types": ["sliding_attention" if here else "full_attention" for here in local],
        "attn_logit_softcapping": get("attn_logit_softcapping", None),
        "final_logit_softcapping": get("final_logit_softcapping", None),
        "rope_parameters": rope,
    }


_REQUIRED = object()


def _setting(file: GgufFile, arch: str, key: str, default: Any = _REQUIRED) -> Any:
    name = f"{arch}.{key}"
    value = file.metadata.get(name, default)
    if value is _REQUIRED:
        raise CheckpointError(f"{file.path}: key {name} is missing")
    if isinstance(value, list) and "sliding_window_pattern" not in key:  # one value per layer
        if len(set(value)) != 1:
            raise CheckpointError(f"{file.path}: {name} differs between layers: not supported")
        return value[0]
    return value


def _rope(file: GgufFile, get: Callable[..., Any]) -> dict[str, Any]:
    theta = get("rope.freq_base", 10_000.0)
    kind = get("rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        return _llama3_rope(file, theta, get)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    rope = {"rope_type": kind, "rope_theta": theta, "factor": get("rope.scaling.factor")}
    if kind == "yarn":
        rope |= {
            "original_max_position_embeddings": get("rope.scaling.original_context_length"),
            "beta_fast": get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": get("rope.scaling.yarn_beta_slow", 1.0),
        }
    return rope


def _llama3_rope(file: GgufFile, theta: float, get: Callable[..., Any]) -> dict[str, Any]:
    """Returns llama3 scaling, which these files hold as one divisor per frequency.

    Meta's models use low and high frequency factors 1 and 4 and an original length of 8192; the
    largest divisor is the factor. Other divisors are refused.
    """
    tensor = file.tensors[ROPE_FACTORS]
    stored = read_rows(file, tensor, None, 0, tensor.shape[0])
    factor, low, high = float(stored.max()), 1.0, 4.0
    original = get("rope.scaling.original_context_length", 8192)
    frequencies = theta ** -(np.arange(len(stored)) / len(stored))
    turns = original * frequencies / (2 * np.pi)  # over the original length
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), stored, rtol=1e-3):
        raise CheckpointError(
            f"{file.path}: tensor {ROPE_FACTORS} is not a llama3 scaling (factors 1 and 4, "
            f"original length {original}); other rope divisors are not supported"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
