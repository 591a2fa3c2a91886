"""Picks the next token of each row from its logits. Knows rows of numbers, not requests.

Order of operations, that of Hugging Face's processors with OpenAI's penalties put in: bias,
repetition penalty, presence and frequency penalties, mask of allowed tokens, temperature, top-k,
top-p, min-p, draw. (vLLM differs in one: its min-p comes before top-k and top-p.) Nothing here
sorts the vocabulary; what a batch does not ask for is skipped at run time by conditionals, so that
there is one program. S rows, V vocabulary, W = ceil(V / 32) words of a mask, B entries of a bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt

from jserve.runner.mesh import keep_whole, split_columns
from jserve.sampling_params import MAX_LOGPROBS
from scheduler.packer import BAD_TOKEN, Wants

MIN_TEMPERATURE = 1e-5  # smaller ones are greedy: they would overflow
# An entry of the token counts: how often the output has the token, and whether the prompt has it.
MAX_COUNT, IN_PROMPT = 2**14 - 1, 2**14
_DRAW_BLOCK = 256
_VALUE_STEPS, _LEAST_GUESS = 16, -128.0  # exp of less is 0 in float32
_EDITS = Wants.PENALTIES | Wants.BIAS | Wants.MASK


class Logprobs(NamedTuple):
    """Natural logarithms of a row's distribution: of one token, and of the best ones."""

    logprobs: Float[Array, " S"]
    ranks: Int[Array, " S"]  # of the token; 1 is the best one
    top_ids: Int[Array, "S A"]  # A = MAX_LOGPROBS at most, best first
    top_logprobs: Float[Array, "S A"]


class Sampled(NamedTuple):
    """One step's choices. The log-probabilities are zeros unless a row asked for them."""

    token_ids: Int[Array, " S"]  # BAD_TOKEN for rows that have no finite best logit
    of_tokens: Logprobs


class Edits(NamedTuple):
    """What is done to the logits before a token is chosen, beside the numbers of the batch."""

    counts: Int[Array, "slots+1 V"]  # int16, by slot
    bias_ids: Int[Array, "S B"]
    bias: Float[Array, "S B"]
    allowed: UInt[Array, "S W"]  # bit v % 32 of word v // 32: token v may come


def sample(
    logits: Float[Array, "S V"],
    batch: Mapping[str, Array],
    edits: Edits,
    *,
    processed_logprobs: bool = False,
    mesh: Mesh | None = None,
) -> Sampled:
    """Returns a token per row, by the fields of packer.sampling_fields.

    A row's token depends on its own logits, settings, history, seed and position only.

    Args:
      processed_logprobs: log-probabilities are of what the token was chosen from, not of `logits`.
      mesh: the devices over which the logits are split, if they are.
    """
    wants = batch["wants"][0]
    nothing = _no_logprobs(logits)

    def plain() -> Sampled:
        return Sampled(_checked(*argmax(logits)), nothing)

    def random() -> Sampled:
        return Sampled(_checked(*_drawn(logits, batch, mesh)[:2]), nothing)

    def full() -> Sampled:
        x = _if(wants, _EDITS, lambda: edit(logits, batch, edits, mesh), lambda: logits)
        x = split_columns(x, mesh)

        def drawn() -> tuple[Array, Array, Array]:
            token_ids, best, cut = _drawn(x, batch, mesh)
            # Without a use of `cut`, no copy of it leaves this branch.
            return token_ids, best, cut if processed_logprobs else logits[:, :0]

        def greedy() -> tuple[Array, Array, Array]:
            return *argmax(x), x if processed_logprobs else logits[:, :0]

        token_ids, best, final = _if(wants, Wants.RANDOM, drawn, greedy)
        source = final if processed_logprobs else logits
        of_tokens = _if(
            wants, Wants.LOGPROBS, lambda: logprobs_of(source, token_ids), lambda: nothing
        )
        return Sampled(_checked(token_ids, best), of_tokens)

    # One conditional, not a nest of them: a GPU's host waits for the predicate of each.
    is_random_only = (wants & ~(Wants.RANDOM | Wants.TRUNCATION)) == 0
    branch = jnp.where(wants == 0, 0, jnp.where(is_random_only, 1, 2))
    return jax.lax.switch(branch, [plain, random, full])


def _if(wants: Int[Array, ""], any_of: Wants, then, otherwise):
    """Returns then() in a batch in which any row wants any of those, and else otherwise()."""
    return jax.lax.cond((wants & any_of) != 0, then, otherwise)


def _checked(token_ids: Int[Array, " S"], best: Float[Array, " S"]) -> Int[Array, " S"]:
    """A row whose best logit is not finite has a NaN, an infinity, or nothing that may come."""
    return jnp.where(jnp.isfinite(best), token_ids, BAD_TOKEN)


def edit(
    logits: Float[Array, "S V"],
    batch: Mapping[str, Array],
    edits: Edits,
    mesh: Mesh | None = None,
) -> Float[Array, "S V"]:
    """Returns the logits with bias, penalties and mask, in that order."""
    wants = batch["wants"][0]

    def counts() -> Int[Array, "S V"]:  # inside a branch, so that no other has them taken apart
        return split_columns(edits.counts, mesh)[batch["slots"]]

    x = logits
    for want, change in (
        (Wants.BIAS, lambda x: add_bias(x, edits.bias_ids, edits.bias)),
        (Wants.PENALTIES, lambda x: penalize(x, counts(), batch)),
        (Wants.MASK, lambda x: mask(x, edits.allowed, mesh)),
    ):
        x = split_columns(_if(wants, want, partial(change, x), lambda x=x: x), mesh)
    return x


