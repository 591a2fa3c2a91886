"""Rotary position embedding and its context extensions. Knows positions and heads, no weights.

Frequencies are computed once, on the host; cosines and sines are computed in the step from the
tokens' positions, so no table limits the length. Letters: T tokens, H head_dim.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jserve.models.config import RopeConfig


def rope_frequencies(
    rope: RopeConfig, head_dim: int, max_position: int
) -> tuple[Float[np.ndarray, " H/2"], float]:
    """Returns the angle per position of each pair of dimensions, and the factor on cos and sin.

    Dynamic NTK scaling depends on a length. Hugging Face takes that of the current pass, so what it
    rotates keys by changes as a sequence grows; cached pages cannot change. Here the length is
    max_position, the longest sequence to be served: the same as Hugging Face for every prompt if
    max_position is at most the original length, and for a prompt of max_position tokens otherwise.

    Args:
      rope: the kind and its settings.
      head_dim: H, even.
      max_position: most tokens in a sequence.

    Returns:
      f32[H/2] in radians, and the attention factor (1 but for yarn).

    Raises:
      ValueError: the kind is unknown.

    Source: RoFormer (arXiv 2104.09864); yarn: arXiv 2309.00071, which also describes the linear
    and NTK forms; llama3: the Llama 3.1 model code. Settings mean what they do in transformers.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    theta, factor, attention_factor = rope.theta, rope.factor, 1.0
    if rope.kind == "dynamic":
        original = rope.original_max_position
        stretch = max(max_position, original) / original
        theta *= (factor * stretch - (factor - 1)) ** (head_dim / (head_dim - 2))
    inv_freq = theta**-exponents
    if rope.kind == "linear":
        inv_freq /= factor
    elif rope.kind == "llama3":
        inv_freq = _llama3(inv_freq, rope)
    elif rope.kind == "yarn":
        inv_freq = _yarn(inv_freq, rope, head_dim)
        attention_factor = _yarn_attention_factor(rope)
    elif rope.kind not in ("default", "dynamic"):
        raise ValueError(
            f"rope kind {rope.kind!r} is unknown; use default, linear, dynamic, llama3 or yarn"
        )
    return inv_freq.astype(np.float32), attention_factor


def _llama3(inv_freq: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Stretches long waves by `factor`, leaves short ones, blends between the two bounds."""
    turns = rope.original_max_position * inv_freq / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return inv_freq * (keep + (1 - keep) / rope.factor)


def _yarn(inv_freq: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Stretches dimensions that turn less than beta_slow times over the original length.

    Those that turn more than beta_fast times are left; a linear ramp over whole dimensions joins
    the two.
    """

    def dimension(turns: float) -> float:
        return (head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    width = high - low or 0.001  # a step, where both bounds meet
    keep = 1 - np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)
    return inv_freq * (keep + (1 - keep) / rope.factor)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rope_table(
    rope: RopeConfig, head_dim: int, max_position: int, positions: Int[Array, " T"]
) -> Float[Array, "2 H/2 T"]:
    """Returns the cosines and the sines of every token, float32, for `apply_rope`."""
    inv_freq, attention_factor = rope_frequencies(rope, head_dim, max_position)
    angles = jnp.asarray(inv_freq)[:, None] * positions.astype(jnp.float32)[None, :]
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)]) * attention_factor


def apply_rope(
    x: Float[Array, "K heads H T"], table: Float[Array, "2 H/2 T"]
) -> Float[Array, "K heads H T"]:
    """Rotates dimension i of every head together with dimension i + H/2. Float32 in and out."""
    cos, sin = table[0][None, None], table[1][None, None]
    first, second = jnp.split(x, 2, axis=2)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)
