"""The packed buffer: where each array lies, what rows hold, and what padding is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from scheduler.bucket import Bucket
from scheduler.config import SchedulerConfig
from scheduler.packer import (
    FROM_DEVICE,
    MAX_LOGIT_BIAS,
    Packer,
    Wants,
    batch_fields,
    num_words,
    sampling_fields,
    views,
)
from scheduler.page_pool import NULL_PAGE
from scheduler.plan import StepPlan
from scheduler.request import Request, SamplingView
from scheduler.step_shape import StepShape

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


class Row(NamedTuple):
    """A request in a slot with its pages, and what of it is in the step."""

    slot: int
    pages: list[int]
    ids: list[int]
    start: int
    num_tokens: int
    samples: bool = True
    decodes: bool = False
    sampling: dict = {}  # noqa: RUF012


def plan_of(*rows: Row) -> StepPlan:
    table = np.zeros((SLOTS, J), np.int32)
    for row in rows:
        table[row.slot, : len(row.pages)] = row.pages
    requests = [
        Request(f"r{row.slot}", row.ids, SamplingView(max_tokens=9, **row.sampling)) for row in rows
    ]
    num_decodes = sum(row.decodes for row in rows)
    assert all(row.decodes for row in rows[:num_decodes]), "decode rows come first"
    num_tokens = sum(row.num_tokens for row in rows)
    return StepPlan(
        requests,
        np.array([row.slot for row in rows]),
        np.array([row.start for row in rows]),
        np.array([row.num_tokens for row in rows]),
        np.array([row.samples for row in rows]),
        num_decodes,
        table,
        StepShape(len(rows), num_tokens, 0, 0, 0),
    )


def arrays(packer: Packer, *rows: Row) -> dict[str, np.ndarray]:
    batch = packer.pack(plan_of(*rows))
    return views(batch.buffer, batch_fields(batch.bucket, J))


def sampling(packer: Packer, *rows: Row) -> dict[str, np.ndarray]:
    batch = packer.pack(plan_of(*rows))
    assert batch.sampling is not None, "no row samples"
    return views(batch.sampling, sampling_fields(batch.bucket.num_rows))


def lists(batch: dict[str, np.ndarray]) -> dict[str, list]:
    return {name: array.tolist() for name, array in batch.items()}


@pytest.mark.parametrize("bucket", [DECODE, MIXED, Bucket(512, 32, False)])
def test_the_fields_fill_the_buffer_without_gap_or_overlap(bucket):
    for fields in (batch_fields(bucket, J), sampling_fields(bucket.num_rows)):
        offset = 0
        for field in fields.values():
            assert field.offset == offset
            offset += int(np.prod(field.shape))
            assert np.dtype(field.dtype).itemsize == 4
        assert offset == num_words(fields)


def test_decode_rows_and_chunks_with_their_padding():
    decoding = Row(0, [3], [21, 22], 2, 1, decodes=True)  # its third token is on the device
    last = Row(2, [5, 7], [11, 12, 13, 14, 15], 4, 1)  # the last piece of a prompt
    prompt = Row(1, [1, 9], [31, 32, 33, 34, 35, 36], 2, 3, samples=False)
    batch = lists(arrays(make(), decoding, last, prompt))
    settings = lists(sampling(make(), decoding, last, prompt))
    assert batch["token_ids"] == [FROM_DEVICE, 15, 33, 34, 35, 0, 0, 0]
    assert batch["positions"] == [2, 4, 2, 3, 4, 0, 0, 0]
    assert batch["kv_lens"] == [3, 5, 5, 0]
    assert batch["cu_q_lens"] == [0, 1, 2, 5, 5]
    assert batch["distribution"] == [2, 3, 3]
    none = [NULL_PAGE] * J
    assert batch["page_indices"] == [[3, 0, 0, 0], [5, 7, 0, 0], [1, 9, 0, 0], none]
    assert batch["slots"] == [0, 2, 1, SLOTS]
    assert settings["slots"] == [0, 2, SLOTS, SLOTS], "an unfinished prompt keeps no token"
    assert settings["sample_positions"] == [3, 5, 5, 0]


def test_a_chunk_that_reaches_beyond_the_prompt_has_the_generated_ids():
    plan = plan_of(Row(0, [1, 2], [5, 6, 7], 1, 4))
    plan.requests[0].output_token_ids += [8, 9]
    batch = make().pack(plan)
    assert views(batch.buffer, batch_fields(batch.bucket, J))["token_ids"][:4].tolist() == [
        6,
        7,
        8,
        9,
    ]


def test_settings_travel_bit_for_bit_and_rows_say_what_they_want():
    greedy = Row(0, [1], [5, 6], 1, 1)
    random = Row(1, [2], [5, 6], 1, 1, sampling={"temperature": 0.7, "seed": 2**32 - 1})
    cut = {"temperature": 1.0, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "num_logprobs": 0}
    cut = Row(2, [3], [5, 6], 1, 1, sampling=cut)

    def packed(*rows):
        return lists(sampling(make(), *rows))

    assert packed(greedy)["wants"] == [0]
    assert packed(greedy, random)["wants"] == [Wants.RANDOM]
    batch = packed(greedy, random, cut)
    assert batch["wants"] == [Wants.RANDOM | Wants.TRUNCATION | Wants.LOGPROBS]
    assert batch["temperature"] == pytest.approx([0, 0.7, 1, 0])
    assert batch["seed"] == [0, 2**32 - 1, 0, 0]
    assert batch["top_k"] == [0, 0, 7, 0]
    assert batch["top_p"][:3] == pytest.approx([1, 1, 0.9])
    assert batch["min_p"][:3] == pytest.approx([0, 0, 0.1])


def test_a_decode_row_keeps_the_settings_with_which_its_request_began():
    packer = make()
    arrays(packer, Row(0, [1], [5, 6], 0, 2, sampling={"temperature": 0.5}))
    batch = lists(sampling(packer, Row(0, [1], [5, 6], 2, 1, decodes=True)))
    assert batch["temperature"][0] == pytest.approx(0.5)


def test_a_slots_new_owner_gets_its_own_settings():
    packer = make()
    arrays(packer, Row(0, [1, 2, 3], [5] * 12, 11, 1, sampling={"temperature": 0.5}))
    assert arrays(packer, Row(0, [4], [6, 7], 1, 1))["page_indices"][0].tolist() == [4, 0, 0, 0]
    assert sampling(packer, Row(0, [4], [6, 7], 1, 1))["temperature"][0] == 0


@pytest.mark.parametrize("page", [NULL_PAGE, -1, CONFIG.num_pages])
@pytest.mark.parametrize("decodes", [True, False])
def test_a_page_out_of_range_is_caught_before_it_reaches_a_device(page, decodes):
    with pytest.raises(AssertionError, match="pages"):
        arrays(make(), Row(0, [1, page], [5] * 8, 7, 1, decodes=decodes))


def test_the_batch_says_how_much_of_it_is_real_and_what_moves_before_it():
    plan = plan_of(Row(0, [1], [5, 6, 7], 0, 3, sampling={"num_logprobs": 2}))
    plan.copies_out, plan.copies_in = np.array([[4, 0]]), np.array([[1, 5]])
    batch = make().pack(plan)
    assert (batch.bucket, batch.num_tokens, batch.num_rows) == (MIXED, 3, 1)
    assert (batch.copies_out.tolist(), batch.copies_in.tolist()) == ([[4, 0]], [[1, 5]])
    assert batch.wants == Wants.LOGPROBS
    half = Row(0, [1], [5, 6, 7], 0, 2, samples=False, sampling={"num_logprobs": 2})
    assert not make().pack(plan_of(half)).wants
    assert make().pack(plan_of(half)).sampling is None, "nobody samples"


def test_what_only_some_rows_ask_for_comes_with_the_batch_and_in_their_rows():
    plain = Row(0, [1], [5, 6], 1, 1)
    biased = Row(1, [2], [5, 6], 1, 1, sampling={"logit_bias": ((7, 2.5), (3, -1.0))})
    packer = make()
    assert packer.pack(plan_of(plain)).bias is None
    bias = packer.pack(plan_of(plain, biased)).bias
    assert bias.ids.shape == bias.values.shape == (4, MAX_LOGIT_BIAS)
    assert bias.ids[1, :3].tolist() == [7, 3, 0]
    assert bias.values[1, :3].tolist() == [2.5, -1.0, 0]
    assert not bias.values[[0, 2, 3]].any()
    masked = Row(2, [3], [5, 6], 1, 1, sampling={"is_constrained": True})
    assert packer.pack(plan_of(masked)).wants == Wants.MASK


def test_penalties_begin_with_the_tokens_that_the_host_knows():
    plan = plan_of(Row(2, [1, 2], [5, 6, 7], 1, 4, sampling={"presence_penalty": 0.5}))
    plan.requests[0].output_token_ids += [8, 9]
    packer = make()
    assert [tuple(h) for h in packer.pack(plan).histories] == [(2, [5, 6, 7], [8, 9])]
    decoding = Row(2, [1, 2], [5, 6, 7], 5, 1, decodes=True, sampling={"presence_penalty": 0.5})
    assert list(packer.pack(plan_of(decoding)).histories) == []


def test_prompt_pieces_name_the_token_after_each_of_theirs():
    scored = {"num_prompt_logprobs": 0}
    decoding = Row(0, [3], [21, 22], 2, 1, decodes=True)
    middle = Row(1, [1], [31, 32, 33, 34], 0, 2, samples=False, sampling=scored)
    end = Row(2, [2], [41, 42, 43], 1, 2, sampling=scored)
    pieces = make().pack(plan_of(decoding, middle, end)).prompt_pieces
    found = [(p.row, p.first, p.target_ids.tolist()) for p in pieces]
    assert found == [(1, 1, [32, 33]), (2, 3, [43])]
    again = plan_of(end)  # after a preemption: its prompt has been rated
    again.requests[0].num_output_tokens = 1
    assert list(make().pack(again).prompt_pieces) == []


def test_pooled_rows_are_all_tokens_for_a_mean_and_the_end_of_the_prompt_for_the_last():
    decoding = Row(0, [3], [21, 22], 2, 1, decodes=True)
    plain = Row(1, [1], [31, 32], 0, 2)
    middle = Row(2, [2], [41, 42, 43], 0, 2, samples=False, sampling={"pooling": "last"})
    mean = Row(1, [1], [51, 52, 53], 1, 2, samples=False, sampling={"pooling": "mean"})
    end = Row(2, [2], [61, 62, 63], 1, 2, samples=False, sampling={"pooling": "last"})
    packer = make()
    packed = packer.pack(plan_of(decoding, mean, end))
    assert packed.pooled_rows.dtype == np.int32
    assert len(packed.pooled_rows) == max(bucket.num_tokens for bucket in packer.buckets)
    assert packed.pooled_rows.tolist() == [-1, 1, 1, -1, 2, -1, -1, -1]
    assert packer.pack(plan_of(decoding, plain)).pooled_rows is None
    assert packer.pack(plan_of(middle)).pooled_rows is None


def test_a_pooled_row_of_one_token_keeps_the_states_of_tokens():
    one = Row(0, [3], [21], 0, 1, samples=False, sampling={"pooling": "last"})
    packed = make().pack(plan_of(one))
    assert not packed.bucket.decode_only
    assert packed.pooled_rows[:2].tolist() == [0, -1]
    assert packed.sampling is None
