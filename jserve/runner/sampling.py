"""Picks the next token of each row from its logits. Knows rows of numbers, not requests.

Order of operations, that of Hugging Face's processors with OpenAI's penalties put in: bias,
repetition penalty, presence and frequency penalties, mask of allowed tokens, temperature, top-k,
top-p, min-p, draw. (vLLM differs in one: its min-p comes before top-k and top-p.) Nothing here
sorts the vocabulary; what a batch does not ask for is skipped at run time by conditionals, so that
there is one program. S rows, V vocabulary, W = ceil(V / 32) words of a mask, B entries of a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt

from jserve.runner.mesh import keep_whole, split_columns
from jserve.runner.truncation import SMALL, best_blocks, best_tokens, least_kept
from jserve.sampling_params import MAX_LOGPROBS
from scheduler.packer import BAD_TOKEN, Wants

MIN_TEMPERATURE = 1e-5  # smaller ones are greedy: they would overflow
# An entry of the token counts: how often the output has the token, and whether the prompt has it.
MAX_COUNT, IN_PROMPT = 2**14 - 1, 2**14
_DRAW_BLOCK = 256
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
    # As the head's product has them: turned before the switch, they are copied for all branches.
    columns = logits.T

    def plain() -> Sampled:
        return Sampled(_checked(*argmax(columns, axis=0)), nothing)

    def random() -> Sampled:
        x = _rows(columns, mesh)
        is_random, greedy, best, scale = _random_rows(x, batch)
        drawn = draw(scale(x), batch["seed"], batch["sample_positions"], mesh)
        return Sampled(_checked(jnp.where(is_random, drawn, greedy), best), nothing)

    def full() -> Sampled:
        logits = _rows(columns, mesh)
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
            wants, Wants.LOGPROBS, lambda: logprobs_of(source, token_ids, mesh), lambda: nothing
        )
        return Sampled(_checked(token_ids, best), of_tokens)

    # One conditional, not a nest of them: a GPU's host waits for the predicate of each.
    branch = jnp.where(wants == 0, 0, jnp.where(wants == Wants.RANDOM, 1, 2))
    return jax.lax.switch(branch, [plain, random, full])


def _rows(columns: Float[Array, "V S"], mesh: Mesh | None) -> Float[Array, "S V"]:
    """Turns logits, once: without a layout, XLA on a CPU turns a copy again wherever it is used. Of
    split ones, a layout would gather all."""
    if mesh is not None:
        return columns.T
    return jax.lax.platform_dependent(
        columns.T,
        cpu=lambda rows: with_layout_constraint(rows, Layout((0, 1))),
        default=lambda rows: rows,
    )


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


def argmax(x: Float[Array, "a b"], axis: int = 1) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Returns the first index of each row's maximum, and the maximum; 0 and NaN in a row that has a
    NaN or +inf. Rows lie along `axis`.

    Two plain reductions, which XLA vectorises on a CPU, in place of its scalar loop over pairs. The
    first does not see every NaN there: of wide rows XLA makes a maximum that drops them.
    """
    V = x.shape[axis]
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    largest = x.max(axis=axis, keepdims=True)
    first = jnp.where(x < jnp.inf, jnp.where(x == largest, index, V), -1).min(axis=axis)
    return jnp.maximum(first, 0), jnp.where(first < 0, jnp.nan, largest.squeeze(axis))


def _drawn(
    x: Float[Array, "S V"], batch: Mapping[str, Array], mesh: Mesh | None
) -> tuple[Int[Array, " S"], Float[Array, " S"], Float[Array, "S V"]]:
    """Returns a token per row, the best logit, and what the token was chosen from: of a greedy row
    x, and else what draws are made from: at most 0, 0 in each row, and -inf where excluded."""
    is_random, greedy, best, scale = _random_rows(x, batch)

    def plain() -> tuple[Array, Array]:
        token_ids = draw(scale(x), batch["seed"], batch["sample_positions"], mesh)
        return token_ids, jnp.full(best.shape, -jnp.inf)

    def truncated() -> tuple[Array, Array]:
        return _drawn_of_kept(x, scale, is_random & jnp.isfinite(best), batch, mesh)

    token_ids, least = _if(batch["wants"][0], Wants.TRUNCATION, truncated, plain)
    token_ids = jnp.where(is_random, token_ids, greedy)
    final = jnp.where(is_random[:, None], above(scale(x), least), x)
    return token_ids, best, split_columns(final, mesh)


