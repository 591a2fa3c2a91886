"""Rope frequencies against transformers' tables, and the rotation against complex numbers."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jserve.models.config import RopeConfig
from jserve.models.rope import apply_rope, rope_frequencies, rope_table
from tests.models.reference import FOLDER

CASES = json.loads((FOLDER / "rope_tables.json").read_text())
HEAD_DIM, THETA = 64, 500_000.0


def rope_config(hf: dict) -> RopeConfig:
    fields = {key: value for key, value in hf.items() if key != "rope_type"}
    original = fields.pop("original_max_position_embeddings", 32)
    return RopeConfig(theta=THETA, kind=hf["rope_type"], original_max_position=original, **fields)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["rope"])[14:])
def test_frequencies_and_attention_factor_are_those_of_transformers(case):
    inv_freq, factor = rope_frequencies(rope_config(case["rope"]), HEAD_DIM, max_position=100)
    assert inv_freq.dtype == np.float32
    np.testing.assert_allclose(inv_freq, np.array(case["inv_freq"], np.float32), rtol=1e-6)
    assert factor == pytest.approx(case["attention_factor"], rel=1e-9)


@pytest.mark.parametrize("max_position", [1, 31, 32])
def test_dynamic_rope_is_plain_up_to_the_original_length(max_position):
    dynamic = RopeConfig(kind="dynamic", factor=4.0, original_max_position=32)
    plain, _ = rope_frequencies(RopeConfig(), HEAD_DIM, max_position)
    np.testing.assert_array_equal(rope_frequencies(dynamic, HEAD_DIM, max_position)[0], plain)


def test_an_unknown_kind_is_refused_by_name():
    with pytest.raises(ValueError, match="rope kind 'longrope' is unknown; use default, linear"):
        rope_frequencies(RopeConfig(kind="longrope"), HEAD_DIM, 100)


def test_rotation_is_a_complex_product_of_the_two_halves():
    H, positions = 8, np.array([0, 1, 7, 4095], np.int32)
    x = np.random.default_rng(0).standard_normal((2, 3, H, 4)).astype(np.float32)
    table = rope_table(RopeConfig(), H, 4096, jnp.asarray(positions))
    angles = (10_000.0 ** (-np.arange(0, H, 2) / H))[:, None] * positions
    rotated = (x[:, :, : H // 2] + 1j * x[:, :, H // 2 :]) * np.exp(1j * angles)
    wanted = np.concatenate([rotated.real, rotated.imag], axis=2)
    np.testing.assert_allclose(apply_rope(jnp.asarray(x), table), wanted, atol=1e-3)


def test_yarn_attention_factor_scales_cosines_and_sines():
    yarn = RopeConfig(kind="yarn", factor=4.0, original_max_position=32, attention_factor=1.5)
    table = rope_table(yarn, 8, 128, jnp.arange(3, dtype=jnp.int32))
    np.testing.assert_allclose(np.hypot(table[0], table[1]), 1.5, rtol=1e-6)
