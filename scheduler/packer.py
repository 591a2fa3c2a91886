"""Writes a StepPlan into the fixed-shape arrays of one bucket. Knows the layout of the one buffer
that crosses to the device, which the compiled step unpacks by the same table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from scheduler.bucket import Bucket, choose_bucket
from scheduler.config import SchedulerConfig
from scheduler.page_pool import NULL_PAGE
from scheduler.plan import NO_COPIES, StepPlan
from scheduler.request import Request

FROM_DEVICE = -1  # token id of a decode row whose input is last_tokens[slot] on the device


class Field(NamedTuple):
    """One array inside the packed int32 buffer; other dtypes are stored bit for bit."""

    offset: int
    shape: tuple[int, ...]
    dtype: type


@lru_cache(maxsize=256)
def batch_fields(bucket: Bucket, max_pages_per_seq: int) -> dict[str, Field]:
    """Returns where each array of a bucket's batch lies in its buffer, in words of 32 bits."""
    T, S, J = bucket.num_tokens, bucket.num_rows, max_pages_per_seq
    arrays: list[tuple[str, tuple[int, ...], type]] = [
        ("token_ids", (T,), np.int32),  # FROM_DEVICE: last_tokens[slot] of the row of that index
        ("positions", (T,), np.int32),  # pad = 0
        ("kv_lens", (S,), np.int32),  # this step's tokens included; pad = 0
        ("cu_q_lens", (S + 1,), np.int32),  # pad = last value
        ("distribution", (3,), np.int32),  # ends of the decode rows, of the chunks, of all rows
        ("page_indices", (S, J), np.int32),  # pad = null page
        ("slots", (S,), np.int32),  # where the sampled token is kept; pad = max_num_seqs
        ("temperature", (S,), np.float32),
        ("top_k", (S,), np.int32),
        ("top_p", (S,), np.float32),
        ("min_p", (S,), np.float32),
        ("seeds", (S,), np.uint32),
        ("sample_positions", (S,), np.int32),  # index of the new token in its sequence
        ("wants", (3,), np.int32),  # any row: samples at random, truncates, asks logprobs
    ]
    fields, offset = {}, 0
    for name, shape, dtype in arrays:
        fields[name] = Field(offset, shape, dtype)
        offset += math.prod(shape)
    return fields


def batch_words(bucket: Bucket, max_pages_per_seq: int) -> int:
    """Returns the length of a bucket's buffer in words of 32 bits."""
    last = list(batch_fields(bucket, max_pages_per_seq).values())[-1]
    return last.offset + math.prod(last.shape)


def views(buffer: np.ndarray, bucket: Bucket, max_pages_per_seq: int) -> dict[str, np.ndarray]:
    """Returns the named arrays of a packed buffer, without copying."""
    return {
        name: buffer[f.offset : f.offset + math.prod(f.shape)].view(f.dtype).reshape(f.shape)
        for name, f in batch_fields(bucket, max_pages_per_seq).items()
    }


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One step's input: a bucket and its buffer i32[words], and the pages to move before it."""

    bucket: Bucket
    buffer: np.ndarray
    num_tokens: int  # real ones, the rest of the bucket is padding
    num_rows: int
    wants_logprobs: bool
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
        self._num_logprobs = np.full(slots, -1, np.int32)
        self._settings: dict[str, np.ndarray] = {
            "temperature": np.zeros(slots, np.float32),
            "top_k": np.zeros(slots, np.int32),
            "top_p": np.ones(slots, np.float32),
            "min_p": np.zeros(slots, np.float32),
            "seeds": np.zeros(slots, np.uint32),
        }

    def pack(self, plan: StepPlan) -> PackedBatch:
        """Returns the batch of a plan with at least one row, before the next plan is made."""
        count = len(plan.requests)
        bucket = choose_bucket(self.buckets, plan.num_tokens, count)
        buffer = np.zeros(batch_words(bucket, self._max_pages), np.int32)
        batch = views(buffer, bucket, self._max_pages)
        for row in range(plan.num_decodes, count):  # every request begins with such a row
            self._remember_settings(plan.requests[row], int(plan.slots[row]))
        self._pack_rows(batch, plan, count)
        self._pack_tokens(batch, plan, count)
        wants_logprobs = bool((self._num_logprobs[plan.slots[plan.samples]] >= 0).any())
        self._pack_wants(batch, count, wants_logprobs)
        return PackedBatch(
            bucket,
            buffer,
            plan.num_tokens,
            count,
            wants_logprobs,
            plan.copies_out,
            plan.copies_in,
        )

    def _pack_rows(self, batch: dict[str, np.ndarray], plan: StepPlan, count: int) -> None:
        slots, ends = plan.slots, plan.starts + plan.counts
        # An out-of-range page does not fail on a device, it corrupts: check those written.
        for written in (plan.starts, ends - 1):
            pages = plan.page_table[slots, written // self._page_size]
            assert ((pages > NULL_PAGE) & (pages < self._num_pages)).all(), f"{pages=}"
        batch["kv_lens"][:count] = ends
        batch["sample_positions"][:count] = ends
        batch["page_indices"][:count] = plan.page_table[slots]
        batch["slots"][:] = self._null_slot
        batch["slots"][:count] = np.where(plan.samples, slots, self._null_slot)
        for name, of_slot in self._settings.items():
            batch[name][:count] = of_slot[slots]

    def _pack_tokens(self, batch: dict[str, np.ndarray], plan: StepPlan, count: int) -> None:
        token_ids, positions = batch["token_ids"], batch["positions"]
        end = plan.num_decodes
        token_ids[:end] = FROM_DEVICE
        positions[:end] = plan.starts[:end]
        for row in range(end, count):
            start, num = int(plan.starts[row]), int(plan.counts[row])
            token_ids[end : end + num] = plan.requests[row].ids_between(start, start + num)
            positions[end : end + num] = np.arange(start, start + num)
            end += num
        cu_q_lens = batch["cu_q_lens"]
        np.cumsum(plan.counts, out=cu_q_lens[1 : count + 1])
        cu_q_lens[count + 1 :] = end
        num_single = count if end == count else int((plan.counts == 1).sum())
        batch["distribution"][:] = (num_single, count, count)

    def _pack_wants(self, batch: dict[str, np.ndarray], count: int, logprobs: bool) -> None:
        random = batch["temperature"][:count] > 0
        truncates = random & (
            (batch["top_k"][:count] > 0)
            | (batch["top_p"][:count] < 1)
            | (batch["min_p"][:count] > 0)
        )
        batch["wants"][:] = (random.any(), truncates.any(), logprobs)

    def _remember_settings(self, request: Request, slot: int) -> None:
        sampling = request.sampling
        self._num_logprobs[slot] = sampling.num_logprobs
        for name, of_slot in self._settings.items():
            of_slot[slot] = getattr(sampling, "seed" if name == "seeds" else name)
