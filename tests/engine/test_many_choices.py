"""Several choices of one request, on the real engine over the fake runner."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jserve.engine.async_engine import _takes_long
from jserve.engine.device import token_logprobs
from jserve.engine.input_processor import _seed32
from jserve.errors import InvalidRequest
from jserve.messages import GenerateRequest
from jserve.runner.sampling import Logprobs
from jserve.sampling_params import SamplingParams
from tests.engine.tiny import asking, run, tiny
from tests.fakes import VOCAB


def test_a_request_whose_first_choice_runs_has_started_and_meets_no_queue_deadline():
    t = tiny(max_num_seqs=2)
    t.engine.add(asking("a", [1, 2, 3], 10, n=3, queue_timeout_s=1.0))
    updates = t.engine.step()
    t.clock.now = 5.0
    updates += run(t.engine)
    ends = [u for u in updates if u.finish_reason]
    assert sorted((u.index, u.finish_reason) for u in ends) == [
        (0, "length"),
        (1, "length"),
        (2, "length"),
    ]
    assert [u.is_last for u in ends] == [False, False, True]
    t.assert_idle()


def test_an_abort_ends_all_choices_and_a_deadline_too():
    t = tiny()
    t.engine.add(asking("a", [1, 2, 3], 30, n=3))
    t.engine.add(asking("b", [4, 5], 30, n=2, timeout_s=1.0))
    t.engine.step()
    t.engine.abort("a")
    t.clock.now = 2.0
    updates = run(t.engine)
    last = [u for u in updates if u.is_last]
    assert [(u.request_id, u.finish_reason) for u in last] == [("b", "deadline")]
    assert updates.index(last[0]) == len(updates) - 1
    t.assert_idle()


def test_a_bad_word_with_a_token_that_the_model_lacks_never_comes_and_hurts_nobody():
    assert ord("z") >= VOCAB > ord("A")
    t = tiny()
    t.engine.add(asking("a", [1, 2], 8, bad_words=("z", "Az", "zA")))
    updates = run(t.engine)
    assert sum(len(u.token_ids) for u in updates) == 8
    t.assert_idle()


def test_what_limits_a_request_is_worked_out_once_for_all_choices():
    t = tiny()
    prepared = t.engine.processor.prepare(
        asking("a", [1], n=4, bad_words=("A", "BC"), min_tokens=3, allowed_token_ids=(65, 66))
    )
    first, *others = (choice.constraint for choice in prepared.choices)
    assert len(others) == 3
    for other in others:
        assert other is not first
        assert other._always is first._always
        assert other._bad_after is first._bad_after


@pytest.mark.parametrize("seed", [0, 5, 2**32 - 1, 2**32, -1, -(2**63), 2**64 - 9])
def test_choice_i_has_the_seed_plus_i(seed):
    prepared = tiny().engine.processor.prepare(asking("a", [1], n=4, seed=seed))
    found = [choice.request.sampling.seed for choice in prepared.choices]
    assert found == [_seed32(seed + i) for i in range(4)]
    assert len(set(found)) == 4


def test_small_seeds_are_taken_as_they_are_and_negative_ones_are_others():
    assert [_seed32(s) for s in (0, 1, 42, 2**32 - 1)] == [0, 1, 42, 2**32 - 1]
    seeds = {_seed32(s) for s in range(-50, 50)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_alternatives_that_cannot_come_are_left_out():
    top = np.array([[-0.1, -2.5, -np.inf, -np.inf]], np.float32)
    found = Logprobs(np.array([-0.1]), np.array([1]), np.array([[4, 7, 0, 1]]), top)
    entry = token_logprobs(4, 0, found, 4)
    assert [token_id for token_id, _ in entry.top] == [4, 7]
    assert all(math.isfinite(logprob) for _, logprob in entry.top)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"n": 2}, True),
        ({"best_of": 3}, True),
        ({"bad_words": ("a",)}, True),
        ({"allowed_token_ids": (1,)}, True),
    ],
)
def test_requests_that_take_long_to_prepare_leave_the_loop_of_streams_alone(fields, expected):
    message = GenerateRequest(prompt="hi", sampling=SamplingParams(**fields))
    assert _takes_long(message) == expected


def test_more_choices_than_are_ever_held_are_refused_and_not_asked_to_come_again():
    t = tiny(max_num_seqs=2, max_queued=2)
    with pytest.raises(InvalidRequest, match="n=5 is more than the 4 choices"):
        t.engine.add(asking("a", [1], n=5))
    t.engine.add(asking("a", [1], 3, n=4))
    assert len([u for u in run(t.engine) if u.finish_reason]) == 4


def test_a_prompt_is_counted_once_whatever_its_choices():
    t = tiny()
    t.engine.add(asking("a", list(range(1, 18)), 3, n=4))
    run(t.engine)
    assert t.value("prompt_tokens_total") == 17
    assert t.value("output_tokens_total") == 12
    assert t.value("prefix_cache_query_tokens_total") == 17


def test_only_the_ends_of_choices_say_how_many_others_live():
    t = tiny()
    t.engine.add(asking("one", [1, 2], 4))
    t.engine.add(asking("two", [3, 4], 4, n=2))
    updates = run(t.engine)
    assert not any(u.num_live_choices for u in updates if u.request_id == "one")
    assert [u.num_live_choices for u in updates if u.request_id == "two" and u.finish_reason] == [
        1,
        0,
    ]
    assert not any(u.num_live_choices for u in updates if not u.finish_reason)
