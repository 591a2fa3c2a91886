"""The packed buffer: where each array lies, what rows hold, and what padding is."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.bucket import Bucket
from scheduler.config import SchedulerConfig
from scheduler.packer import FROM_DEVICE, Packer, batch_fields, batch_words, views
from scheduler.page_pool import NULL_PAGE
from scheduler.request import Request, SamplingView
from scheduler.scheduler import PlanRow, StepPlan

SLOTS, J = 3, 4
CONFIG = SchedulerConfig(
    max_num_seqs=SLOTS,
    max_num_batched_tokens=8,
    prefill_chunk=8,
    page_size=4,
    num_pages=10,
    max_model_len=J * 4,
)
DECODE, MIXED = Bucket(4, 4, True), Bucket(8, 4, False)


def make() -> Packer:
    return Packer(CONFIG, [DECODE, MIXED])


def request(name: str, slot: int, pages: list[int], ids: list[int], **sampling) -> Request:
    r = Request(name, ids, SamplingView(max_tokens=9, **sampling))
    r.slot, r.page_ids = slot, pages
    return r


def plan_of(*rows: PlanRow) -> StepPlan:
    return StepPlan(list(rows), sum(row.num_tokens for row in rows))


def arrays(packer: Packer, *rows: PlanRow) -> dict[str, np.ndarray]:
    batch = packer.pack(plan_of(*rows))
    assert len(batch.buffer) == batch_words(batch.bucket, J)
    return views(batch.buffer, batch.bucket, J)


def lists(batch: dict[str, np.ndarray]) -> dict[str, list]:
    return {name: array.tolist() for name, array in batch.items()}


@pytest.mark.parametrize("bucket", [DECODE, MIXED, Bucket(512, 32, False)])
def test_the_fields_fill_the_buffer_without_gap_or_overlap(bucket):
    offset = 0
    for field in batch_fields(bucket, J).values():
        assert field.offset == offset
        offset += int(np.prod(field.shape))
        assert np.dtype(field.dtype).itemsize == 4
    assert offset == batch_words(bucket, J)


def test_decode_rows_and_a_chunk_with_their_padding():
    decoding = request("d", 2, [5, 7], [11, 12, 13, 14, 15])
    unknown = request("u", 0, [3], [21, 22])  # its third token is still on the device
    prompt = request("p", 1, [1, 9], [31, 32, 33, 34, 35, 36])
    batch = lists(
        arrays(
            make(),
            PlanRow(decoding, 4, 1, True, False),
            PlanRow(unknown, 2, 1, True, True),
            PlanRow(prompt, 2, 3, False, False),
        )
    )
    assert batch["token_ids"] == [15, FROM_DEVICE, 33, 34, 35, 0, 0, 0]
    assert batch["positions"] == [4, 2, 2, 3, 4, 0, 0, 0]
    assert batch["kv_lens"] == [5, 3, 5, 0]
    assert batch["cu_q_lens"] == [0, 1, 2, 5, 5]
    assert batch["distribution"] == [2, 3, 3]
    none = [NULL_PAGE] * J
    assert batch["page_indices"] == [[5, 7, 0, 0], [3, 0, 0, 0], [1, 9, 0, 0], none]
    assert batch["slots"] == [2, 0, SLOTS, SLOTS], "an unfinished prompt keeps no token"
    assert batch["sample_positions"] == [5, 3, 5, 0]


def test_settings_travel_bit_for_bit_and_rows_say_what_they_want():
    greedy = request("g", 0, [1], [5, 6])
    random = request("r", 1, [2], [5, 6], temperature=0.7, seed=2**32 - 1)
    cut = request(
        "c", 2, [3], [5, 6], temperature=1.0, top_k=7, top_p=0.9, min_p=0.1, num_logprobs=0
    )

    def packed(*requests):
        rows = [PlanRow(r, 1, 1, True, False) for r in requests]
        return lists(arrays(make(), *rows))

    assert packed(greedy)["wants"] == [0, 0, 0]
    assert packed(greedy, random)["wants"] == [1, 0, 0]
    batch = packed(greedy, random, cut)
    assert batch["wants"] == [1, 1, 1]
    assert batch["temperature"] == pytest.approx([0, 0.7, 1, 0])
    assert batch["seeds"] == [0, 2**32 - 1, 0, 0]
    assert batch["top_k"] == [0, 0, 7, 0]
    assert batch["top_p"][:3] == pytest.approx([1, 1, 0.9])
    assert batch["min_p"][:3] == pytest.approx([0, 0, 0.1])


def test_a_slots_new_owner_gets_its_own_pages_and_settings():
    packer = make()
    old = request("old", 0, [1, 2, 3], [5] * 12, temperature=0.5)
    arrays(packer, PlanRow(old, 11, 1, True, False))
    new = request("new", 0, [4], [6, 7])
    batch = lists(arrays(packer, PlanRow(new, 1, 1, True, False)))
    assert batch["page_indices"][0] == [4, 0, 0, 0]
    assert batch["temperature"][0] == 0


def test_a_request_that_was_preempted_comes_back_with_its_new_pages():
    packer = make()
    r = request("r", 0, [1, 2], [5] * 8)
    arrays(packer, PlanRow(r, 7, 1, True, False))
    r.num_preemptions, r.page_ids = 1, [8, 9]
    batch = lists(arrays(packer, PlanRow(r, 0, 8, True, False)))
    assert batch["page_indices"][0] == [8, 9, 0, 0]


def test_a_growing_request_adds_its_new_pages():
    packer = make()
    r = request("r", 0, [1], [5] * 4)
    arrays(packer, PlanRow(r, 3, 1, True, False))
    r.page_ids.append(6)
    batch = lists(arrays(packer, PlanRow(r, 4, 1, True, True)))
    assert batch["page_indices"][0] == [1, 6, 0, 0]


@pytest.mark.parametrize("page", [NULL_PAGE, -1, CONFIG.num_pages])
def test_a_page_out_of_range_is_caught_before_it_reaches_a_device(page):
    with pytest.raises(AssertionError, match="fresh"):
        arrays(make(), PlanRow(request("r", 0, [1, page], [5] * 8), 7, 1, True, False))


def test_the_batch_says_how_much_of_it_is_real():
    r = request("r", 0, [1], [5, 6, 7], num_logprobs=2)
    batch = make().pack(plan_of(PlanRow(r, 0, 3, True, False)))
    assert (batch.bucket, batch.num_tokens, batch.num_rows) == (MIXED, 3, 1)
    assert batch.wants_logprobs
    half = make().pack(plan_of(PlanRow(r, 0, 2, False, False)))
    assert not half.wants_logprobs, "nobody samples"
