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
from scheduler.request import Request
from scheduler.scheduler import PlanRow, StepPlan

FROM_DEVICE = -1  # token id of a decode row whose input is last_tokens[slot] on the device
NO_COPIES = np.zeros((0, 2), np.int32)


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
    """Packs plans. Keeps each slot's page table and sampling settings between steps, so that a
    decode row costs a few scalar writes."""

    def __init__(self, config: SchedulerConfig, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self._num_pages = config.num_pages
        self._null_slot = config.max_num_seqs
        self._max_pages = config.max_pages_per_seq
        rows = config.max_num_seqs + 1  # the last one is the null slot's: padding
        self._page_table = np.full((rows, self._max_pages), NULL_PAGE, np.int32)
        self._num_pages_known = [0] * rows
        self._owner: list[Request | None] = [None] * rows
        self._owner_preemptions = [0] * rows
        self._settings: dict[str, np.ndarray] = {
            "temperature": np.zeros(rows, np.float32),
            "top_k": np.zeros(rows, np.int32),
            "top_p": np.ones(rows, np.float32),
            "min_p": np.zeros(rows, np.float32),
            "seeds": np.zeros(rows, np.uint32),
        }

    def pack(self, plan: StepPlan) -> PackedBatch:
        """Returns the batch of a plan with at least one row."""
        rows = plan.rows
        bucket = choose_bucket(self.buckets, plan.num_tokens, len(rows))
        buffer = np.zeros(batch_words(bucket, self._max_pages), np.int32)
        batch = views(buffer, bucket, self._max_pages)
        self._pack_rows(batch, rows)
        self._pack_tokens(batch, rows)
        wants_logprobs = any(r.samples and r.request.sampling.num_logprobs >= 0 for r in rows)
        self._pack_wants(batch, len(rows), wants_logprobs)
        return PackedBatch(bucket, buffer, plan.num_tokens, len(rows), wants_logprobs)

    def _pack_rows(self, batch: dict[str, np.ndarray], rows: list[PlanRow]) -> None:
        count = len(rows)
        for row in rows:
            self._refresh_slot(row.request)
        slots = np.array([row.request.slot for row in rows], np.intp)
        ends = np.array([row.start + row.num_tokens for row in rows], np.int32)
        samples = np.array([row.samples for row in rows])
        batch["kv_lens"][:count] = ends
        batch["sample_positions"][:count] = ends
        batch["page_indices"][:count] = self._page_table[slots]
        batch["slots"][:] = self._null_slot
        batch["slots"][:count] = np.where(samples, slots, self._null_slot)
        for name, of_slot in self._settings.items():
            batch[name][:count] = of_slot[slots]

    def _pack_tokens(self, batch: dict[str, np.ndarray], rows: list[PlanRow]) -> None:
        token_ids, positions = batch["token_ids"], batch["positions"]
        cu_q_lens = batch["cu_q_lens"]
        end = num_decodes = 0
        for index, (request, start, count, _, reads_last_token) in enumerate(rows):
            if count == 1:  # most rows of most steps
                token_ids[end] = FROM_DEVICE if reads_last_token else request.token_ids[start]
                positions[end] = start
                num_decodes += 1
            else:
                token_ids[end : end + count] = request.token_ids[start : start + count]
                positions[end : end + count] = np.arange(start, start + count)
            end += count
            cu_q_lens[index + 1] = end
        cu_q_lens[len(rows) + 1 :] = end
        batch["distribution"][:] = (num_decodes, len(rows), len(rows))

    def _pack_wants(self, batch: dict[str, np.ndarray], count: int, logprobs: bool) -> None:
        random = batch["temperature"][:count] > 0
        truncates = random & (
            (batch["top_k"][:count] > 0)
            | (batch["top_p"][:count] < 1)
            | (batch["min_p"][:count] > 0)
        )
        batch["wants"][:] = (random.any(), truncates.any(), logprobs)

    def _refresh_slot(self, request: Request) -> None:
        """Brings a slot's page table and settings up to date with the request that has it."""
        slot, pages = request.slot, request.page_ids
        is_new = (
            self._owner[slot] is not request
            or self._owner_preemptions[slot] != request.num_preemptions
        )
        known = 0 if is_new else self._num_pages_known[slot]
        if is_new:
            self._owner[slot] = request
            self._owner_preemptions[slot] = request.num_preemptions
            self._page_table[slot] = NULL_PAGE
            for name in self._settings:
                source = "seed" if name == "seeds" else name
                self._settings[name][slot] = getattr(request.sampling, source)
        if len(pages) > known:
            # An out-of-range page does not fail on a device, it corrupts: check it here.
            fresh = pages[known:]
            assert all(NULL_PAGE < page < self._num_pages for page in fresh), f"{fresh=}"
            self._page_table[slot, known : len(pages)] = fresh
            self._num_pages_known[slot] = len(pages)
