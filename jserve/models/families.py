"""What differs per model family: a Hugging Face config becomes a ModelConfig. Knows no tensors.

Defaults are those of the family's configuration class in transformers 5, since published
config.json files leave out values equal to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jserve.errors import CheckpointError
from jserve.models.config import ModelConfig, RopeConfig

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class _Family:
    name: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | None = None  # None: the config's attention_bias decides
    o_bias: bool | None = None
    qk_norm: bool = False
    is_gemma: bool = False


_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_GEMMA2 = _Family(
    "gemma2",
    _GEMMA_DEFAULTS
    | {
        "max_position_embeddings": 8192,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    is_gemma=True,
)
_GEMMA3 = _Family(
    "gemma3",
    _GEMMA_DEFAULTS
    | {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    qk_norm=True,
    is_gemma=True,
)
_QWEN_DEFAULTS = {
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "use_sliding_window": False,
}
_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", {"bos_token_id": 1, "eos_token_id": 2}),
    "MistralForCausalLM": _Family(
        "mistral",
        {
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        qkv_bias=False,
        o_bias=False,
    ),
    "Qwen2ForCausalLM": _Family("qwen2", _QWEN_DEFAULTS, qkv_bias=True, o_bias=False),
    "Qwen3ForCausalLM": _Family("qwen3", _QWEN_DEFAULTS | {"head_dim": 128}, qk_norm=True),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)


def model_config_from_hf(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Returns the ModelConfig that a Hugging Face config.json describes.

    Of Gemma3ForConditionalGeneration the text model is taken. EOS ids are those of
    `generation_config` (chat models list their end-of-turn ids there), then those of `config`.

    Raises:
      CheckpointError: an architecture, rope kind, activation, quantisation or value that is not
        supported or is missing; names it and what is supported.
    """
    architecture = _architecture(config)
    family = _FAMILIES[architecture]
    _refuse_quantised(config)
    values = _values(config, family)
    if values.get("use_bidirectional_attention"):
        raise CheckpointError("use_bidirectional_attention=true is not supported; only causal is")
    num_heads = _integer(values, "num_attention_heads")
    num_kv_heads = _integer(values, "num_key_value_heads", num_heads)
    hidden_size = _integer(values, "hidden_size")
    head_dim = _integer(values, "head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"num_attention_heads={num_heads}, num_key_value_heads={num_kv_heads}, "
            f"head_dim={head_dim}: query heads must be a multiple of KV heads, head_dim even"
        )
    attention_bias = bool(values.get("attention_bias", False))
    max_position = _integer(values, "max_position_embeddings", 2048)
    rope, rope_local = _ropes(values, max_position, family)
    query_scalar = float(values["query_pre_attn_scalar"]) if family.is_gemma else head_dim
    return ModelConfig(
        family=family.name,
        vocab_size=_integer(values, "vocab_size"),
        num_layers=_integer(values, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=_integer(values, "intermediate_size"),
        max_position=max_position,
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        rope=rope,
        rope_local=rope_local,
        activation=_activation(values, family),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=family.name == "llama" and bool(values.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        post_norms=family.is_gemma,
        norm_offset=1.0 if family.is_gemma else 0.0,
        embedding_scale=math.sqrt(hidden_size) if family.is_gemma else 1.0,
        query_scale=query_scalar**-0.5,
        attn_soft_cap=values.get("attn_logit_softcapping") if family.is_gemma else None,
        final_soft_cap=values.get("final_logit_softcapping") if family.is_gemma else None,
        sliding_windows=_sliding_windows(values, family),
        eos_token_ids=_eos_token_ids(generation_config or {}, config, family),
        bos_token_id=values.get("bos_token_id"),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or ["none"]
    if len(names) != 1 or names[0] not in _FAMILIES:
        raise CheckpointError(
            f"architectures={names} (model_type={config.get('model_type')!r}) is not supported; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return names[0]


def _refuse_quantised(config: Mapping[str, Any]) -> None:
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method", "unnamed")
        raise CheckpointError(
            f"quantization_config with quant_method={method!r} is not supported; "
            "use float32, float16 or bfloat16 safetensors, or a GGUF file"
        )


def _values(config: Mapping[str, Any], family: _Family) -> dict[str, Any]:
    """Returns the text model's settings, with the family's defaults where the file is silent."""
    text = {**config, **(config.get("text_config") or {})}
    values = {**family.defaults, **{key: v for key, v in text.items() if v is not None}}
    for key in ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"):
        if key in text and text[key] is None:  # here an explicit null means "none of it"
            values[key] = None
    return values


def _integer(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"the config's {key}={value!r} is not a positive integer")
    return value


def _activation(values: Mapping[str, Any], family: _Family) -> str:
    name = values.get("hidden_activation" if family.is_gemma else "hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _sliding_windows(values: Mapping[str, Any], family: _Family) -> tuple[int, ...]:
    """Returns each layer's window in tokens, 0 for global attention."""
    num_layers = _integer(values, "num_hidden_layers")
    window = values.get("sliding_window")
    if family.name == "llama" or not window or not values.get("use_sliding_window", True):
        return (0,) * num_layers
    kinds = values.get("layer_types")
    if family.name == "mistral":
        local = [True] * num_layers
    elif kinds is not None:
        unknown = set(kinds) - {"sliding_attention", "full_attention"}
        if unknown or len(kinds) != num_layers:
            raise CheckpointError(
                f"layer_types has {len(kinds)} entries for {num_layers} layers, of kinds "
                f"{sorted(set(kinds))}; supported: sliding_attention, full_attention"
            )
        local = [kind == "sliding_attention" for kind in kinds]
    elif family.is_gemma:
        pattern = _integer(values, "sliding_window_pattern")
        local = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    else:
        local = [layer >= values["max_window_layers"] for layer in range(num_layers)]
    return tuple(_integer(values, "sliding_window") if here else 0 for here in local)


def _ropes(
    values: Mapping[str, Any], max_position: int, family: _Family
) -> tuple[RopeConfig, RopeConfig | None]:
    """Returns the rope of global layers, and of sliding-window layers where it has its own."""
    theta = values.get("rope_theta", 10_000.0)
    # as in transformers 5, the old key wins where a file has both
    params = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if family.name != "gemma3":
        return _rope({"rope_theta": theta, **values, **params}, params, max_position), None
    full = params.get("full_attention") if "full_attention" in params else params
    sliding = params.get("sliding_attention") or {}
    local_theta = values["rope_local_base_freq"]
    return (
        _rope({"rope_theta": theta, **(full or {})}, full or {}, max_position),
        _rope({"rope_theta": local_theta, **sliding}, sliding, max_position),
    )


def _rope(values: Mapping[str, Any], params: Mapping[str, Any], max_position: int) -> RopeConfig:
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"rope kind {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}"
        )
    for key, only in (("partial_rotary_factor", 1.0), ("truncate", True)):
        if values.get(key, only) != only:
            raise CheckpointError(f"rope {key}={values[key]!r} is not supported; only {only} is")
    theta = float(values["rope_theta"])
    if kind == "default":
        return RopeConfig(theta=theta)
    original = params.get("original_max_position_embeddings") or max_position
    factor = params.get("factor")
    if factor is None and kind == "yarn":
        factor = max_position / original
    if factor is None or (kind == "llama3" and "low_freq_factor" not in params):
        raise CheckpointError(f"rope kind {kind!r} lacks its parameters; it has {dict(params)}")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(factor),
        # dynamic rope stretches from the model's own limit, whatever else the file says
        original_max_position=max_position if kind == "dynamic" else original,
        low_freq_factor=float(params.get("low_freq_factor") or 1.0),
        high_freq_factor=float(params.get("high_freq_factor") or 4.0),
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        attention_factor=params.get("attention_factor"),
        mscale=params.get("mscale"),
        mscale_all_dim=params.get("mscale_all_dim"),
    )


def _eos_token_ids(
    generation_config: Mapping[str, Any], config: Mapping[str, Any], family: _Family
) -> tuple[int, ...]:
    """What the files name, joined; the family's default only where all of them are silent."""
    sources = [generation_config, config, config.get("text_config") or {}]
    if not any("eos_token_id" in source for source in sources):
        sources = [family.defaults]
    ids: list[int] = []
    for source in sources:
        eos = source.get("eos_token_id")
        ids += eos if isinstance(eos, list) else [] if eos is None else [eos]
    return tuple(dict.fromkeys(ids))
