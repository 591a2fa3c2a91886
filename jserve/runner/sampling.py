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
from jaxtyping import Array, Float, Int, UInt

from jserve.sampling_params import MAX_LOGPROBS

MIN_TEMPERATURE = 1e-5  # smaller ones are as good as greedy, and would overflow
_DRAW_BLOCK = 256


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

    Every set is "all values down to a threshold", found by bisection over the bit patterns of
    float32, exact in 32 counts; values equal to the threshold stay. x is at most 0, 0 in each row.
    """
    V = x.shape[1]
    keys = _ordered_bits(x)
    k = jnp.where((top_k > 0) & (top_k < V), top_k, V)
    k_key = _largest_key(keys, lambda kept: kept.sum(axis=1) >= k)
    weights = jnp.where(keys >= k_key[:, None], jnp.exp(x), 0.0)
    mass = top_p * weights.sum(axis=1)

    def holds_mass(kept):
        return jnp.where(kept, weights, 0.0).sum(axis=1) >= mass

    p_key = jnp.where(top_p < 1, _largest_key(keys, holds_mass), k_key)
    floor = jnp.where(min_p > 0, jnp.log(jnp.maximum(min_p, 1e-38)), -jnp.inf)
    keep = (keys >= jnp.maximum(k_key, p_key)[:, None]) & (x >= floor[:, None])
    return jnp.where(keep, x, -jnp.inf)


def _ordered_bits(x: Float[Array, "S V"]) -> Int[Array, "S V"]:
    """Maps floats to int32 in the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def _largest_key(keys: Int[Array, "S V"], enough) -> Int[Array, " S"]:
    """Returns per row the largest key for which enough(keys >= key), which holds for the least."""

    def halve(_, bounds):
        low, high = bounds  # enough(low) holds
        middle = (low >> 1) + (high >> 1) + (low & high & 1) + ((low ^ high) & 1)  # rounded up
        holds = enough(keys >= middle[:, None])
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle - 1)

    low, _ = jax.lax.fori_loop(0, 32, halve, (keys.min(axis=1), keys.max(axis=1)))
    return low


def _logprobs(logits, token_ids, num_top: int):
    total = jax.nn.logsumexp(logits, axis=1)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)[:, 0] - total
    top, top_ids = jax.lax.top_k(logits, num_top)
    return chosen, top_ids, top - total[:, None]
