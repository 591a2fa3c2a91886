"""Writes a StepPlan into the fixed-shape arrays of one bucket. Knows the layout of the two buffers
that cross to the device, which the compiled programs unpack by the same tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from scheduler.bucket import Bucket, choose_bucket
from scheduler.config import SchedulerConfig
from scheduler.page_pool import NULL_PAGE
from scheduler.plan import NO_COPIES, StepPlan
from scheduler.request import BAD_TOKEN, Request, SamplingView

__all__ = ["BAD_TOKEN", "FROM_DEVICE", "MAX_LOGIT_BIAS", "PackedBatch", "Packer", "Wants"]

FROM_DEVICE = -1  # token id of a decode row whose input is last_tokens[slot] on the device
MAX_LOGIT_BIAS = 1024  # entries of a row


# The sampler's settings of a row, named as in SamplingView, one after the other.
_SETTINGS: dict[str, type] = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "repetition_penalty": np.float32,
    "seed": np.uint32,
}


class Wants(IntFlag):
    """What any row of a batch asks of the sampler; the rest is skipped."""

    RANDOM = 1
    TRUNCATION = 2  # top-k, top-p or min-p
    LOGPROBS = 4
    PENALTIES = 8
    BIAS = 16
    MASK = 32  # of the tokens that are allowed


class Field(NamedTuple):
    """One array inside a packed int32 buffer; other dtypes are stored bit for bit."""

    offset: int
    end: int
    shape: tuple[int, ...]
    dtype: type


Fields = dict[str, Field]
_Arrays = Sequence[tuple[str, tuple[int, ...], type]]


def _laid_out(arrays: _Arrays) -> Fields:
    fields, offset = {}, 0
    for name, shape, dtype in arrays:
        end = offset + math.prod(shape)
        fields[name] = Field(offset, end, shape, dtype)
        offset = end
    return fields


@lru_cache(maxsize=256)
def batch_fields(bucket: Bucket, max_pages_per_seq: int) -> Fields:
    """Returns where each array of a forward pass lies in its buffer, in words of 32 bits."""
    T, S, J = bucket.num_tokens, bucket.num_rows, max_pages_per_seq
    return _laid_out(
        [
            (
                "token_ids",
                (T,),
                np.int32,
            ),  # FROM_DEVICE: last_tokens[slot] of the row of that index
            ("positions", (T,), np.int32),  # pad = 0
            ("kv_lens", (S,), np.int32),  # this step's tokens included; pad = 0
            ("cu_q_lens", (S + 1,), np.int32),  # pad = last value
            ("distribution", (3,), np.int32),  # ends of the decode rows, the chunks, and all rows
            ("page_indices", (S, J), np.int32),  # pad = null page
            ("slots", (S,), np.int32),  # pad = max_num_seqs
        ]
    )


@lru_cache(maxsize=64)
def sampling_fields(num_rows: int) -> Fields:
    """Returns where each array of the sampler lies in its buffer, in words of 32 bits."""
    S = num_rows
    return _laid_out(
        [
            ("slots", (S,), np.int32),  # where the token is kept; max_num_seqs if the row has none
            ("sample_positions", (S,), np.int32),  # index of the new token in its sequence
            *((name, (S,), dtype) for name, dtype in _SETTINGS.items()),
            ("wants", (1,), np.int32),  # Wants, of all rows
        ]
    )


def num_words(fields: Fields) -> int:
    """Returns the length of a buffer in words of 32 bits."""
    return next(reversed(fields.values())).end


def views(buffer: np.ndarray, fields: Fields) -> dict[str, np.ndarray]:
    """Returns the named arrays of a packed buffer, without copying."""
    return {
        name: buffer[offset:end].view(dtype).reshape(shape)
        for name, (offset, end, shape, dtype) in fields.items()
    }


class History(NamedTuple):
    """The tokens that the penalties of one slot go by, from this step on."""

    slot: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


class Bias(NamedTuple):
    """What is added to logits: values[s, i] to that of token ids[s, i]; pad = 0 to token 0."""

    ids: np.ndarray  # i32[S, MAX_LOGIT_BIAS]
    values: np.ndarray  # f32[S, MAX_LOGIT_BIAS]


class PromptPiece(NamedTuple):
    """Tokens of a row's prompt whose log-probabilities are asked for: target_ids[i] comes after the
    batch's token `first` + i."""

    row: int
    first: int
    target_ids: np.ndarray  # i32[n]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One step's input: a bucket and its buffers, and what only some steps have."""

    bucket: Bucket
    buffer: np.ndarray  # i32[words], of batch_fields
    sampling: np.ndarray | None  # i32[words], of sampling_fields; None if no row samples
    num_tokens: int  # real ones, the rest of the bucket is padding
    num_rows: int
    wants: Wants
    bias: Bias | None = None
    histories: Sequence[History] = ()
    prompt_pieces: Sequence[PromptPiece] = ()
    pooled_rows: np.ndarray | None = None  # i32[max_tokens], see Packer; None if nothing is pooled
    copies_out: np.ndarray = field(default_factory=lambda: NO_COPIES)  # i32[n,2] (device, host)
    copies_in: np.ndarray = field(default_factory=lambda: NO_COPIES)  # i32[m,2] (host, device)