def _random_rows(
    x: Float[Array, "S V"], batch: Mapping[str, Array]
) -> tuple[Bool[Array, " S"], Int[Array, " S"], Float[Array, " S"], Callable[[Array], Array]]:
    """Returns which rows are random, the greedy token and the best logit of each, and what makes of
    logits what draws are made from: at most 0, by temperature."""
    is_random = batch["temperature"] >= MIN_TEMPERATURE
    greedy, best = argmax(x)
    divisor = jnp.where(is_random, batch["temperature"], 1.0)[:, None]
    return is_random, greedy, best, lambda x: (x - best[:, None]) / divisor


def _drawn_of_kept(
    x: Float[Array, "S V"],
    scale: Callable[[Array], Array],
    is_random: Bool[Array, " S"],
    batch: Mapping[str, Array],
    mesh: Mesh | None,
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
    """Returns a draw of what top-k, top-p and min-p keep of scale(x), and the least value kept; of
    rows that are not random, anything.

    Rows of which the best blocks tell all are done with these. What is left, if anything, is done
    with whole rows, and no row's result depends on whether there are others.
    """
    top_k, top_p, min_p = (batch[name] for name in ("top_k", "top_p", "min_p"))
    top_k = jnp.where(top_k < x.shape[1], top_k, 0)
    sites = batch["seed"], batch["sample_positions"]

    def among_all(done: Bool[Array, " S"], in_blocks: bool) -> tuple[Array, Array]:
        y = split_columns(scale(x), mesh)
        off = jnp.where(done, 0, top_k), jnp.where(done, 1.0, top_p), jnp.where(done, 0.0, min_p)
        _, least = least_kept(y, *off, in_blocks=in_blocks)
        return draw(above(y, least), *sites, mesh), least

    def among_best_first() -> tuple[Array, Array]:
        near = best_blocks(x)
        y, others = scale(near.values), scale(near.others[:, None])[:, 0]
        needs_total = is_random & (top_p < 1) & (top_k == 0)
        total = jax.lax.cond(
            needs_total.any(), lambda: jnp.exp(scale(x)).sum(axis=1), lambda: jnp.zeros(len(x))
        )
        k_least, least = least_kept(y, top_k, top_p, min_p, others, total)
        places = draw(above(y, least), *sites)
        token_ids = jnp.take_along_axis(near.ids, places[:, None], axis=1)[:, 0]
        done = (jnp.where(top_k > 0, k_least, least) > others) | ~is_random

        def rest() -> tuple[Array, Array]:
            ids, least_of_all = among_all(done, in_blocks=True)
            return jnp.where(done, token_ids, ids), jnp.where(done, least, least_of_all)

        return jax.lax.cond(done.all(), lambda: (token_ids, least), rest)

    among_all_at_once = partial(among_all, ~is_random, in_blocks=False)
    if x.shape[1] <= SMALL or mesh is not None:
        return among_all_at_once()
    # Accelerators read whole rows quickly, and gather slowly.
    return jax.lax.platform_dependent(cpu=among_best_first, default=among_all_at_once)


def above(x: Float[Array, "S n"], least: Float[Array, " S"]) -> Float[Array, "S n"]:
    """Excludes what is less than its row's least value."""
    return jnp.where(x >= least[:, None], x, -jnp.inf)


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


def logprobs_of(
    logits: Float[Array, "S V"], token_ids: Int[Array, " S"], mesh: Mesh | None = None
) -> Logprobs:
    """Returns the log-probabilities of a token in each row, and of the row's best ones."""
    total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    ranks = (logits > chosen).sum(axis=1, dtype=jnp.int32) + 1
    num = min(MAX_LOGPROBS, logits.shape[1])

    def of_all(logits: Float[Array, "S V"]) -> tuple[Array, Array]:
        top, ids = jax.lax.top_k(logits, num)
        return top, ids

    on_cpu = of_all if mesh is not None else partial(best_tokens, num=num)
    top, top_ids = jax.lax.platform_dependent(logits, cpu=on_cpu, default=of_all)
    return Logprobs((chosen - total)[:, 0], ranks, top_ids, top - total)


def _no_logprobs(logits: Float[Array, "S V"]) -> Logprobs:
    shapes = jax.eval_shape(logprobs_of, logits, jnp.zeros(logits.shape[0], jnp.int32))
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
