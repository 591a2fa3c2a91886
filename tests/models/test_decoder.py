"""The decoder against transformers' logits, in both loops, and what its programs look like."""

import json
from dataclasses import replace
from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.models.decoder import decoder_apply, head_of, init_params, logits
from jserve.models.families import model_config_from_hf
from jserve.models.head_layout import ZERO_HEAD, HeadLayout, head_layout
from jserve.models.layers import DecoderLayer
from jserve.models.params import param_shapes
from tests.models.reference import (
    FOLDER,
    NAMES,
    Tokens,
    dense_attend,
    reference_model,
    run_dense,
)

# rows of public fault reports that a reference model answers
ROWS = {
    "llama_tied": "O73",
    "llama_tied_stale_lm_head": "O74",
    "llama_rope_linear": "O77",
    "llama_rope_dynamic": "O77",
    "llama_rope_llama3": "O77",
    "llama_rope_yarn": "O77",
    "llama_head_dim": "O78",
    "qwen3": "O78",
    "mistral_window": "O79",
    "llama_large_activations": "O80",
}
MODELS = [pytest.param(name, id=f"{ROWS[name]}-{name}" if name in ROWS else name) for name in NAMES]
EACH_MODEL = pytest.mark.parametrize("name", MODELS)
ROPE_MODELS = [name for name in NAMES if "rope" in name]

reference_model = cache(reference_model)


def differences(name, loop="unrolled", dtype=jnp.float32, layout=None):
    """Returns |logits - reference| of every sequence of a model, f32[n, V] each."""
    model = reference_model(name)
    params = model.params(dtype, layout, stacked=loop == "scanned")
    if model.config.rope.kind != "dynamic":
        results = run_dense(params, model.config, [s.ids for s in model.sequences], loop)
        return [
            np.abs(out - s.logits) for (out, _), s in zip(results, model.sequences, strict=True)
        ]
    found = []  # dynamic rope is that of transformers for a prompt of the served length
    for s in model.sequences:
        config = replace(model.config, max_position=len(s.ids))
        [(out, _)] = run_dense(params, config, [s.ids], loop)
        found.append(np.abs(out - s.logits))
    return found


@EACH_MODEL
@pytest.mark.parametrize("loop", ["unrolled", "switched", "scanned"])
def test_logits_of_every_position_are_those_of_transformers(name, loop):
    for difference in differences(name, loop):
        assert difference.max() < 1e-4


@pytest.mark.slow
@EACH_MODEL
def test_bfloat16_logits_are_finite_and_near_the_float32_ones(name):
    for difference in differences(name, dtype=jnp.bfloat16):
        assert np.isfinite(difference).all()
        assert difference.mean() < 0.05  # of logits with a standard deviation of about 1.5


def test_activations_of_the_large_model_leave_the_range_of_float16():
    model = reference_model("llama_large_activations")  # O80
    layer = DecoderLayer(model.config, head_layout(model.config), jnp.bfloat16)
    weights = {"params": model.params(jnp.bfloat16)["layers"][0]}
    x = jnp.ones((model.config.hidden_size, 1), jnp.bfloat16)
    q, k, v = layer.apply(weights, x, jnp.zeros((2, 4, 1)), method="before_attention")
    attended, _ = dense_attend(model.config, q, k, v, jnp.zeros((1, 1, 4, 8), jnp.bfloat16), 0, 0)
    x = layer.apply(weights, x, attended, method="after_attention")
    assert x.dtype == jnp.bfloat16
    assert float(jnp.abs(x).max()) > 65_504


@pytest.mark.parametrize("name", ROPE_MODELS)
def test_rope_scaling_is_read_under_both_spellings_of_its_kind(name):
    hf_config = json.loads((FOLDER / name / "config.json").read_text())  # O77
    scaling = hf_config["rope_scaling"]
    kind = scaling.pop("rope_type")
    hf_config["rope_scaling"] = scaling | {"type": kind}
    config = model_config_from_hf(hf_config)
    assert config == reference_model(name).config
    assert config.rope.kind == kind


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("llama", 4, id="each_kv_head_twice"),
        pytest.param("qwen3", 4, id="a_group_of_3_in_halves"),
        pytest.param("gemma3", 2, id="one_kv_head_twice"),
        pytest.param(
            "llama_biases",
            HeadLayout(
                3, 3, (0, ZERO_HEAD, 1), ((0, 1, ZERO_HEAD), (ZERO_HEAD,) * 3, (ZERO_HEAD, 2, 3))
            ),
            id="heads_of_zeros",
        ),
    ],
)
@pytest.mark.parametrize("loop", ["unrolled", "switched", "scanned"])
def test_padded_and_repeated_heads_give_the_same_logits(name, layout, loop):
    if isinstance(layout, int):
        layout = head_layout(reference_model(name).config, layout)
    assert layout.num_kv_heads > reference_model(name).config.num_kv_heads
    for difference in differences(name, loop, layout=layout):
        assert difference.max() < 1e-4


