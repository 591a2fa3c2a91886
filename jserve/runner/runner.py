"""Runs packed batches on the devices, in order, without waiting. Knows buffers and executables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jserve.runner.compile import Programs
from jserve.runner.sampling import IN_PROMPT, MAX_COUNT, Logprobs
from jserve.runner.step import SCORED_TOKENS, Hidden, StepState
from jserve.runner.swap import SwapSpace
from scheduler.packer import MAX_LOGIT_BIAS, History, PackedBatch, PromptPiece, Wants


class StepOutput(NamedTuple):
    """What a step gives the host."""

    token_ids: np.ndarray  # i32[S], BAD_TOKEN where a row's logits were no numbers
    logprobs: Logprobs | None  # arrays over S; None unless the batch asked for them
    prompt_logprobs: Sequence[Logprobs]  # arrays over n, one for each of the batch's prompt pieces
    row_sums: np.ndarray | None  # f32[rows, D], of the hidden states of the batch's pooled rows


class StepHandle:
    """A step that is running. `result` is the one blocking read of the device."""

    def __init__(self, batch: PackedBatch, hidden: Hidden) -> None:
        self.batch = batch
        self.hidden: Hidden | None = hidden  # until the step's tokens are chosen
        self._tokens: jax.Array | None = None
        self._logprobs: Logprobs | None = None
        self._scores: list[list[Logprobs]] = []
        self._row_sums: jax.Array | None = None

    def keep(self, token_ids: jax.Array | None, logprobs: Logprobs | None) -> None:
        self.hidden = None
        self._tokens, self._logprobs = token_ids, logprobs
        for array in (token_ids, *(logprobs or ())):
            if array is not None:
                array.copy_to_host_async()

    def keep_scores(self, of_piece: list[Logprobs]) -> None:
        self._scores.append(of_piece)
        for array in jax.tree.leaves(of_piece):
            array.copy_to_host_async()

    def keep_row_sums(self, row_sums: jax.Array) -> None:
        self._row_sums = row_sums
        row_sums.copy_to_host_async()

    def result(self) -> StepOutput:
        assert self.hidden is None, "the step's tokens have not been chosen"
        tokens, logprobs = self._tokens, self._logprobs
        scores = [
            _joined(of_piece, len(piece.target_ids))
            for piece, of_piece in zip(self.batch.prompt_pieces, self._scores, strict=True)
        ]
        num_rows = self.batch.bucket.num_rows
        return StepOutput(
            np.zeros(num_rows, np.int32) if tokens is None else np.asarray(tokens),
            None if logprobs is None else jax.tree.map(np.asarray, logprobs),
            scores,
            None if self._row_sums is None else np.asarray(self._row_sums),
        )


class Runner:
    """Owns the weights, the device state and the compiled programs of one engine."""

    def __init__(
        self,
        params: Any,
        head: Any,
        state: StepState,
        programs: Programs,
        swap: SwapSpace | None = None,
    ) -> None:
        self._params, self._head = params, head
        self.state = state
        self._programs = programs
        self._swap = swap
        self._waiting: StepHandle | None = None
        V = state.sampler.counts.shape[1]
        whole = state.sampler.last_tokens.sharding
        # What batches without bias and mask are given, so that nothing has to cross.
        self._no_edits = {
            S: jax.device_put(
                (
                    (
                        np.zeros((S, MAX_LOGIT_BIAS), np.int32),
                        np.zeros((S, MAX_LOGIT_BIAS), np.float32),
                    ),
                    np.zeros((S, -(-V // 32)), np.uint32),
                ),
                whole,
            )
            for S in programs.choose
        }

    def dispatch(self, batch: PackedBatch) -> StepHandle:
        """Starts the page copies and the forward pass of `batch` behind those before, and returns
        at once; only many copies wait, as swap.py says. `choose` has to follow before the next."""
        assert self._waiting is None, "the tokens of the step before have not been chosen"
        kv_pool, sampler = self.state
        if len(batch.copies_out) or len(batch.copies_in):
            assert self._swap is not None, "pages cannot move without a swap space"
            kv_pool = self._swap.move(kv_pool, batch.copies_out, batch.copies_in)
        forward = self._programs.forward[batch.bucket]
        kv_pool, hidden = forward(self._params, kv_pool, sampler.last_tokens, batch.buffer)
        self.state = StepState(kv_pool, sampler)
        self._waiting = StepHandle(batch, hidden)
        return self._waiting

    def choose(self, handle: StepHandle, allowed: np.ndarray | None = None) -> None:
        """Starts the choice of a step's tokens behind its forward pass, and returns at once.

        `allowed` u32[S, W] has a bit for each token that may come; it may be known only when the
        step before has been read, while this step's forward pass runs.
        """
        assert handle is self._waiting, "steps are chosen in order"
        assert handle.hidden is not None, "a step's tokens are chosen once"
        self._waiting = None
        batch, hidden = handle.batch, handle.hidden
        for piece in batch.prompt_pieces:
            handle.keep_scores(self._score(hidden, piece))
        if batch.pooled_rows is not None:
            handle.keep_row_sums(self._programs.row_sums(hidden.tokens, batch.pooled_rows))
        if batch.sampling is None:
            handle.keep(None, None)
            return
        num_rows = batch.bucket.num_rows
        no_bias, all_allowed = self._no_edits[num_rows]
        sampler = self.state.sampler
        for history in batch.histories:
            row = _count_row(history, sampler.counts.shape[1])
            counts = self._programs.remember(sampler.counts, np.int32(history.slot), row)
            sampler = sampler._replace(counts=counts)
        sampler, sampled = self._programs.choose[num_rows](
            self._head,
            sampler,
            hidden.rows,
            batch.sampling,
            no_bias if batch.bias is None else tuple(batch.bias),
            all_allowed if allowed is None else allowed,
        )
        self.state = self.state._replace(sampler=sampler)
        handle.keep(sampled.token_ids, sampled.of_tokens if batch.wants & Wants.LOGPROBS else None)

    def reset(self) -> None:
        """Begins anew with empty pages and slots, after a step that failed: what it was given to
        write to is lost. Raises what the device raises."""
        self._waiting = None
        if self._swap is not None:
            self._swap.reset()
        arrays, form = jax.tree.flatten(self.state)
        made_of = [(array.shape, array.dtype, array.sharding) for array in arrays]
        del self.state, arrays  # before the new ones take as much memory
        zeros = [jnp.zeros(shape, dtype, device=where) for shape, dtype, where in made_of]
        self.state = jax.block_until_ready(jax.tree.unflatten(form, zeros))

    def _score(self, hidden: Hidden, piece: PromptPiece) -> list[Logprobs]:
        parts = []
        for begin in range(0, len(piece.target_ids), SCORED_TOKENS):
            target_ids = np.zeros(SCORED_TOKENS, np.int32)
            part = piece.target_ids[begin : begin + SCORED_TOKENS]
            target_ids[: len(part)] = part
            start = np.int32(piece.first + begin)
            parts.append(self._programs.score(self._head, hidden.tokens, start, target_ids))
        return parts


def _joined(parts: list[Logprobs], num_tokens: int) -> Logprobs:
    """Returns the scores of one prompt piece, whose last part is padded."""
    return jax.tree.map(lambda *arrays: np.concatenate(arrays)[:num_tokens], *parts)


def _count_row(history: History, V: int) -> np.ndarray:
    """Returns a slot's token counts i16[V], see sampling.py."""
    output = np.asarray(history.output_token_ids, np.int64)
    row = np.minimum(np.bincount(output, minlength=V), MAX_COUNT)
    row[np.asarray(history.prompt_token_ids, np.int64)] += IN_PROMPT
    return row.astype(np.int16)
