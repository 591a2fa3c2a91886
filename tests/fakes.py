"""A runner without a device: it stores token ids where a real one stores keys and values, and
derives each next token from what it reads back, so that any fault in a page table becomes a wrong
token."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from scheduler.config import SchedulerConfig
from scheduler.packer import FROM_DEVICE, PackedBatch, batch_fields, sampling_fields, views

VOCAB = 97


def next_token(token_ids: Sequence[int]) -> int:
    """The fake model: depends on every token and its position."""
    ids = np.asarray(token_ids, np.int64)
    weights = np.arange(1, len(ids) + 1, dtype=np.int64)
    return int((ids * weights + 7).sum() % VOCAB)


def expected_output(prompt: Sequence[int], count: int, stop: frozenset[int] = frozenset()):
    """What any correct engine generates with the fake model."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
        if ids[-1] in stop:
            break
    return ids[len(prompt) :]


class FakeRunner:
    """Runs packed batches on numpy pages i32[P, p]. -9 marks what was never written."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.forget()
        self.num_steps = 0
        self.num_tokens = 0
        self.inputs: deque[PackedBatch] = deque(maxlen=64)

    def forget(self) -> None:
        config = self.config
        self.pages = np.full((config.num_pages, config.page_size), -9, np.int32)
        self.host_pages = np.full((config.num_host_pages, config.page_size), -9, np.int32)
        self.last_tokens = np.zeros(config.max_num_seqs + 1, np.int32)

    def run(self, packed: PackedBatch) -> np.ndarray:
        fields = batch_fields(packed.bucket, self.config.max_pages_per_seq)
        batch = views(packed.buffer, fields)
        kept_in = np.full(packed.bucket.num_rows, self.config.max_num_seqs, np.int32)
        if packed.sampling is not None:
            kept_in = views(packed.sampling, sampling_fields(packed.bucket.num_rows))["slots"]
        self.num_steps += 1
        self.num_tokens += packed.num_tokens
        self.inputs.append(packed)
        for page, host_page in packed.copies_out:
            self.host_pages[host_page] = self.pages[page]
        for host_page, page in packed.copies_in:
            self.pages[page] = self.host_pages[host_page]
        p = self.config.page_size
        sampled = np.zeros(packed.bucket.num_rows, np.int32)
        for row in range(packed.num_rows):
            begin, end = batch["cu_q_lens"][row : row + 2]
            kv_len, pages = int(batch["kv_lens"][row]), batch["page_indices"][row]
            slot = int(batch["slots"][row])
            for t in range(begin, end):
                position = int(batch["positions"][t])
                assert position == kv_len - (end - t)
                token = int(batch["token_ids"][t])
                if token == FROM_DEVICE:
                    token = int(self.last_tokens[slot])
                assert pages[position // p] > 0, "a real token was written to the null page"
                self.pages[pages[position // p], position % p] = token
            held = [int(self.pages[pages[i // p], i % p]) for i in range(kv_len)]
            sampled[row] = next_token(held)
            self.last_tokens[kept_in[row]] = sampled[row]
        return sampled
