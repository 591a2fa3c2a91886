"""Fault reports about length limits, on the real engine: offline and over gRPC."""

from __future__ import annotations

import asyncio

import pytest

from jserve.errors import InvalidRequest
from jserve.llm import LLM
from jserve.messages import GenerateRequest
from tests.e2e.chain_model import VOCAB
from tests.e2e.real_engine import (
    BUDGET,
    GREEDY,
    PAGE,
    alone,
    arranged,
    assert_balanced,
    generate,
    greedy,
    prompt_of,
    serving_real,
    tokens_of,
)

LIMIT = 128
NEIGHBOURS = [prompt_of(20, 1), prompt_of(35, 2)]


@pytest.fixture
def engine():
    engine = arranged(max_model_len=LIMIT)
    yield engine
    assert_balanced(engine)


def asking(prompt, max_tokens: int) -> GenerateRequest:
    return GenerateRequest(prompt_token_ids=prompt, sampling=greedy(max_tokens))


async def refused_among_neighbours(bad: GenerateRequest, remedy: str) -> None:
    """The bad request is refused in both modes while two others decode, which do not notice."""
    wanted = [alone(prompt, greedy(60)) for prompt in NEIGHBOURS]
    async with serving_real(arranged(max_model_len=LIMIT)) as s:
        others = [s.client.stream(asking(prompt, 60)) for prompt in NEIGHBOURS]
        firsts = [await anext(other) for other in others]  # both have begun
        with pytest.raises(InvalidRequest, match=remedy):
            await s.client.generate(bad)
        with pytest.raises(InvalidRequest, match=remedy):
            await anext(s.client.stream(bad))
        for first, other, want in zip(firsts, others, wanted, strict=True):
            rest = [i async for update in other for i in update.token_ids]
            assert [*first.token_ids, *rest] == want
        canary = await s.client.generate(asking(NEIGHBOURS[0], 8))
        assert list(canary.token_ids) == wanted[0][:8]


@pytest.mark.parametrize("length", [LIMIT + 1, 10 * LIMIT])
async def test_O17_an_over_long_prompt_is_refused_and_others_go_on(length):
    await refused_among_neighbours(asking(prompt_of(length), 1), f"max_model_len={LIMIT}")


@pytest.mark.parametrize("bad", [VOCAB, -1, 2**40])
async def test_O21_an_id_outside_the_vocabulary_is_refused_and_others_go_on(bad):
    remedy = rf"prompt_token_ids\[3\]={bad}.*0 to {VOCAB - 1}"
    await refused_among_neighbours(asking([1, 2, 3, bad, 5], 4), remedy)


def test_O21_the_last_id_of_the_vocabulary_is_one(engine):
    assert len(tokens_of(generate(engine, [[VOCAB - 1]]))[0]) == GREEDY.max_tokens


async def test_O18_the_limit_is_exact_on_the_wire():
    async with serving_real(arranged(max_model_len=LIMIT)) as s:
        fits = await s.client.generate(asking(prompt_of(LIMIT - 1), 1))
        assert (len(fits.token_ids), fits.finish_reason) == (1, "length")
        with pytest.raises(InvalidRequest, match=f"use at most {LIMIT - 1}"):
            await s.client.generate(asking(prompt_of(LIMIT), 1))
        with pytest.raises(InvalidRequest, match="max_tokens of at most 5"):
            await s.client.generate(asking(prompt_of(LIMIT - 5), 6))
        fits = await s.client.generate(asking(prompt_of(LIMIT - 5), 5))
        assert len(fits.token_ids) == 5


def test_O18_the_last_place_before_the_limit_holds_the_right_token(engine):
    (output,) = generate(engine, [prompt_of(LIMIT - 1)], greedy(1))
    assert output.outputs[0].token_ids == alone(prompt_of(LIMIT - 1), greedy(1))


def test_O19_no_max_tokens_runs_to_the_limit(engine):
    (output,) = generate(engine, [prompt_of(100)], greedy(None))
    assert len(output.outputs[0].token_ids) == LIMIT - 100
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("prompts", ["", [""], [], [[]]])
def test_O20_an_empty_prompt_is_refused_offline_and_the_next_is_served(engine, prompts):
    with pytest.raises(InvalidRequest, match="empty"):
        generate(engine, prompts)
    assert tokens_of(generate(engine, [[7, 8]])) == [alone([7, 8])]


async def test_O20_an_empty_prompt_is_refused_on_the_wire_and_the_next_is_served():
    async with serving_real(arranged()) as s:
        for empty in ({"prompt": ""}, {"prompt_token_ids": []}, {"messages": []}):
            with pytest.raises(InvalidRequest, match=r"empty|at least one"):
                await s.client.generate(GenerateRequest(**empty, sampling=GREEDY))
        whole = await s.client.generate(asking([7, 8], 8))
        assert list(whole.token_ids) == alone([7, 8])


@pytest.mark.parametrize(
    ("what", "prompt"),
    [
        ("one token", [9]),
        ("page-aligned", prompt_of(2 * PAGE, 3)),
        ("chunked", prompt_of(3 * BUDGET + 5, 4)),
        ("wholly cached", prompt_of(2 * PAGE, 5)),
    ],
)
def test_O22_max_tokens_1_gives_exactly_one_token(what, prompt):
    engine = arranged()
    want = alone(prompt, greedy(1))
    if what == "wholly cached":
        generate(engine, [prompt], greedy(PAGE + 2))
    outputs = generate(engine, [prompt] * 6, greedy(1))
    assert tokens_of(outputs) == [want] * 6
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}
    if what == "wholly cached":
        assert outputs[0].num_cached_tokens == PAGE
    assert_balanced(engine)


def test_O23_an_over_long_chat_is_refused_and_never_cut(engine):
    llm = LLM.from_engine(engine)
    chat = [
        {"role": "system", "content": "You answer in rhymes."},
        *({"role": "user", "content": f"turn {i} of many"} for i in range(12)),
    ]
    with pytest.raises(InvalidRequest, match=f"prompt 0: .*max_model_len={LIMIT}"):
        llm.chat(chat, GREEDY)
    (output,) = llm.chat(chat[:3], GREEDY)
    text = "system:You answer in rhymes.;user:turn 0 of many;user:turn 1 of many;>"
    assert bytes(output.prompt_token_ids).decode() == text


async def test_O23_an_over_long_chat_is_refused_on_the_wire():
    chat = [{"role": "user", "content": "x" * LIMIT}]
    async with serving_real(arranged(max_model_len=LIMIT)) as s:
        with pytest.raises(InvalidRequest, match=f"max_model_len={LIMIT}"):
            await s.client.generate(GenerateRequest(messages=chat, sampling=GREEDY))
        await asyncio.gather(*(s.client.generate(asking([i + 1], 2)) for i in range(4)))
