"""Every family through the real paged step: the logits of all positions are those of transformers,
whatever the chunks, the page size, the loop over layers and the prefix cache.

Rows of public fault reports: O79 (sliding window, across its edge, chunked and from the cache),
O104 (queries and keys of different lengths).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.e2e.paged import MAX_TOKENS, PagedModel
from tests.models.reference import NAMES, reference_model

TOLERANCE = 1e-4
CHUNKS = [1, 7, 16, MAX_TOKENS]
# these five cover all that a family can change in the step
REPRESENTATIVE = ("llama", "mistral_window", "qwen3", "gemma2", "gemma3")
WINDOWED = [n for n in NAMES if any(reference_model(n).config.sliding_windows)]
OF_EACH_KIND = sorted({*REPRESENTATIVE, *WINDOWED})

reference_model = cache(reference_model)


@cache
def paged_models(name: str, page_size: int, loop: str) -> list[tuple[PagedModel, tuple]]:
    """The model with the reference sequences that it is right for: all, but under dynamic rope
    one model per sequence, as there the frequencies depend on the longest length served."""
    model = reference_model(name)
    params = model.params(stacked=loop == "scanned")
    make = lambda config: PagedModel(params, config, page_size=page_size, loop=loop)  # noqa: E731
    if model.config.rope.kind != "dynamic":
        return [(make(model.config), model.sequences)]
    return [(make(replace(model.config, max_position=len(s.ids))), (s,)) for s in model.sequences]


def check_all_positions(name, chunk, page_size=8, loop="switched"):
    for model, sequences in paged_models(name, page_size, loop):
        answers = model.run(
            model.scheduler(chunk), [s.ids for s in sequences], [1] * len(sequences)
        )
        for answer, sequence in zip(answers, sequences, strict=True):
            assert np.abs(answer.logits - sequence.logits).max() < TOLERANCE


def some_fast(names):
    """All of `names`, those that --quick leaves out marked."""
    return [
        name if name in REPRESENTATIVE else pytest.param(name, marks=pytest.mark.slow)
        for name in names
    ]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", some_fast(NAMES))
def test_logits_of_every_position_are_those_of_transformers(name, chunk):
    check_all_positions(name, chunk)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [7, 16])
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_larger_pages_give_the_same_logits(name, chunk):
    check_all_positions(name, chunk, page_size=16)


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["unrolled", "scanned"])
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_every_loop_over_layers_gives_the_same_logits(name, loop):
    """The rest of the models meet these loops, without pages, in tests/models/test_decoder.py."""
    for chunk in (1, 7):  # one program each
        check_all_positions(name, chunk, loop=loop)


@pytest.mark.parametrize("name", some_fast(n for n in NAMES if "rope" not in n))
def test_greedy_decoding_in_pages_is_that_of_transformers(name):
    """Rope-scaled references have no greedy part: see scripts/make_reference_models.py."""
    [(model, sequences)] = paged_models(name, 8, "switched")
    prompts = [s.ids[: s.num_prompt] for s in sequences]
    counts = [len(s.ids) - s.num_prompt for s in sequences]
    for answer, s in zip(model.run(model.scheduler(7), prompts, counts), sequences, strict=True):
        assert answer.token_ids == s.ids.tolist()
        assert np.abs(answer.logits - s.logits[:-1]).max() < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 7, MAX_TOKENS])
@pytest.mark.parametrize("name", some_fast(WINDOWED))
def test_windows_look_back_into_cached_pages(name, chunk):  # O79
    """The second run computes only what follows the cached pages, whose keys it has to find on
    both sides of the window's edge; decoding goes on across it."""
    [(model, sequences)] = paged_models(name, 8, "switched")
    scheduler = model.scheduler(chunk)
    everything = [s.ids for s in sequences]
    model.run(scheduler, everything, [1] * len(everything))
    for s in sequences:
        for num_prompt in {s.num_prompt, max(1, len(s.ids) // 2), len(s.ids) - 1}:
            ids, num_new = s.ids[:num_prompt], len(s.ids) - num_prompt
            [answer] = model.run(scheduler, [ids], [num_new])
            cached = answer.num_cached_tokens
            assert cached == (num_prompt - 1) // 8 * 8
            assert np.isnan(answer.logits[:cached]).all()
            rest = np.abs(answer.logits[cached:num_prompt] - s.logits[cached:num_prompt])
            assert rest.max() < TOLERANCE
            if num_prompt >= s.num_prompt:  # what follows is greedy in the reference too
                assert answer.token_ids == s.ids.tolist()


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_O104_a_prompt_has_the_same_logits_in_chunks_as_in_one_step(name, chunk):
    [(model, _)] = paged_models(name, 8, "switched")
    prompt = np.random.default_rng(104).integers(0, model.config.vocab_size, 90)
    [whole] = model.run(model.scheduler(MAX_TOKENS), [prompt], [1])
    [parts] = model.run(model.scheduler(chunk), [prompt], [1])
    assert parts.token_ids == whole.token_ids
    assert np.abs(parts.logits - whole.logits).max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_preempted_sequences_have_the_same_logits(name):
    [(model, sequences)] = paged_models(name, 8, "switched")
    longest = sequences[-1]
    prompts = [longest.ids[: longest.num_prompt]] * 3
    num_usable = 5 * 3 + 2  # three prompts fit, their continuations do not
    scheduler = model.scheduler(16, num_pages=num_usable + 1)
    scheduler.cache.enabled = False
    count = len(longest.ids) - longest.num_prompt
    answers = model.run(scheduler, prompts, [count] * 3)
    assert scheduler.num_preemptions > 0
    for answer in answers:
        assert answer.token_ids == longest.ids.tolist()
        assert np.abs(answer.logits - longest.logits[:-1]).max() < TOLERANCE


def test_a_larger_bucket_is_taken_where_the_exact_one_is_absent():
    """Two shapes serve every step above: one row of one token runs in the bucket of four."""
    [(model, sequences)] = paged_models("llama", 8, "switched")
    [answer] = model.run(model.scheduler(1), [sequences[0].ids], [1])
    assert np.abs(answer.logits - sequences[0].logits).max() < TOLERANCE
