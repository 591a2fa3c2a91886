"""What a step of a model costs a device, in bytes and FLOPs. Knows architectures: no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jserve.errors import CheckpointError, ConfigError
from jserve.models.config import ModelConfig
from jserve.models.families import model_config_from_hf

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
PRESETS: dict[str, dict[str, Any]] = {
    "llama-3-8b": _LLAMA
    | {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"max_position_embeddings": 8192, "rope_theta": 500_000.0},
    "smollm2-135m": _LLAMA
    | {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536}
    | {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    | {"max_position_embeddings": 8192, "rope_theta": 100_000.0, "tie_word_embeddings": True},
}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model's weights are read once per step, KV once per context token.

    Attributes:
      weight_bytes: what a step reads: all layers and the LM head, not the embedding's other rows.
      memory_bytes: what the weights take in memory.
      flops_per_token: of the layers; the LM head, which prompts pass by, counts as bytes alone.
      flops_per_pair: of attention, per query and key.
    """

    weight_bytes: float
    memory_bytes: float
    kv_bytes_per_token: float
    flops_per_token: float
    flops_per_pair: float
    max_position: int


def model_size(config: ModelConfig, value_bytes: int = 2) -> ModelSize:
    """Returns the size of a model whose weights and KV take `value_bytes` each.

    Norms and biases, well under one per cent, are left out; a sliding window counts as none.
    """
    D, H, L, F = config.hidden_size, config.head_dim, config.num_layers, config.intermediate_size
    N, K = config.num_heads, config.num_kv_heads
    layers = L * (D * (N + 2 * K) * H + N * H * D + 3 * D * F)
    embedding = config.vocab_size * D
    return ModelSize(
        weight_bytes=value_bytes * (layers + embedding),
        memory_bytes=value_bytes * (layers + embedding * (1 if config.tie_word_embeddings else 2)),
        kv_bytes_per_token=value_bytes * 2 * L * K * H,
        flops_per_token=2 * layers,
        flops_per_pair=4 * L * N * H,
        max_position=config.max_position,
    )


def read_model_config(name: str) -> ModelConfig:
    """Returns the architecture of a preset, a Hugging Face folder, or a config.json.

    Raises:
      ConfigError: there is none of that name, or it is not supported.
    """
    path = Path(name).expanduser()
    try:
        if name in PRESETS:
            return model_config_from_hf(PRESETS[name])
        text = (path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8")
        return model_config_from_hf(json.loads(text))
    except (OSError, ValueError, CheckpointError) as error:
        raise ConfigError(
            f"--model_config={name} is not usable ({error}); give a folder with config.json, or "
            f"one of {', '.join(PRESETS)}"
        ) from error
