"""The names, shapes and logical axes of a decoder's parameters: the one place that knows them.

Weights are stored [out, in], as in Hugging Face files, and never transposed. Letters: V
vocabulary, D width, K KV heads, G query heads per KV head, H head_dim, F MLP width, L layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jserve.models.config import ModelConfig
from jserve.models.head_layout import HeadLayout

Axes = tuple[str | None, ...]


class ParamShape(NamedTuple):
    """Shape of one parameter and, per axis, the logical name by which it is sharded (or None)."""

    shape: tuple[int, ...]
    logical_axes: Axes


def is_norm(name: str) -> bool:
    """True for norm scales, which are float32 whatever the dtype of the other weights."""
    return name.endswith("norm")


def is_matrix(name: str) -> bool:
    """True for what tokens are multiplied by: all but norm scales and biases."""
    return not name.endswith(("norm", "bias"))


def layer_shapes(config: ModelConfig, layout: HeadLayout) -> dict[str, ParamShape]:
    """Returns the parameters of one layer; every layer has the same."""
    D, F, H = config.hidden_size, config.intermediate_size, config.head_dim
    K, G = layout.num_kv_heads, layout.group_size
    norm = ParamShape((D,), (None,))
    head_norm = ParamShape((H,), (None,))
    shapes = {
        "attn_norm": norm,
        "qkv": ParamShape((K, G + 2, H, D), ("kv_heads", None, None, None)),
        # Heads are one axis, which splits as KV heads do: over three axes, the TPU's compiler sees
        # a convolution, which it reckons to take 2 to 6 times the cycles.
        "o": ParamShape((D, K * G * H), (None, "kv_heads")),
        "mlp_norm": norm,
        "gate_up": ParamShape((2, F, D), (None, "mlp", None)),
        "down": ParamShape((D, F), (None, "mlp")),
    }
    if config.qkv_bias:
        shapes["qkv_bias"] = ParamShape((K, G + 2, H), ("kv_heads", None, None))
    if config.qk_norm:
        shapes |= {"q_norm": head_norm, "k_norm": head_norm}
    if config.o_bias:
        shapes["o_bias"] = norm
    if config.mlp_bias:
        shapes["gate_up_bias"] = ParamShape((2, F), (None, "mlp"))
        shapes["down_bias"] = norm
    if config.post_norms:
        shapes |= {"post_attn_norm": norm, "post_mlp_norm": norm}
    return shapes


def top_shapes(config: ModelConfig, layout: HeadLayout) -> dict[str, ParamShape]:
    """Returns the parameters outside the layers; an indivisible vocabulary is replicated."""
    V, D = config.vocab_size, config.hidden_size
    divides = V % layout.tensor_parallel_size == 0
    table = ParamShape((V, D), ("vocab" if divides else None, None))
    shapes = {"embed": table, "final_norm": ParamShape((D,), (None,))}
    if not config.tie_word_embeddings:
        shapes["lm_head"] = table
    return shapes


def param_shapes(config: ModelConfig, layout: HeadLayout, stacked: bool = False) -> dict[str, Any]:
    """Returns a tree of ParamShape with the structure of the parameters themselves.

    "layers" is a list of L dicts, or with `stacked` one dict whose arrays have a leading L axis.
    """
    layer = layer_shapes(config, layout)
    if not stacked:
        return top_shapes(config, layout) | {
            "layers": [dict(layer) for _ in range(config.num_layers)]
        }
    L = config.num_layers
    return top_shapes(config, layout) | {
        "layers": {k: ParamShape((L, *s.shape), (None, *s.logical_axes)) for k, s in layer.items()}
    }
