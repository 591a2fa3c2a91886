"""What a client hears of a request's choices: all as they come, or the best when all have ended.

Rows of public fault reports: O31 (choices each once, with their own ends; usage is the sum).
"""

from __future__ import annotations

from itertools import permutations

import pytest

from jserve.engine.choices import Choices
from jserve.errors import RequestFailed
from jserve.messages import RequestUpdate, TokenLogprobs, Usage
from jserve.sampling_params import SamplingParams

# By index: the log-probability of each token. Index 2 has the best mean, 1 the best sum.
OUTPUTS = {0: [-1.0, -3.0], 1: [-1.5], 2: [-0.5, -1.5, -1.0], 3: [-2.0] * 4}


def updates_of(index: int, with_prompt: bool = True) -> list[RequestUpdate]:
    """One update per token; the first has the prompt, the last the end."""
    logprobs = OUTPUTS[index]
    last = len(logprobs) - 1
    return [
        RequestUpdate(
            request_id="r",
            index=index,
            text=f"{index}{i} ",
            token_ids=(10 * index + i,),
            logprobs=(TokenLogprobs(10 * index + i, value, ()),),
            prompt_token_ids=(7, 8) if with_prompt and i == 0 else (),
            prompt_logprobs=(None, TokenLogprobs(8, -0.1, ())) if index == i == 0 else (),
            finish_reason=("length" if index == 3 else "stop") if i == last else None,
            usage=Usage(2, len(logprobs), 1) if i == last else None,
        )
        for i, value in enumerate(logprobs)
    ]


def take_all(sampling: SamplingParams, order: tuple[int, ...]) -> list[list[RequestUpdate]]:
    """Returns what each update leads to, the choices taking turns in `order`."""
    choices = Choices("r", sampling, len(order))
    queues = {index: updates_of(index) for index in order}
    heard = []
    while any(queues.values()):
        for index in order:
            if queues[index]:
                heard.append(choices.take(queues[index].pop(0)))
    return heard


def test_o31_each_choice_is_heard_as_it_comes_and_the_last_end_is_the_requests():
    heard = take_all(SamplingParams(n=4), (0, 1, 2, 3))
    assert all(len(updates) == 1 for updates in heard)
    updates = [update for (update,) in heard]
    for index in range(4):
        mine = [update for update in updates if update.index == index]
        assert [update.text for update in mine] == [u.text for u in updates_of(index)]
        assert [update.finish_reason is not None for update in mine] == [False] * (
            len(mine) - 1
        ) + [True]
    ends = [update.num_live_choices for update in updates if update.finish_reason]
    assert ends == [3, 2, 1, 0]
    assert [update.is_last for update in updates] == [False] * (len(updates) - 1) + [True]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_the_best_choices_by_mean_log_probability_come_when_all_have_ended(order):
    *before, best = take_all(SamplingParams(n=2, best_of=4, logprobs=0), order)
    assert not any(before)
    assert [update.token_ids for update in best] == [(20, 21, 22), (10,)]
    assert [update.text for update in best] == ["20 21 22 ", "10 "]
    assert [[e.logprob for e in update.logprobs] for update in best] == [OUTPUTS[2], OUTPUTS[1]]
    assert [update.index for update in best] == [0, 1]
    assert [update.finish_reason for update in best] == ["stop", "stop"]
    assert [update.is_last for update in best] == [False, True]
    assert [update.prompt_token_ids for update in best] == [(7, 8), ()]
    assert [len(update.prompt_logprobs) for update in best] == [2, 0]


def test_usage_has_every_token_that_was_generated():
    *_, best = take_all(SamplingParams(n=2, best_of=4), (3, 1, 0, 2))
    assert Usage.of_choices([update.usage for update in best]) == Usage(2, 2 + 1 + 3 + 4, 1)
    everything = [u for (u,) in take_all(SamplingParams(n=4), (0, 1, 2, 3)) if u.usage]
    assert Usage.of_choices([update.usage for update in everything]) == Usage(2, 10, 1)


def test_log_probabilities_that_only_the_ranking_needed_are_not_given_out():
    *_, best = take_all(SamplingParams(n=4, best_of=4), (0, 1, 2, 3))
    assert [update.logprobs for update in best] == [()] * 4
    assert [update.token_ids[0] for update in best] == [20, 10, 0, 30], "equal means keep order"


def test_an_error_is_heard_at_once_even_of_choices_that_are_held_back():
    choices = Choices("r", SamplingParams(n=1, best_of=3), 3)
    for update in updates_of(1):
        assert choices.take(update) == []
    assert choices.take(updates_of(0)[0]) == []
    choices.num_live -= 1  # the engine has ended the third one with it
    failed = RequestUpdate(
        request_id="r", index=0, finish_reason="error", error=RequestFailed("no numbers")
    )
    assert choices.take(failed) == [failed]
    assert failed.is_last
