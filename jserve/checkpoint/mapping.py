"""Puts a checkpoint's tensors in their place among our parameters, on the devices.

The one place that knows which Hugging Face tensors make which parameter. Knows no file format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jserve.checkpoint.assemble import assemble
from jserve.checkpoint.source import Checkpoint, Tensor
from jserve.errors import CheckpointError
from jserve.models.config import ModelConfig
from jserve.models.head_layout import HeadLayout, head_layout
from jserve.models.params import Axes, ParamShape, layer_shapes, top_shapes
from jserve.models.quantize import Quantization, ShardingOf, loaded_dtype, quantized

TOP_TENSORS = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
# buffers that old files hold and that the decoder computes itself
IGNORABLE_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
# the parts of Gemma3ForConditionalGeneration that are not its text model
IGNORABLE_PREFIXES = tuple(
    prefix + part
    for prefix in ("", "model.")
    for part in ("vision_tower.", "multi_modal_projector.")
)


def layer_tensors(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Returns, per parameter of a layer, the tensors that make it (after "model.layers.N.")."""
    qkv = tuple(f"self_attn.{x}_proj" for x in "qkv")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    names = {
        "attn_norm": ("input_layernorm.weight",),
        "qkv": tuple(f"{x}.weight" for x in qkv),
        "qkv_bias": tuple(f"{x}.bias" for x in qkv),
        "q_norm": ("self_attn.q_norm.weight",),
        "k_norm": ("self_attn.k_norm.weight",),
        "o": ("self_attn.o_proj.weight",),
        "o_bias": ("self_attn.o_proj.bias",),
        "mlp_norm": ("post_attention_layernorm.weight",),
        "gate_up": tuple(f"{x}.weight" for x in gate_up),
        "gate_up_bias": tuple(f"{x}.bias" for x in gate_up),
        "down": ("mlp.down_proj.weight",),
        "down_bias": ("mlp.down_proj.bias",),
    }
    if config.post_norms:
        names |= {
            "post_attn_norm": ("post_attention_layernorm.weight",),
            "mlp_norm": ("pre_feedforward_layernorm.weight",),
            "post_mlp_norm": ("post_feedforward_layernorm.weight",),
        }
    return names


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every tensor that a checkpoint of this model must hold."""
    V, D, F, H = config.vocab_size, config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * H, config.num_kv_heads * H
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, D),
        "self_attn.k_proj.weight": (kv, D),
        "self_attn.v_proj.weight": (kv, D),
        "self_attn.o_proj.weight": (D, q),
        "mlp.gate_proj.weight": (F, D),
        "mlp.up_proj.weight": (F, D),
        "mlp.down_proj.weight": (D, F),
        "self_attn.q_norm.weight": (H,),
        "self_attn.k_norm.weight": (H,),
    }
    shapes |= {n.replace("weight", "bias"): s[:1] for n, s in shapes.items() if len(s) == 2}
    top = {"embed": (V, D), "final_norm": (D,), "lm_head": (V, D)}
    if config.tie_word_embeddings:
        del top["lm_head"]
    expected = {TOP_TENSORS[leaf]: shape for leaf, shape in top.items()}
    parts = layer_tensors(config)
    leaves = layer_shapes(config, head_layout(config))
    for layer in range(config.num_layers):
        for leaf in leaves:
            for part in parts[leaf]:
                expected[f"model.layers.{layer}.{part}"] = shapes.get(part, (D,))
    return expected


def checked_tensors(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, Tensor]:
    """Returns the tensors of the model by name, having compared all of them with what it needs.

    Of tied embeddings a stored lm_head is left out, as are buffers that the decoder computes.

    Raises:
      CheckpointError: the first missing, misshapen or unknown tensor, with its file.
    """
    expected = expected_tensors(config)
    found: dict[str, Tensor] = {}
    for stored_name, tensor in checkpoint.entries.items():
        name = _text_model_name(stored_name)
        if name in expected:
            found[name] = tensor
            if tensor.shape != expected[name]:
                raise CheckpointError(
                    f"{tensor.file}: tensor {stored_name} has shape {list(tensor.shape)}, "
                    f"the config asks for {list(expected[name])}"
                )
        elif not (
            name.endswith(IGNORABLE_SUFFIXES)
            or name.startswith(IGNORABLE_PREFIXES)
            or (name == TOP_TENSORS["lm_head"] and config.tie_word_embeddings)
        ):
            raise CheckpointError(
                f"{tensor.file}: tensor {stored_name} is no part of this {config.family} model "
                f"of {config.num_layers} layers; the config and the files do not belong together"
            )
    missing = [name for name in expected if name not in found]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(f"{checkpoint.source}: tensor {missing[0]} is missing{more}")
    return found


def _text_model_name(name: str) -> str:
    """Strips what multimodal checkpoints put around the names of their text model."""
    if name.startswith("model.language_model."):  # transformers 5
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


def default_sharding(axes: Axes) -> jax.sharding.Sharding:
    """Puts everything on the first device."""
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def load_params(
    checkpoint: Checkpoint,
    config: ModelConfig,
    layout: HeadLayout,
    dtype: Any,
    sharding: ShardingOf | None = None,
    stacked: bool = False,
    quantization: Quantization = "none",
) -> dict[str, Any]:
    """Returns the model's parameters on the devices, with the tree of `params.param_shapes`.

    Host memory besides what is on devices: one parameter (of one layer) and a few megabytes of
    the file. On CPU, where the host is the device, the peak is the model's size plus its largest
    parameter as read, twice that one if stacked or in int8.

    Args:
      dtype: float32 or bfloat16, of everything but norm scales, which are float32.
      sharding: logical axes of a parameter -> where it lives; None is the default device.
      stacked: layers as one dict of arrays with a leading L axis, not a list of L dicts.
      quantization: "w8a8" makes a QuantizedTensor of every matrix, the embedding included.

    Raises:
      CheckpointError: a tensor is missing, unknown or misshapen; before any is read.
    """
    tensors = checked_tensors(checkpoint, config)
    dtype, sharding = jnp.dtype(dtype), sharding or default_sharding
    if checkpoint.restore is not None and layout.is_identity:
        return checkpoint.restore(config, layout, dtype, sharding, stacked, quantization)
    parts = layer_tensors(config)

    def place(leaf: str, shape: ParamShape, names: Sequence[str]) -> Any:
        sources = [tensors[name] for name in names]
        read_as = loaded_dtype(leaf, dtype, quantization)
        array = jax.device_put(
            assemble(leaf, sources, shape.shape, read_as, config, layout),
            sharding(shape.logical_axes),
        )
        # waiting here is what keeps a second parameter from being assembled meanwhile
        jax.block_until_ready(array)
        return quantized(leaf, array, shape.logical_axes, quantization, sharding)

    # the largest first, while there is most room
    params: dict[str, Any] = {
        leaf: place(leaf, shape, [TOP_TENSORS[leaf]])
        for leaf, shape in top_shapes(config, layout).items()
    }
    shapes = layer_shapes(config, layout)
    layers = (
        (layer, leaf, place(leaf, shape, [f"model.layers.{layer}.{p}" for p in parts[leaf]]))
        for layer in range(config.num_layers)
        for leaf, shape in shapes.items()
    )
    return params | {"layers": gather_layers(layers, config, layout, sharding, stacked)}


def gather_layers(
    params: Iterator[tuple[int, str, Any]],
    config: ModelConfig,
    layout: HeadLayout,
    sharding: ShardingOf,
    stacked: bool,
) -> list[dict[str, Any]] | dict[str, Any]:
    """Returns the (layer, name, parameter) triples of `params` as the tree's "layers".

    Stacked arrays are written in place on the devices (donated), one parameter at a time: they
    are never gathered on the host.
    """
    if not stacked:
        layers: list[dict[str, Any]] = [{} for _ in range(config.num_layers)]
        for layer, leaf, param in params:
            layers[layer][leaf] = param
        return layers
    shapes, stacks, writers = layer_shapes(config, layout), {}, {}
    for layer, leaf, param in params:
        if leaf not in stacks:
            stacks[leaf] = stack = _empty_stack(param, config, shapes[leaf].logical_axes, sharding)
            targets = jax.tree.map(lambda array: array.sharding, stack)
            writers[leaf] = jax.jit(_write_layer, donate_argnums=0, out_shardings=targets)
            del stack
        written = writers[leaf](stacks[leaf], param, np.int32(layer))
        stacks[leaf] = jax.block_until_ready(written)
        del param  # or it lives on while the next one is made
    return stacks


def _empty_stack(param: Any, config: ModelConfig, axes: Axes, sharding: ShardingOf) -> Any:
    """Returns zeros [L, ...] for each array of a parameter of one layer, split as it is."""
    return jax.tree.map(
        lambda array: jnp.zeros(
            (config.num_layers, *array.shape),
            array.dtype,
            device=sharding((None, *axes[: array.ndim])),
        ),
        param,
    )


def _write_layer(stack: Any, param: Any, layer: np.int32) -> Any:
    update = jax.lax.dynamic_update_index_in_dim
    return jax.tree.map(lambda whole, part: update(whole, part, layer, 0), stack, param)
