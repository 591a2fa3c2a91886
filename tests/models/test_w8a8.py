"""A model in int8 against the same model with every matmul done by numpy, in whole numbers."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.checkpoint.mapping import load_params
from jserve.checkpoint.safetensors import open_safetensors
from jserve.models import decoder, layers
from jserve.models.decoder import decoder_apply
from jserve.models.head_layout import head_layout
from pallas_kernels.quantized_matmul import dequantize
from tests.models.reference import Tokens, dense_attend, reference_model, run_dense


def in_int8(model, stacked: bool = False):
    layout = head_layout(model.config)
    checkpoint = open_safetensors(model.folder)
    return load_params(
        checkpoint, model.config, layout, "float32", stacked=stacked, quantization="w8a8"
    )


def linear_in_numpy(w, x, dtype=None):
    """w @ x with each token of x rounded to int8: what `linear` does of an int8 weight."""

    def compute(values, scales, x):
        values, scales, x = map(np.asarray, (values, scales, x))
        per_token = np.abs(x).max(axis=0) / np.float32(127)
        tokens = np.round(x / per_token).astype(np.int64)
        sums = values.astype(np.int64) @ tokens
        return (sums * scales[..., None].astype(np.float64) * per_token).astype(np.float32)

    shape = jax.ShapeDtypeStruct((*w.scales.shape, x.shape[1]), x.dtype if dtype is None else dtype)
    return jax.pure_callback(compute, shape, w.values, w.scales, x)


@pytest.mark.parametrize("loop", ["unrolled", "switched", "scanned"])
@pytest.mark.parametrize("name", ["llama_biases", "llama_tied", "gemma3", "qwen3"])
def test_a_model_in_int8_is_what_numpy_makes_of_it(name, loop, monkeypatch):
    model = reference_model(name)
    ids, exact = model.sequences[0].ids, model.sequences[0].logits
    params = in_int8(model, loop == "scanned")
    [(found, _)] = run_dense(params, model.config, [ids], loop)
    for module in (layers, decoder):
        monkeypatch.setattr(module, "linear", linear_in_numpy)
    [(expected, _)] = run_dense(params, model.config, [ids], loop)
    effect, off = np.abs(exact - expected), np.abs(found - expected)
    assert effect.mean() > 5e-3  # rounding is no small matter
    # Float error puts a value on the edge between two integers to the other side, now and then,
    # and that token and those after it elsewhere.
    assert (off.max(axis=1) < 2e-4).mean() > 0.5
    assert off.mean() < 0.5 * effect.mean()


def test_embeddings_in_int8_are_looked_up_as_the_rows_that_they_stand_for():
    model = reference_model("llama")
    params, embed = model.params(), in_int8(model)["embed"]
    ids = [model.sequences[0].ids]
    [(found, _)] = run_dense(params | {"embed": embed}, model.config, ids)
    [(expected, _)] = run_dense(params | {"embed": dequantize(embed)}, model.config, ids)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_activations_of_a_model_in_int8_have_the_dtype_that_is_asked_for():
    model = reference_model("llama")
    config, ids = model.config, jnp.asarray(model.sequences[0].ids)
    tokens = Tokens(ids, jnp.arange(len(ids), dtype=jnp.int32))
    kv_pool = jnp.zeros((2, len(ids), 4, config.head_dim), jnp.bfloat16)

    def hidden(params):
        attend = partial(dense_attend, config)
        return decoder_apply(params, config, tokens, kv_pool, attend, "unrolled", jnp.bfloat16)[0]

    assert jax.eval_shape(hidden, in_int8(model)).dtype == jnp.bfloat16
