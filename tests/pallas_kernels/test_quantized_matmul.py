"""Matmuls of 8- and 4-bit weights against float64 numpy, which rounds weights by itself."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import Backend
from pallas_kernels.quantized_matmul import (
    QuantizedTensor,
    api,
    dequantize,
    mosaic_tpu,
    quantize,
    quantized_matmul,
)

matmul = jax.jit(quantized_matmul, static_argnames="dtype")
on_tpu = jax.jit(
    partial(quantized_matmul, backend=Backend.MOSAIC_TPU),
    static_argnames=("dtype", "interpret"),
)
LARGEST = {"w8a8": 127, "int8": 127, "int4": 7}
KINDS = [("w8a8", None), ("int8", None), ("int8", 8), ("int4", 16), ("int4", None)]
# Relative to the sum of magnitudes: float32 sums of few terms; weights rounded to bfloat16.
TOLERANCE = {"float32": 1e-6, "bfloat16": 2**-8}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tokens(seed: int, num_in: int, num_tokens: int) -> np.ndarray:
    """Activations `[D, T]` that int8 and bfloat16 hold exactly."""
    x = np.random.default_rng(seed).integers(-127, 128, (num_in, num_tokens))
    x[0] = 127
    return (x / 8).astype(np.float32)


def stands_for(w: np.ndarray, kind: str, group_size: int | None) -> np.ndarray:
    """The weight `[O, D]` after rounding, in float64."""
    groups = w.reshape(len(w), -1, group_size or w.shape[1]).astype(np.float64)
    scale = np.abs(groups).max(2, keepdims=True) / LARGEST[kind]
    return (np.round(groups / scale) * scale).reshape(w.shape)


@pytest.mark.parametrize(("kind", "group_size"), KINDS)
def test_every_weight_becomes_the_nearest_multiple_of_its_groups_scale(kind, group_size):
    w = normal(0, 24, 48)
    quantized = quantize(jnp.asarray(w), kind, group_size=group_size)
    assert quantized.values.dtype == (jnp.int4 if kind == "int4" else jnp.int8)
    np.testing.assert_allclose(
        dequantize(quantized), stands_for(w, kind, group_size), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [1, 2, 7])
@pytest.mark.parametrize(("kind", "group_size"), KINDS)
def test_the_product_is_that_of_the_rounded_weight(kind, group_size, num_tokens, dtype):
    w, x = normal(1, 24, 48), tokens(2, 48, num_tokens)
    quantized = quantize(jnp.asarray(w), kind, group_size=group_size)
    out = matmul(quantized, jnp.asarray(x, dtype), dtype=jnp.float32)
    assert_product(out, stands_for(w, kind, group_size), x, TOLERANCE["float32"])
    assert matmul(quantized, jnp.asarray(x, dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", [api._scale_sums, api._scale_weights])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_both_forms_for_groups_agree_with_the_rounded_weight(kind, form, dtype):
    w, x = normal(3, 24, 48), tokens(4, 48, 9)
    quantized = quantize(jnp.asarray(w), kind, group_size=8)
    out = form(quantized, jnp.asarray(x.reshape(6, 8, 9), dtype))
    assert_product(out, stands_for(w, kind, 8), x, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("num_groups", "num_tokens"), [(3, 1), (3, 20), (16, 300)])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_tpu_kernel_agrees_with_what_its_weight_stands_for(kind, num_groups, num_tokens, dtype):
    num_in = 128 * num_groups
    w, x = normal(16, 256, num_in), tokens(17, num_in, num_tokens)
    quantized = quantize(jnp.asarray(w).reshape(2, 128, num_in), kind, group_size=128)
    out = on_tpu(quantized, jnp.asarray(x, dtype), dtype=jnp.float32, interpret=True)
    assert out.shape == (2, 128, num_tokens)
    weight = np.asarray(dequantize(quantized), np.float64).reshape(256, num_in)
    assert_product(out.reshape(256, -1), weight, x, TOLERANCE["float32"])
    assert on_tpu(quantized, jnp.asarray(x, dtype), interpret=True).dtype == dtype


def test_the_tpu_kernel_reads_no_memory_that_nothing_was_written_to():
    quantized = quantize(jnp.asarray(normal(18, 128, 256)), "int8", group_size=128)
    x = jnp.asarray(tokens(19, 256, 5))  # of a tile of 16
    strict = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
    )
    out = on_tpu(quantized, x, interpret=strict)
    np.testing.assert_allclose(out, matmul(quantized, x), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("backend", [Backend.XLA, Backend.MOSAIC_TPU])
@pytest.mark.parametrize(("kind", "group_size"), [("w8a8", None), ("int8", None), ("int4", 128)])
def test_one_layer_of_a_stack_is_taken_by_an_index_known_at_run_time(kind, group_size, backend):
    stack, x = jnp.asarray(normal(20, 3, 128, 256)), jnp.asarray(tokens(21, 256, 4))
    quantized = jax.vmap(lambda w: quantize(w, kind, group_size=group_size))(stack)
    multiply = partial(quantized_matmul, backend=backend, interpret=True)
    for layer in range(3):
        out = jax.jit(lambda i: multiply(quantized, x, layer=i))(layer)
        alone = matmul(quantize(stack[layer], kind, group_size=group_size), x)
        np.testing.assert_allclose(out, alone, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("num_out", "group_size"), [(128, 64), (96, 128)])
def test_groups_and_outputs_that_the_tpu_kernel_does_not_take_are_refused(num_out, group_size):
    quantized = quantize(jnp.ones((num_out, 256)), "int8", group_size=group_size)
    with pytest.raises(ValueError, match="multiples of 128, or backend"):
        quantized_matmul(quantized, jnp.ones((256, 2)), backend=Backend.MOSAIC_TPU)


def test_groups_too_many_for_one_tile_are_refused_unless_they_come_in_eights():
    assert mosaic_tpu.why_unsupported(11008, 256, 128) is None
    assert "multiple of 8 in number" in mosaic_tpu.why_unsupported(401 * 128, 256, 128)
    assert mosaic_tpu.why_unsupported(400 * 128, 256, 128) is None


def assert_product(out, weight: np.ndarray, x: np.ndarray, tolerance: float):
    """Checks `out` against weight @ x, relative to the sum of magnitudes."""
    error = np.abs(np.asarray(out, np.float64) - weight @ x)
    assert (error <= tolerance * (np.abs(weight) @ np.abs(x))).all()


def test_w8a8_rounds_each_token_by_half_a_step_of_its_own_scale_at_most():
    w, x = normal(14, 24, 48), normal(15, 48, 6) * 10.0 ** np.arange(-3, 3)
    out = matmul(quantize(jnp.asarray(w), "w8a8"), jnp.asarray(x, jnp.float32))
    weight = stands_for(w, "w8a8", None)
    half_steps = np.abs(x).max(0) / 127 / 2
    error = np.abs(np.asarray(out, np.float64) - weight @ x)
    assert (error <= 1.001 * np.abs(weight).sum(1)[:, None] * half_steps).all()
    assert (error.max(0) > 0.01 * half_steps).all()  # and it does round


@pytest.mark.parametrize(("kind", "group_size"), KINDS)
def test_outputs_of_many_axes_keep_them(kind, group_size):
    w, x = normal(5, 2, 3, 4, 48), jnp.asarray(normal(6, 48, 5))
    many = quantize(jnp.asarray(w), kind, group_size=group_size)
    flat = quantize(jnp.asarray(w.reshape(24, 48)), kind, group_size=group_size)
    out = matmul(many, x)
    assert out.shape == (2, 3, 4, 5)
    np.testing.assert_allclose(out.reshape(24, 5), matmul(flat, x), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(dequantize(many).reshape(24, 48), dequantize(flat))


@pytest.mark.parametrize(("kind", "group_size"), KINDS)
def test_layers_stacked_for_a_scan_multiply_one_by_one(kind, group_size):
    stack = jnp.asarray(normal(7, 3, 16, 32))
    quantized = jax.vmap(lambda w: quantize(w, kind, group_size=group_size))(stack)
    x = jnp.asarray(normal(8, 32, 4))
    _, scanned = jax.lax.scan(lambda _, w: (None, quantized_matmul(w, x)), None, quantized)
    for layer in range(3):
        one = quantize(stack[layer], kind, group_size=group_size)
        np.testing.assert_allclose(scanned[layer], matmul(one, x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "group_size"), KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_token_that_is_no_number_spoils_itself_alone(bad, kind, group_size):
    quantized = quantize(jnp.asarray(normal(9, 16, 32)), kind, group_size=group_size)
    x = normal(10, 32, 4)
    clean = np.asarray(matmul(quantized, jnp.asarray(x)))
    x[3, 2] = bad
    out = np.asarray(matmul(quantized, jnp.asarray(x)))
    assert not np.isfinite(out[:, 2]).any()
    np.testing.assert_array_equal(out[:, [0, 1, 3]], clean[:, [0, 1, 3]])


@pytest.mark.parametrize(("kind", "group_size"), KINDS)
def test_channels_and_tokens_of_zeros_or_of_the_smallest_numbers_give_no_nan(kind, group_size):
    w, x = normal(11, 16, 32), normal(12, 32, 3)
    w[4], x[:, 1] = 0, 0
    w[5], x[:, 2] = 1e-40, 1e-40
    out = np.asarray(matmul(quantize(jnp.asarray(w), kind, group_size=group_size), jnp.asarray(x)))
    assert np.isfinite(out).all()
    assert not out[4].any()
    assert not out[:, 1].any()


def test_w8a8_sums_without_rounding_where_float32_could_not():
    x = np.full((4097, 2), 127, np.float32)
    w = np.full((1, 4097), 127, np.float32)
    w[:, 1:4096:2] = -127
    w[:, 0] = 126  # all other pairs cancel; 16129 * 2048 needs more than float32's 24 bits
    w[:, -1] = 0
    out = matmul(quantize(jnp.asarray(w), "w8a8"), jnp.asarray(x))
    np.testing.assert_array_equal(out, np.full((1, 2), -127.0))


@pytest.mark.parametrize("num_tokens", [1, 2, 16])
@pytest.mark.parametrize(("kind", "group_size"), [("w8a8", None), ("int8", 128)])
def test_a_cpu_makes_no_wider_copy_of_8_bit_weights(kind, group_size, num_tokens):
    quantized = quantize(jnp.zeros((512, 512)), kind, group_size=group_size)
    compiled = matmul.lower(quantized, jnp.zeros((512, num_tokens))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 512 * 512


def test_a_quantized_tensor_is_a_pytree_of_values_and_scales():
    quantized = quantize(jnp.asarray(normal(13, 4, 8)), "w8a8")
    values, scales = jax.tree.leaves({"down": quantized})
    assert (values.dtype, scales.shape) == (jnp.int8, (4,))
    assert jax.tree.map(lambda leaf: leaf, quantized).kind == "w8a8"
    assert isinstance(jax.device_put(quantized), QuantizedTensor)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"kind": "int3"}, "w8a8, int8, int4"),
        ({"kind": "w8a8", "group_size": 8}, "leave out"),
        ({"kind": "int4", "group_size": 5}, "must divide the 8 inputs"),
        ({"kind": "int8", "group_size": 0}, "must divide the 8 inputs"),
    ],
)
def test_what_cannot_be_quantized_is_refused_by_name(arguments, says):
    with pytest.raises(ValueError, match=says):
        quantize(jnp.ones((4, 8)), **arguments)