def add_bias(
    x: Float[Array, "S V"], ids: Int[Array, "S B"], values: Float[Array, "S B"]
) -> Float[Array, "S V"]:
    return x.at[jnp.arange(x.shape[0])[:, None], ids].add(values)


def penalize(
    x: Float[Array, "S V"], counts: Int[Array, "S V"], batch: Mapping[str, Array]
) -> Float[Array, "S V"]:
    """Applies the repetition penalty to tokens of prompt and output, then OpenAI's to those of the
    output."""
    repetition, presence, frequency = (
        batch[f"{name}_penalty"][:, None] for name in ("repetition", "presence", "frequency")
    )
    x = jnp.where(counts != 0, jnp.where(x > 0, x / repetition, x * repetition), x)
    num = (counts & MAX_COUNT).astype(x.dtype)
    return x - frequency * num - presence * (num > 0)


def count_tokens(
    counts: Int[Array, "slots+1 V"], slots: Int[Array, " S"], token_ids: Int[Array, " S"]
) -> Int[Array, "slots+1 V"]:
    """Returns the counts, to be donated, with one more of each row's token."""
    old = counts[slots, token_ids]
    is_full = (old & MAX_COUNT) == MAX_COUNT
    return counts.at[slots, token_ids].set(jnp.where(is_full, old, old + 1))


def mask(
    x: Float[Array, "S V"], words: UInt[Array, "S W"], mesh: Mesh | None = None
) -> Float[Array, "S V"]:
    """Excludes what has no bit in `words`, but hides neither a NaN nor an infinity."""
    allowed = split_columns(unpack_mask(words, x.shape[1]), mesh)
    return jnp.where(allowed | ~(x < jnp.inf), x, -jnp.inf)


def unpack_mask(words: UInt[Array, "S W"], V: int) -> Bool[Array, "S V"]:
    # A word per token: the 32 bits of a word, as an axis, would fill rows of 128 on a TPU.
    index = jnp.arange(V)
    word = jnp.take(words, index // 32, axis=1, mode="clip")
    return (word >> (index % 32).astype(words.dtype)) & 1 != 0


def argmax(x: Float[Array, "S V"]) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Returns the first index of each row's maximum, and the maximum; 0 and NaN in a row that has a
    NaN or +inf.

    Two plain reductions, which XLA vectorises on a CPU, in place of its scalar loop over pairs. The
    first does not see every NaN there: of wide rows XLA makes a maximum that drops them.
    """
    V = x.shape[1]
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    largest = x.max(axis=1, keepdims=True)
    first = jnp.where(x < jnp.inf, jnp.where(x == largest, index, V), -1).min(axis=1)
    return jnp.maximum(first, 0), jnp.where(first < 0, jnp.nan, largest[:, 0])


def _drawn(
    x: Float[Array, "S V"], batch: Mapping[str, Array], mesh: Mesh | None
) -> tuple[Int[Array, " S"], Float[Array, " S"], Float[Array, "S V"]]:
    """Returns a token per row, the best logit, and what the token was chosen from: of a greedy row
    x, and else what draws are made from: at most 0, 0 in each row, and -inf where excluded."""
    temperature = batch["temperature"]
    is_random = temperature >= MIN_TEMPERATURE
    greedy, best = argmax(x)
    cut = (x - best[:, None]) / jnp.where(is_random, temperature, 1.0)[:, None]
    cuts = partial(truncate, cut, *(batch[name] for name in ("top_k", "top_p", "min_p")))
    cut = split_columns(_if(batch["wants"][0], Wants.TRUNCATION, cuts, lambda: cut), mesh)
    token_ids = draw(cut, batch["seed"], batch["sample_positions"], mesh)
    token_ids = jnp.where(is_random, token_ids, greedy)
    return token_ids, best, jnp.where(is_random[:, None], cut, x)


def draw(
    x: Float[Array, "S V"],
    seeds: UInt[Array, " S"],
    positions: Int[Array, " S"],
    mesh: Mesh | None = None,
) -> Int[Array, " S"]:
    """Draws from softmax(x), with one uniform number per row made from its seed and position.

    Inverse transform in two levels, blocks and then tokens of one block, as a running sum over
    the whole vocabulary is slow and less exact. No block spans two devices. x must be at most 0
    with a 0 in each row.
    """
    S, V = x.shape
    part = V // (1 if mesh is None else mesh.size)
    blocks = -(-part // _DRAW_BLOCK)
    weights = split_columns(jnp.exp(x).reshape(S, -1, part), mesh)
    weights = jnp.pad(weights, ((0, 0), (0, 0), (0, blocks * _DRAW_BLOCK - part)))
    weights = split_columns(weights.reshape(S, -1, _DRAW_BLOCK), mesh)

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

    block_weights = keep_whole(weights.sum(axis=2), mesh)
    point = jax.vmap(uniform)(seeds, positions) * block_weights.sum(axis=1)
    block, before = pick(block_weights, point)
    in_block = jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0]
    token, _ = pick(keep_whole(in_block, mesh), point - before)
    in_part = block % blocks * _DRAW_BLOCK + token
    # A row of NaN, in which nothing is live, would end in the padding.
    return jnp.minimum(block // blocks * part + in_part, V - 1).astype(jnp.int32)


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


def logprobs_of(logits: Float[Array, "S V"], token_ids: Int[Array, " S"]) -> Logprobs:
    """Returns the log-probabilities of a token in each row, and of the row's best ones."""
    total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    ranks = (logits > chosen).sum(axis=1, dtype=jnp.int32) + 1
    top, top_ids = jax.lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))
    return Logprobs((chosen - total)[:, 0], ranks, top_ids, top - total)


def _no_logprobs(logits: Float[Array, "S V"]) -> Logprobs:
    shapes = jax.eval_shape(logprobs_of, logits, jnp.zeros(logits.shape[0], jnp.int32))
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
