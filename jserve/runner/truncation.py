"""What top-k, top-p and min-p leave of each row, and which tokens are its best ones: exactly, and
without a sort of the vocabulary. Knows rows of numbers, not requests or seeds.

Every set is "all values down to a least one", found by counting and weighing what lies above a
guess; equal values stay together. Over all of a row that is slow, so it is tried among its best
blocks first: a set whose least value lies above all other blocks needs nothing of those.
S rows, V vocabulary, n tokens in a row's best blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_BLOCK, _SHARE = 16, 8  # tokens of a block; of so many blocks, one is among the best
_WIDE_BLOCK = 128  # where few are looked for
_VALUE_STEPS, _LEAST_GUESS = 8, -32.0  # what is less weighs nothing and is rarely looked for
SMALL = 8192  # so few tokens are searched as they are
_LOWEST = float(jnp.finfo(jnp.float32).min)


class Best(NamedTuple):
    """The blocks of each row with its largest values, in the order of the vocabulary."""

    values: Float[Array, "S n"]
    ids: Int[Array, "S n"]  # of the tokens; V and more where there are fewer, with values of -inf
    others: Float[Array, " S"]  # no value elsewhere is larger


def best_blocks(x: Float[Array, "S V"]) -> Best:
    """Returns the best eighth of each row's blocks. Only finite values count."""
    blocks = _in_blocks(x, _BLOCK)
    largest = blocks.max(axis=2)
    most = -(-largest.shape[1] // _SHARE)
    below = largest - largest.max(axis=1, keepdims=True)
    lowest = jnp.full(x.shape[:1], _LOWEST)
    interval = _interval(below, lowest, lowest < 0)
    interval = _narrowed(below, _count, float(most), interval, max(most // 8, 1))
    low, high = _value(interval.low)[:, None], _value(interval.high)[:, None]
    is_best = jnp.where(interval.num_low[:, None] <= most, below >= low, below > high)
    others = jnp.where(is_best, -jnp.inf, largest).max(axis=1)
    return Best(*_taken(blocks, _indices(is_best, most)), others)


def _indices(chosen: Bool[Array, "S b"], most: int) -> Int[Array, "S c"]:
    """Returns where the chosen ones are, at most so many, and b for what is missing."""
    place = jnp.cumsum(chosen, axis=1, dtype=jnp.int32)
    count = jnp.arange(1, most + 1, dtype=jnp.int32)
    return jax.vmap(lambda place: jnp.searchsorted(place, count))(place).astype(jnp.int32)


def best_tokens(x: Float[Array, "S V"], num: int) -> tuple[Array, Array]:
    """Returns the largest values [S, num], in order, and their ids, the lower of equals first: what
    jax.lax.top_k returns, which among all of a wide row takes many times as long on a CPU.

    Each of them is in one of the `num` best blocks: another block's value has before it what is
    largest in each of these.
    """
    blocks = _in_blocks(x, _WIDE_BLOCK)
    if blocks.shape[1] <= num:
        top, ids = jax.lax.top_k(x, num)
        return top, ids
    _, block_ids = jax.lax.top_k(blocks.max(axis=2), num)
    values, ids = _taken(blocks, jnp.sort(block_ids, axis=1))
    top, places = jax.lax.top_k(values, num)
    return top, jnp.take_along_axis(ids, places, axis=1)


def _in_blocks(x: Float[Array, "S V"], size: int) -> Float[Array, "S b size"]:
    S, V = x.shape
    return jnp.pad(x, ((0, 0), (0, -V % size)), constant_values=-jnp.inf).reshape(S, -1, size)


def _taken(
    blocks: Float[Array, "S b size"], block_ids: Int[Array, "S c"]
) -> tuple[Float[Array, "S n"], Int[Array, "S n"]]:
    S, _, size = blocks.shape
    values = jnp.take_along_axis(
        blocks, block_ids[:, :, None], axis=1, mode="fill", fill_value=-jnp.inf
    )
    ids = block_ids[:, :, None] * size + jnp.arange(size, dtype=jnp.int32)
    return values.reshape(S, -1), ids.reshape(S, -1)


def least_kept(
    x: Float[Array, "S n"],
    top_k: Int[Array, " S"],
    top_p: Float[Array, " S"],
    min_p: Float[Array, " S"],
    lowest: Float[Array, " S"] | None = None,
    total: Float[Array, " S"] | None = None,
    *,
    in_blocks: bool = True,
) -> tuple[Float[Array, " S"], Float[Array, " S"]]:
    """Returns per row the least value that top-k keeps, and the least that all three keep, top-p of
    what top-k leaves; 0, 1 and 0 keep all.

    x is at most 0, with a 0 in each row. If it is part of a row, `lowest` is what the results have
    to lie above to be those of the whole row, and `total` the whole row's sum of exp(x). With
    `in_blocks` the search goes on in the blocks that are left: on a CPU, several times faster.
    """
    lowest = jnp.full(x.shape[:1], _LOWEST) if lowest is None else jnp.maximum(lowest, _LOWEST)
    has_k = top_k > 0

    def least(measure, goal, lowest, wanted):
        return _least(x, measure, goal, _interval(x, lowest, wanted), in_blocks)

    k_least = least(_count, top_k.astype(x.dtype), lowest, has_k)
    mass = _weight(x, x >= k_least[:, None])
    mass = top_p * (mass if total is None else jnp.where(has_k, mass, total))
    p_least = least(_weight, mass, k_least, top_p < 1)
    floor = jnp.where(min_p > 0, jnp.log(jnp.maximum(min_p, 1e-38)), -jnp.inf)
    return k_least, jnp.maximum(p_least, floor)


def _weight(x: Float[Array, "S n"], kept: Bool[Array, "S n"]) -> Float[Array, " S"]:
    return jnp.where(kept, jnp.exp(x), 0.0).sum(axis=1)


def _count(x: Float[Array, "S n"], kept: Bool[Array, "S n"]) -> Float[Array, " S"]:
    """Counts in float32: exact up to 2**24, and on a CPU faster than in integers."""
    del x
    return kept.sum(axis=1, dtype=jnp.float32)


Measure = Callable[[Array, Array], Array]


class _Interval(NamedTuple):
    """Where each row's least value is looked for: both ends belong to it. What lies above it is not
    enough; what lies above or in it is, or nothing is."""

    low: Int[Array, " S"]  # keys
    high: Int[Array, " S"]
    num_low: Float[Array, " S"]  # values >= low, and those above high
    num_high: Float[Array, " S"]
    above: Float[Array, " S"]  # the measure of all that is above high


def _interval(x: Float[Array, "S n"], lowest: Float[Array, " S"], wanted: Bool[Array, " S"]):
    """Returns all from the lowest value up to 0, or none where nothing is wanted."""
    low, zero = _key(lowest), jnp.zeros(lowest.shape)
    return _Interval(low, jnp.where(wanted, 0, low), _count(x, x >= lowest[:, None]), zero, zero)


def _least(
    x: Float[Array, "S n"],
    measure: Measure,
    goal: Float[Array, " S"],
    interval: _Interval,
    in_blocks: bool,
) -> Float[Array, " S"]:
    """Returns per row a value that keeps, of values >= it, the fewest that measure `goal`; the low
    end of the interval where nothing above it does.

    Once the values in the interval fit into an eighth of the blocks, goes on with those blocks.
    """
    most = x.shape[1] // (_BLOCK * _SHARE)
    if not in_blocks or x.shape[1] <= SMALL:
        return _value(_narrowed(x, measure, goal, interval, 1).low)
    interval = _narrowed(x, measure, goal, interval, most)
    low, high = _value(interval.low), _value(interval.high)
    inside = jnp.where((x >= low[:, None]) & (x <= high[:, None]), x, -jnp.inf)
    blocks = _in_blocks(inside, _BLOCK)
    near, _ = _taken(blocks, _indices(blocks.max(axis=2) > -jnp.inf, most))
    num = interval.num_low - interval.num_high
    interval = interval._replace(num_low=num, num_high=jnp.zeros(num.shape))
    return _least(near, measure, goal, interval, in_blocks)


def _narrowed(
    x: Float[Array, "S n"], measure: Measure, goal: Any, interval: _Interval, most: int
) -> _Interval:
    """Halves each row's interval until at most so many values of x, or one of all, are left in it.

    Halves of the values come nearer in a few steps than halves of the bits, which alone are sure to
    end and so take over. A row's interval does not depend on how long other rows take.
    """
    above = interval.above  # of what is not in x

    def is_open(interval: _Interval) -> Bool[Array, " S"]:
        low, high, num_low, num_high, _ = interval
        return (low < high) & (num_low - num_high > most)

    def halve(state):
        step, now = state
        low, high = now.low, now.high
        by_bits = (low >> 1) + (high >> 1) + (low & high & 1) + ((low ^ high) & 1)  # rounded up
        ends = (jnp.maximum(_value(key), _LEAST_GUESS) for key in (low, high))
        by_value = jnp.clip(_key(sum(ends) / 2), low + 1, high)
        middle = jnp.where(step < _VALUE_STEPS, by_value, by_bits)
        kept = x >= _value(middle)[:, None]
        num, found = _count(x, kept), above + measure(x, kept)
        lower = now._replace(high=middle - 1, num_high=num, above=found)
        upper = now._replace(low=middle, num_low=num)
        half = _where(found >= goal, upper, lower)
        return step + 1, _where(is_open(now), half, now)

    return jax.lax.while_loop(lambda state: is_open(state[1]).any(), halve, (0, interval))[1]


def _where(which: Bool[Array, " S"], then: _Interval, otherwise: _Interval) -> _Interval:
    return _Interval(*(jnp.where(which, a, b) for a, b in zip(then, otherwise, strict=True)))


def _key(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Maps floats to int32 in the same order."""
    return _in_order(jax.lax.bitcast_convert_type(x, jnp.int32))


def _value(key: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(_in_order(key), jnp.float32)


def _in_order(bits: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Turns the bits of floats into integers in the same order, and those back into the bits."""
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))