def test_both_loops_hand_the_same_keys_and_values_to_the_pool():
    model = reference_model("gemma3")
    ids = [model.sequences[0].ids]
    [(_, unrolled)] = run_dense(model.params(), model.config, ids, "unrolled")
    [(_, scanned)] = run_dense(model.params(stacked=True), model.config, ids, "scanned")
    np.testing.assert_allclose(unrolled, scanned, atol=1e-5)
    assert all(np.abs(layer).max() > 0 for layer in unrolled)


@pytest.mark.parametrize("loop", ["unrolled", "switched", "scanned"])
def test_the_layer_is_traced_once_for_all_layers(loop):
    model = reference_model("gemma3")
    traces = []

    def attend(config, q, k, v, kv_pool, layer, sliding_window):
        traces.append(q.shape)
        return dense_attend(config, q, k, v, kv_pool, layer, sliding_window)

    params = model.params(stacked=loop == "scanned")
    run_dense(params, model.config, [model.sequences[0].ids], loop, attend)
    assert model.config.num_layers == 7
    assert len(traces) == 1


def test_weights_are_left_operands_of_the_compiled_matmuls():
    """A CPU packs right operands anew at every call, so that has to be the few activations."""
    model = reference_model("llama")
    config, T = model.config, 6

    def attend(q, k, v, kv_pool, layer, sliding_window):
        return q, kv_pool

    def step(params, tokens, kv_pool):
        hidden, kv_pool = decoder_apply(params, config, tokens, kv_pool, attend, "unrolled")
        return logits(head_of(params, config), config, hidden), kv_pool

    tokens = Tokens(jnp.zeros(T, jnp.int32), jnp.zeros(T, jnp.int32))
    text = jax.jit(step).lower(model.params(), tokens, jnp.zeros(())).compile().as_text()
    results = {line.split(" = ")[1].split("{")[0] for line in text.splitlines() if " dot(" in line}
    widths = {32, 128, (2 + 2) * 2 * 8}  # D, V and 2F, (G + 2) K H
    assert results == {f"f32[{width},{T}]" for width in widths}


@pytest.mark.parametrize("name", ["llama_biases", "gemma2", "qwen3"])
@pytest.mark.parametrize("stacked", [False, True])
def test_initialised_parameters_have_the_declared_shapes_and_axes(name, stacked):
    config = reference_model(name).config
    layout = head_layout(config, 2)
    boxed = jax.eval_shape(
        lambda key: init_params(config, layout, key, jnp.bfloat16, stacked), jax.random.key(0)
    )
    shapes = param_shapes(config, layout, stacked)
    is_box = lambda node: isinstance(node, nn.LogicallyPartitioned)  # noqa: E731
    is_shape = lambda node: hasattr(node, "logical_axes")  # noqa: E731
    found = jax.tree.map(lambda box: (box.value.shape, box.names), boxed, is_leaf=is_box)
    wanted = jax.tree.map(lambda s: (s.shape, s.logical_axes), shapes, is_leaf=is_shape)
    assert found == wanted


def test_initialised_parameters_run():
    config = reference_model("gemma2").config
    params = nn.unbox(init_params(config, head_layout(config), jax.random.key(0)))
    [(out, _)] = run_dense(params, config, [np.arange(5, dtype=np.int32)])
    assert np.isfinite(out).all()


def test_a_loop_that_does_not_fit_the_weights_is_refused():
    model = reference_model("llama")
    with pytest.raises(ValueError, match="'scanned' does not fit weights held as list"):
        run_dense(model.params(), model.config, [model.sequences[0].ids], "scanned")


def test_a_parameter_of_the_wrong_shape_is_refused_by_name():
    model = reference_model("llama")
    params = model.params()
    params["layers"][0]["down"] = jnp.zeros((3, 3))
    with pytest.raises(Exception, match=r"down.*\(32, 64\).*\(3, 3\)"):
        run_dense(params, model.config, [model.sequences[0].ids])
