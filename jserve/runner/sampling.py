"""Picks the next token of each row from its logits. Knows rows of numbers, not requests.

Order of operations, as in Hugging Face and vLLM: temperature, top-k, top-p, min-p, draw. Nothing
here sorts the vocabulary; what a batch does not ask for is skipped at run time by `lax.cond`, so
that there is one program. S rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jserve.sampling_params import MAX_LOGPROBS

MIN_TEMPERATURE = 1e-5  # smaller ones are as good as greedy, and would overflow
_DRAW_BLOCK = 256
_VALUE_STEPS, _LEAST_GUESS = 16, -128.0  # exp of less is 0 in float32


class Sampled(NamedTuple):
    """One step's choices. The log-probabilities are zeros unless a row asked for them."""

    token_ids: Int[Array, " S"]
    logprobs: Float[Array, " S"]
    top_ids: Int[Array, "S A"]  # A = MAX_LOGPROBS, best first
    top_logprobs: Float[Array, "S A"]


def sample(logits: Float[Array, "S V"], batch: Mapping[str, Array]) -> Sampled:
    """Returns a token per row, by the fields that scheduler/packer.py names.

    A row's token depends on its own logits, settings, seed and position only.
    """
    wants_random, wants_truncation, wants_logprobs = batch["wants"]
    greedy = argmax(logits)
    random = batch["temperature"] > 0
    token_ids = jax.lax.cond(
        wants_random != 0,
        lambda: jnp.where(random, _draw(logits, batch, wants_truncation), greedy),
        lambda: greedy,
    )
    num_top = min(MAX_LOGPROBS, logits.shape[1])
    nothing = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype),
        jax.eval_shape(lambda: _logprobs(logits, token_ids, num_top)),
    )
    logprobs = jax.lax.cond(
        wants_logprobs != 0, lambda: _logprobs(logits, token_ids, num_top), lambda: nothing
    )
    return Sampled(token_ids, *logprobs)


def argmax(x: Float[Array, "S V"]) -> Int[Array, " S"]:
    """Returns the first index of each row's maximum; 0 for a row of NaN.

    Two plain reductions, which XLA vectorises on a CPU, in place of its scalar loop over pairs.
    """
    V = x.shape[1]
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    first = jnp.where(x == x.max(axis=1, keepdims=True), index, V).min(axis=1)
    return jnp.where(first < V, first, 0)


def _draw(
    logits: Float[Array, "S V"], batch: Mapping[str, Array], wants_truncation: Array
) -> Int[Array, " S"]:
    x = logits - logits.max(axis=1, keepdims=True)
    x = x / jnp.maximum(batch["temperature"], MIN_TEMPERATURE)[:, None]
    x = jax.lax.cond(
        wants_truncation != 0,
        lambda: truncate(x, batch["top_k"], batch["top_p"], batch["min_p"]),
        lambda: x,
    )
    return draw(x, batch["seeds"], batch["sample_positions"])


def draw(
    x: Float[Array, "S V"], seeds: UInt[Array, " S"], positions: Int[Array, " S"]
) -> Int[Array, " S"]:
    """Draws from softmax(x), with one uniform number per row made from its seed and position.

    Inverse transform in two levels, blocks and then tokens of one block, as a running sum over
    the whole vocabulary is slow and less exact. x must be at most 0 with a 0 in each row.
    """
    S, V = x.shape
    pad = -V % _DRAW_BLOCK
    weights = jnp.pad(jnp.exp(x), ((0, 0), (0, pad))).reshape(S, -1, _DRAW_BLOCK)

    def uniform(seed, position):
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position))

    def pick(weights: Float[Array, "S n"], point: Float[Array, " S"]):
        """The first entry whose running sum exceeds `point`, and the sum before it."""
        after = jnp.cumsum(weights, axis=1)
        live = weights > 0
        hit = (after > point[:, None]) & live
        last_live = weights.shape[1] - 1 - jnp.argmax(live[:, ::-1], axis=1)
        index = jnp.where(hit.any(axis=1), jnp.argmax(hit, axis=1), last_live)
        here = jnp.take_along_axis(after - weights, index[:, None], axis=1)[:, 0]
        return index, here

    block_weights = weights.sum(axis=2)
    point = jax.vmap(uniform)(seeds, positions) * block_weights.sum(axis=1)
    block, before = pick(block_weights, point)
    in_block = jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0]
    token, _ = pick(in_block, point - before)
    # A row of NaN, in which nothing is live, would end in the padding.
    return jnp.minimum(block * _DRAW_BLOCK + token, V - 1).astype(jnp.int32)


