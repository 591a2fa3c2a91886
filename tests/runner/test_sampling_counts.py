"""What the sampler keeps of each slot, on the real compiled programs: token counts for penalties
and last tokens, through chunks, preemption, slots used again, and logits that are no numbers."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.runner.runner import Runner, _count_row
from jserve.runner.sampling import IN_PROMPT, MAX_COUNT, count_tokens
from scheduler.config import SchedulerConfig
from scheduler.packer import BAD_TOKEN, History, Packer
from scheduler.request import Request, SamplingView
from scheduler.scheduler import Scheduler
from tests.runner.test_step import LIMITS, MIXED, SLOTS, SMALL, compiled_steps, make_runner

# Fewer pages than three requests grow into, so that they preempt each other.
TIGHT = replace(LIMITS, num_pages=9, prefill_chunk=4)
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.3}


@pytest.fixture(scope="module")
def compiled():
    return compiled_steps([SMALL, MIXED])


def counts_of(runner: Runner) -> np.ndarray:
    return np.asarray(runner.state.sampler.counts)


def expected_counts(request: Request, V: int) -> np.ndarray:
    counts = np.bincount(request.output_token_ids, minlength=V)
    counts[request.prompt_token_ids] += IN_PROMPT
    return counts


def serve(
    compiled, config: SchedulerConfig, requests: list[Request], check=lambda runner, sampled: None
):
    """Runs all requests to their ends; `check` sees the runner after each step, and the requests
    that have a token of it."""
    runner = make_runner(compiled)
    scheduler, packer = Scheduler(config), Packer(config, [SMALL, MIXED])
    for request in requests:
        scheduler.add(request)
    while scheduler.has_unfinished:
        plan = scheduler.schedule(0.0)
        handle = runner.dispatch(packer.pack(plan))
        runner.choose(handle)
        updates = scheduler.update(plan, handle.result().token_ids.tolist())
        check(runner, [request for request, *_ in updates])
    return runner


def requests_of(num: int, **sampling) -> list[Request]:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, 60, n).tolist() for n in rng.integers(1, 20, num)]
    return [
        Request(str(i), prompt, SamplingView(max_tokens=20, seed=i, **sampling))
        for i, prompt in enumerate(prompts)
    ]


def test_counts_are_those_of_prompt_and_output_after_every_step(compiled):
    """Seven requests in three slots: slots are used again, and preempted requests come back."""
    requests = requests_of(7, **PENALTIES)
    num_checked = 0

    def check(runner: Runner, sampled: list[Request]) -> None:
        nonlocal num_checked
        counts = counts_of(runner)
        for request in sampled:
            if not request.is_finished:
                expected = expected_counts(request, counts.shape[1])
                np.testing.assert_array_equal(counts[request.slot], expected)
                num_checked += 1

    serve(compiled, TIGHT, requests, check)
    assert num_checked > 50
    assert sum(request.num_preemptions for request in requests) > 0


def test_o25_penalised_requests_beside_others_say_what_they_say_alone(compiled):
    """Preempted, in slots that others without penalties have left, in both orders."""

    def mixed() -> list[Request]:
        plain, penalised = requests_of(6), requests_of(6, **PENALTIES)
        return [pair[i % 2] for i, pair in enumerate(zip(plain, penalised, strict=True))]

    alone = []
    for request in mixed():
        serve(compiled, LIMITS, [request])
        alone.append(request.output_token_ids)
    for order in (1, -1):
        together = mixed()
        serve(compiled, TIGHT, together[::order])
        assert [request.output_token_ids for request in together] == alone
    unpenalised = requests_of(6)
    serve(compiled, LIMITS, unpenalised)
    assert unpenalised[1].output_token_ids != alone[1], "the penalties have an effect"


def test_slots_that_are_not_in_the_batch_stay_as_they_are(compiled):
    runner = serve(compiled, LIMITS, [Request("a", [5, 6], SamplingView(4, **PENALTIES))])
    counts = counts_of(runner)
    used = [slot for slot in range(SLOTS) if counts[slot].any()]
    assert len(used) == 1
    assert (counts[used[0]] & MAX_COUNT).sum() == 4
    last_tokens = np.asarray(runner.state.sampler.last_tokens)
    assert not last_tokens[[slot for slot in range(SLOTS) if slot not in used]].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_without_numbers_gives_no_token_and_leaves_other_slots_alone(compiled, bad):
    """Hidden states that are no numbers give logits that are none, as a broken model would."""

    def start() -> tuple[Runner, list[Request], object]:
        runner, scheduler, packer = (
            make_runner(compiled),
            Scheduler(LIMITS),
            Packer(LIMITS, [SMALL, MIXED]),
        )
        requests = [
            Request(str(i), [9 + i, 4], SamplingView(3, **settings))
            for i, settings in enumerate([PENALTIES, {"temperature": 1.0}, PENALTIES])
        ]
        for request in requests:
            scheduler.add(request)
        return runner, requests, runner.dispatch(packer.pack(scheduler.schedule(0.0)))

    healthy, requests, handle = start()
    healthy.choose(handle)
    expected = handle.result().token_ids
    assert (expected[:3] >= 0).all()
    for broken in range(3):
        runner, requests, handle = start()
        rows = handle.hidden.rows.at[:, broken].set(bad)
        handle.hidden = handle.hidden._replace(rows=rows)
        runner.choose(handle)
        found = handle.result().token_ids
        others = [row for row in range(3) if row != broken]
        assert found[broken] == BAD_TOKEN
        np.testing.assert_array_equal(found[others], expected[others])
        slots = [requests[row].slot for row in others]
        for mine, clean in zip(runner.state.sampler, healthy.state.sampler, strict=True):
            np.testing.assert_array_equal(np.asarray(mine)[slots], np.asarray(clean)[slots])


def test_counts_stop_at_their_largest_value_and_keep_the_prompts_mark():
    full, fuller = MAX_COUNT, IN_PROMPT + MAX_COUNT
    counts = jnp.array([[full, fuller, full - 1], [IN_PROMPT, 0, 7]], jnp.int16)
    count = jax.jit(count_tokens, donate_argnums=0)
    for token_id in range(3):
        counts = count(counts, jnp.array([0]), jnp.array([token_id]))
    np.testing.assert_array_equal(counts, [[full, fuller, full], [IN_PROMPT, 0, 7]])
    assert fuller == np.iinfo(np.int16).max


def test_a_long_history_is_counted_up_to_the_largest_value():
    row = _count_row(History(0, [1, 1, 2], [2] * (MAX_COUNT + 5) + [3]), 5)
    np.testing.assert_array_equal(row, [0, IN_PROMPT, IN_PROMPT + MAX_COUNT, 1, 0])
    assert row.dtype == np.int16
