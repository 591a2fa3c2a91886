"""What is computed of a prompt that others have too: nothing twice, unless all is asked for."""

from __future__ import annotations

import pytest

from scheduler.policy import POLICIES
from scheduler.request import Request, RequestStatus, SamplingView
from scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler import PAGE, add, make, rows, turn


def caching(**changes) -> Scheduler:
    return make(enable_prefix_cache=True, **changes)


def add_looked_at(s: Scheduler, num_prompt: int, max_tokens: int = 20) -> Request:
    """A request for the log-probabilities of its prompt, which begins like those of `add`."""
    sampling = SamplingView(max_tokens, num_prompt_logprobs=0)
    request = Request("p", [ord("a") + i for i in range(num_prompt)], sampling)
    s.add(request)
    return request


@pytest.mark.parametrize("length", [1, PAGE, 2 * PAGE + 3, 5 * PAGE])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_choices_of_one_prompt_compute_its_full_pages_once(policy, length):
    s = caching(policy=policy, num_pages=1 + 40)
    choices = [add(s, "a", length, 6, arrival_time=0.0) for _ in range(4)]
    num_computed = 0
    while any(choice.status == RequestStatus.WAITING for choice in choices):
        num_computed += sum(row.num_tokens for row in turn(s).rows if not row.reads_last_token)
    shared = (length - 1) // PAGE * PAGE  # each computes its last token
    assert [choice.num_cached_tokens for choice in choices] == [0, shared, shared, shared]
    assert num_computed == length + 3 * (length - shared)
    tables = [s.slots.pages(choice)[: length // PAGE].tolist() for choice in choices]
    assert tables == 4 * tables[:1], "full pages are shared, also the last of an even prompt"


def test_O33_log_probabilities_of_a_prompt_are_computed_though_it_is_cached():
    s = caching()
    add(s, "a", 4 * PAGE, 1)
    turn(s)
    turn(s)
    cached = s.cache.held_pages()
    looked_at = add_looked_at(s, 4 * PAGE + 1)
    assert [rows(turn(s)) for _ in range(3)] == [[("p", 0, 8)], [("p", 8, 8)], [("p", 16, 1)]]
    assert looked_at.num_cached_tokens == 0
    assert set(cached) <= set(s.slots.pages(looked_at)), "what is there is shared all the same"


def test_O33_nobody_waits_for_pages_that_he_computes_anyway():
    s = caching(prefill_chunk=PAGE)
    add(s, "a", 3 * PAGE)
    add_looked_at(s, 3 * PAGE)
    assert rows(turn(s)) == [("a", 0, PAGE), ("p", 0, PAGE)]


def test_O33_a_prompt_that_was_looked_at_may_come_from_the_cache_once_there_is_output():
    s = caching()
    looked_at = add_looked_at(s, 3 * PAGE + 1)
    turn(s)
    s._preempt(looked_at, "test")
    assert rows(turn(s)) == [("p", 0, 8)], "its log-probabilities are still wanted"
    turn(s)
    assert looked_at.output_token_ids == [7]
    s._preempt(looked_at, "test")
    assert rows(turn(s)) == [("p", 3 * PAGE, 2)]
    assert looked_at.num_cached_tokens == 0


def test_pages_of_a_prompt_that_is_looked_at_serve_others():
    s = caching()
    add_looked_at(s, 3 * PAGE)
    turn(s)
    turn(s)
    other = add(s, "a", 3 * PAGE)
    turn(s)
    assert other.num_cached_tokens == 2 * PAGE