def truncate(
    x: Float[Array, "S V"],
    top_k: Int[Array, " S"],
    top_p: Float[Array, " S"],
    min_p: Float[Array, " S"],
) -> Float[Array, "S V"]:
    """Returns x with what top-k, then top-p, then min-p exclude at -inf; 0, 1 and 0 keep all.

    Every set is "all values down to a threshold", found by counting and weighing what lies above a
    guess: exact, and the cost is that of some 15 passes over x, of none where no row asks.
    Values equal to the threshold stay. x is at most 0, 0 in each row.
    """
    V = x.shape[1]
    keys = _keys(x)
    k = jnp.where((top_k > 0) & (top_k < V), top_k, V)
    k_key = _threshold(keys, lambda kept: _count(kept) >= k, k < V)
    weights = jnp.where(keys >= k_key[:, None], jnp.exp(x), 0.0)
    mass = top_p * weights.sum(axis=1)

    def holds_mass(kept):
        return jnp.where(kept, weights, 0.0).sum(axis=1) >= mass

    p_key = _threshold(keys, holds_mass, top_p < 1)
    floor = jnp.where(min_p > 0, jnp.log(jnp.maximum(min_p, 1e-38)), -jnp.inf)
    keep = (keys >= jnp.maximum(k_key, p_key)[:, None]) & (x >= floor[:, None])
    return jnp.where(keep, x, -jnp.inf)


def _keys(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Maps floats to int32 in the same order."""
    return _in_order(jax.lax.bitcast_convert_type(x, jnp.int32))


def _in_order(bits: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Turns the bits of floats into integers in the same order, and those back into the bits."""
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def _count(kept: Bool[Array, "S V"]) -> Float[Array, " S"]:
    """Counts per row, in float32: exact up to 2**24, and on a CPU faster than in integers."""
    return kept.sum(axis=1, dtype=jnp.float32)


def _threshold(keys: Int[Array, "S V"], enough, wanted: Bool[Array, " S"]) -> Int[Array, " S"]:
    """Returns per row a key that keeps, of keys >= it, the fewest for which enough(kept) holds; the
    least key where nothing is wanted. enough holds for all, and once it fails, for nothing less.

    Halves an interval until one key at most is left in it. Halves of the values come nearer in a
    few steps than halves of the bits, which alone are sure to end and so take over.
    """

    def value(key):
        x = jax.lax.bitcast_convert_type(_in_order(key), jnp.float32)
        return jnp.maximum(x, _LEAST_GUESS)

    def halve(state):
        step, low, high, num_low, num_high = state  # num_*: keys >= low, keys > high
        by_bits = (low >> 1) + (high >> 1) + (low & high & 1) + ((low ^ high) & 1)  # rounded up
        by_value = jnp.clip(_keys((value(low) + value(high)) / 2), low + 1, high)
        middle = jnp.where(step < _VALUE_STEPS, by_value, by_bits)
        kept = keys >= middle[:, None]
        holds, num = enough(kept), _count(kept)
        low, num_low = jnp.where(holds, middle, low), jnp.where(holds, num, num_low)
        high, num_high = jnp.where(holds, high, middle - 1), jnp.where(holds, num_high, num)
        return step + 1, low, high, num_low, num_high

    def is_open(state):
        _, low, high, num_low, num_high = state
        return ((low < high) & (num_low - num_high > 1)).any()

    low, high = keys.min(axis=1), keys.max(axis=1)
    high = jnp.where(wanted, high, low)
    nums = jnp.full(low.shape, float(keys.shape[1])), jnp.zeros(low.shape)
    return jax.lax.while_loop(is_open, halve, (0, low, high, *nums))[1]


def _logprobs(logits, token_ids, num_top: int):
    total = jax.nn.logsumexp(logits, axis=1)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)[:, 0] - total
    top, top_ids = jax.lax.top_k(logits, num_top)
    return chosen, top_ids, top - total[:, None]