class Packer:
    """Packs plans. Keeps each slot's sampling settings between steps, so that decode rows are
    gathered by a few array operations."""

    def __init__(self, config: SchedulerConfig, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self._num_pages = config.num_pages
        self._page_size = config.page_size
        self._max_pages = config.max_pages_per_seq
        self._null_slot = slots = config.max_num_seqs  # where padding rows keep their token
        self._max_tokens = max(bucket.num_tokens for bucket in buckets)
        self._wants = np.zeros(slots, np.int32)
        self._settings = np.zeros((len(_SETTINGS), slots), np.int32)  # as in sampling_fields
        self._bias: dict[int, tuple[tuple[int, float], ...]] = {}

    def pack(self, plan: StepPlan) -> PackedBatch:
        """Returns the batch of a plan with at least one row, before the next plan is made."""
        count = len(plan.requests)
        of_chunks = plan.requests[plan.num_decodes :]
        pools = any(request.sampling.pooling for request in of_chunks)
        keeps_tokens = pools or any(map(_is_scored, of_chunks))
        bucket = choose_bucket(self.buckets, plan.num_tokens, count, keeps_tokens=keeps_tokens)
        fields = batch_fields(bucket, self._max_pages)
        buffer = np.zeros(num_words(fields), np.int32)
        batch = views(buffer, fields)
        for row in range(plan.num_decodes, count):  # every request begins with such a row
            self._remember_settings(plan.requests[row], int(plan.slots[row]))
        self._pack_rows(batch, plan, count)
        pieces = self._pack_tokens(batch, plan, count)
        sampling, wants = self._pack_sampling(bucket, plan, count)
        return PackedBatch(
            bucket,
            buffer,
            sampling,
            plan.num_tokens,
            count,
            wants,
            self._gather_bias(bucket, plan) if wants & Wants.BIAS else None,
            self._new_histories(plan) if wants & Wants.PENALTIES else (),
            pieces,
            self._pooled_rows(plan, batch["cu_q_lens"]) if pools else None,
            plan.copies_out,
            plan.copies_in,
        )

    def _pack_rows(self, batch: dict[str, np.ndarray], plan: StepPlan, count: int) -> None:
        slots, ends = plan.slots, plan.starts + plan.counts
        # An out-of-range page does not fail on a device, it corrupts: check those written.
        for written in (plan.starts, ends - 1) if plan.num_chunks else (plan.starts,):
            pages = plan.page_table[slots, written // self._page_size]
            assert ((pages > NULL_PAGE) & (pages < self._num_pages)).all(), f"{pages=}"
        batch["kv_lens"][:count] = ends
        batch["page_indices"][:count] = plan.page_table[slots]
        batch["slots"][:] = self._null_slot
        batch["slots"][:count] = slots

    def _pack_tokens(
        self, batch: dict[str, np.ndarray], plan: StepPlan, count: int
    ) -> list[PromptPiece]:
        token_ids, positions = batch["token_ids"], batch["positions"]
        pieces = []
        end = plan.num_decodes
        token_ids[:end] = FROM_DEVICE
        positions[:end] = plan.starts[:end]
        for row in range(end, count):
            start, num = int(plan.starts[row]), int(plan.counts[row])
            request = plan.requests[row]
            token_ids[end : end + num] = request.ids_between(start, start + num)
            positions[end : end + num] = np.arange(start, start + num)
            targets = request.prompt_token_ids[start + 1 : start + num + 1]
            if _is_scored(request) and len(targets):
                pieces.append(PromptPiece(row, end, np.asarray(targets, np.int32)))
            end += num
        cu_q_lens = batch["cu_q_lens"]
        np.cumsum(plan.counts, out=cu_q_lens[1 : count + 1])
        cu_q_lens[count + 1 :] = end
        num_single = count if end == count else int((plan.counts == 1).sum())
        batch["distribution"][:] = (num_single, count, count)
        return pieces

    def _pooled_rows(self, plan: StepPlan, cu_q_lens: np.ndarray) -> np.ndarray | None:
        """Returns to which row's embedding each of the step's tokens adds its hidden state; -1 to
        none. None if none does."""
        rows = np.full(self._max_tokens, -1, np.int32)
        for row in range(plan.num_decodes, len(plan.requests)):
            request, end = plan.requests[row], int(cu_q_lens[row + 1])
            if request.sampling.pooling == "mean":
                rows[cu_q_lens[row] : end] = row
            elif request.sampling.pooling == "last":
                is_whole = plan.starts[row] + plan.counts[row] == request.num_prompt_tokens
                rows[end - 1] = row if is_whole else -1
        return rows if rows.max() >= 0 else None

    def _pack_sampling(
        self, bucket: Bucket, plan: StepPlan, count: int
    ) -> tuple[np.ndarray | None, Wants]:
        if not plan.samples.any():
            return None, Wants(0)
        slots = plan.slots
        fields = sampling_fields(bucket.num_rows)
        buffer = np.zeros(num_words(fields), np.int32)
        batch = views(buffer, fields)
        batch["slots"][:] = self._null_slot
        batch["slots"][:count] = np.where(plan.samples, slots, self._null_slot)
        batch["sample_positions"][:count] = plan.starts + plan.counts
        begin = fields[next(iter(_SETTINGS))].offset
        settings = buffer[begin : begin + len(_SETTINGS) * bucket.num_rows]
        settings.reshape(len(_SETTINGS), -1)[:, :count] = self._settings[:, slots]
        wants = int(np.bitwise_or.reduce(self._wants[slots[plan.samples]]))
        batch["wants"][:] = wants
        return buffer, Wants(wants)

    def _gather_bias(self, bucket: Bucket, plan: StepPlan) -> Bias:
        shape = bucket.num_rows, MAX_LOGIT_BIAS
        bias = Bias(np.zeros(shape, np.int32), np.zeros(shape, np.float32))
        for row in plan.samples.nonzero()[0].tolist():
            pairs = self._bias.get(int(plan.slots[row]))
            if pairs:
                ids, values = zip(*pairs, strict=True)
                bias.ids[row, : len(ids)], bias.values[row, : len(ids)] = ids, values
        return bias

    def _new_histories(self, plan: StepPlan) -> list[History]:
        """Those of rows whose tokens so far did not come from the sampler, step by step."""
        return [
            History(int(plan.slots[row]), request.prompt_token_ids, list(request.output_token_ids))
            for row, request in enumerate(plan.requests[plan.num_decodes :], plan.num_decodes)
            if plan.samples[row] and request.sampling.has_penalties
        ]

    def _remember_settings(self, request: Request, slot: int) -> None:
        sampling = request.sampling
        self._wants[slot] = _wants_of(sampling)
        self._bias[slot] = sampling.logit_bias
        for of_slot, (name, dtype) in zip(self._settings, _SETTINGS.items(), strict=True):
            of_slot.view(dtype)[slot] = getattr(sampling, name)


def _is_scored(request: Request) -> bool:
    """Whether log-probabilities of its prompt are wanted, and have not been computed all."""
    return request.sampling.num_prompt_logprobs >= 0 and not request.num_output_tokens


def _wants_of(sampling: SamplingView) -> Wants:
    is_random = sampling.temperature > 0
    truncates = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    given = {
        Wants.RANDOM: is_random,
        Wants.TRUNCATION: is_random and truncates,
        Wants.LOGPROBS: sampling.num_logprobs >= 0,
        Wants.PENALTIES: sampling.has_penalties,
        Wants.BIAS: sampling.logit_bias,
        Wants.MASK: sampling.is_constrained,
    }
    wants = Wants(0)
    for want, is_given in given.items():
        wants |= want if is_given else Wants(0)
    return wants
