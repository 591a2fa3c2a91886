"""Fault reports about scheduling on tight pools, on the real engine: everybody ends, with the
tokens that each would get alone."""

from __future__ import annotations

import random

import pytest

from jserve.errors import InvalidRequest
from jserve.messages import GenerateRequest
from tests.e2e.real_engine import (
    BUDGET,
    PAGE,
    SLOTS,
    alone,
    arranged,
    assert_balanced,
    generate,
    greedy,
    prompt_of,
    serving_real,
    tokens_of,
    value,
)
from tests.engine.tiny import joined, run

BOTH = pytest.mark.parametrize("overlap", [True, False])


def asking(name: str, prompt, max_tokens: int, priority: int = 0) -> GenerateRequest:
    return GenerateRequest(
        prompt_token_ids=prompt,
        sampling=greedy(max_tokens),
        request_id=name,
        priority=priority,
    )


def test_O39_what_exceeds_the_pool_is_refused_and_blocks_nobody():
    engine = arranged(num_pages=1 + 8, max_model_len=512)  # 128 tokens
    for prompt, max_tokens in ((prompt_of(200), 1), (prompt_of(100), 300)):
        with pytest.raises(InvalidRequest, match="the whole pool holds 128 tokens"):
            engine.add(asking("big", prompt, max_tokens))
    want = alone([1, 2, 3])
    assert tokens_of(generate(engine, [[1, 2, 3]])) == [want]
    (output,) = generate(engine, [prompt_of(100)], greedy(None))
    assert len(output.outputs[0].token_ids) == 28
    assert_balanced(engine)


@pytest.mark.parametrize("cached", [False, True])
def test_O40_two_prompts_that_do_not_fit_together_both_finish(cached):
    engine = arranged(num_pages=1 + 12, prefill_chunk=PAGE, max_num_batched_tokens=2 * PAGE)
    prompts = [prompt_of(8 * PAGE - 8, start) for start in (1, 2)]
    want = [alone(prompt) for prompt in prompts]
    if cached:
        generate(engine, [prompt[: 4 * PAGE] for prompt in prompts], greedy(1))
    for i, prompt in enumerate(prompts):
        engine.add(asking(f"r{i}", prompt, 8))
    outputs = joined(run(engine, max_turns=100))
    assert [outputs[f"r{i}"].token_ids for i in range(2)] == want
    assert_balanced(engine)


@BOTH
def test_O41_random_priorities_on_a_tight_pool_change_no_output(overlap):
    order = random.Random(3)
    engine = arranged(num_pages=1 + 8, overlap=overlap, enable_prefix_cache=False)
    kinds = [(prompt_of(4 + 5 * i, i), 3 + 4 * i) for i in range(10)]
    want = [alone(prompt, greedy(count)) for prompt, count in kinds]
    chosen = [order.randrange(10) for _ in range(200)]
    updates = []
    for i, kind in enumerate(chosen):
        engine.add(asking(f"r{i}", *kinds[kind], priority=order.randrange(4)))
        for _ in range(order.randrange(3)):
            updates += engine.step()
    outputs = joined(updates + run(engine, max_turns=10_000))
    for i, kind in enumerate(chosen):
        assert outputs[f"r{i}"].token_ids == want[kind]
    assert value(engine, "preemptions_total") > 0
    assert_balanced(engine)


@BOTH
def test_O42_an_urgent_request_takes_the_slot_of_a_less_urgent_one(overlap):
    engine = arranged(max_num_seqs=2, overlap=overlap)
    calm = [prompt_of(20, start) for start in (1, 2)]
    want = [alone(prompt, greedy(100)) for prompt in calm]
    urgent = prompt_of(10, 3)
    for i, prompt in enumerate(calm):
        engine.add(asking(f"calm {i}", prompt, 100, priority=5))
    updates = [update for _ in range(10) for update in engine.step()]
    engine.add(asking("urgent", urgent, 8, priority=0))
    updates += run(engine, max_turns=1000)
    first = next(i for i, update in enumerate(updates) if update.request_id == "urgent")
    assert all(update.finish_reason is None for update in updates[:first])
    outputs = joined(updates)
    assert [outputs[f"calm {i}"].token_ids for i in range(2)] == want
    assert outputs["urgent"].token_ids == alone(urgent, greedy(8))
    assert_balanced(engine)


def test_O43_streams_go_on_and_newcomers_start_while_a_long_prompt_is_prefilled():
    engine = arranged(prefill_chunk=BUDGET // 2)
    for i in range(2):
        engine.add(asking(f"stream {i}", [i + 1], 200))
    for _ in range(4):
        engine.step()
    engine.add(asking("long", prompt_of(3500), 2))
    engine.step()
    engine.add(asking("newcomer", [9, 9], 2))
    turn_of_last = {f"stream {i}": 0 for i in range(2)}
    firsts: dict[str, int] = {}
    for turn in range(1, 200):
        for update in engine.step():
            name = update.request_id
            firsts.setdefault(name, turn)
            if name in turn_of_last:
                assert turn - turn_of_last[name] <= 2, "a stream waited for the long prompt"
                turn_of_last[name] = turn
        if "long" in firsts:
            break
    assert firsts["newcomer"] <= 4
    assert firsts["long"] >= 3500 // (BUDGET // 2)
    run(engine)
    assert_balanced(engine)


@BOTH
@pytest.mark.parametrize("cache", [True, False])
async def test_O45_preempted_streams_lose_and_repeat_nothing(overlap, cache):
    prompts = [prompt_of(10 + i, i) for i in range(6)]
    want = [alone(prompt, greedy(120)) for prompt in prompts]
    engine = arranged(num_pages=1 + 12, overlap=overlap, enable_prefix_cache=cache)
    for i, prompt in enumerate(prompts):
        engine.add(asking(f"r{i}", prompt, 120))
    outputs = joined(run(engine, max_turns=5000))
    assert value(engine, "preemptions_total") >= 3
    for i, prompt in enumerate(prompts):
        output = outputs[f"r{i}"]
        assert output.token_ids == want[i]
        assert (
            output.text
            == engine.tokenizer.decode([*prompt, *want[i]])[len(engine.tokenizer.decode(prompt)) :]
        )
        usage = output.last.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 120)
    assert value(engine, "output_tokens_total") == 6 * 120
    assert_balanced(engine)


async def test_O45_over_the_wire_preempted_streams_are_whole():
    prompts = [prompt_of(10 + i, i) for i in range(6)]
    want = [alone(prompt, greedy(120)) for prompt in prompts]
    engine = arranged(num_pages=1 + 12)
    async with serving_real(engine) as s:
        streams = [s.client.stream(asking("", prompt, 120)) for prompt in prompts]
        heads = [anext(stream) for stream in streams]
        heads = [(await head).token_ids for head in heads]
        for stream, head, ids in zip(streams, heads, want, strict=True):
            assert [*head, *[i async for u in stream for i in u.token_ids]] == ids


@pytest.mark.parametrize("length", [31, 32, 33, 96])
@BOTH
async def test_O46_prompts_around_the_chunk_size_stream_like_others(length, overlap):
    chunk, prompt = 32, prompt_of(length)
    engine = arranged(prefill_chunk=chunk, overlap=overlap, enable_prefix_cache=False)
    async with serving_real(engine) as s:
        request = GenerateRequest(prompt_token_ids=prompt, sampling=greedy(8))
        whole = await s.client.generate(request)
        updates = [u async for u in s.client.stream(request)]
    assert list(whole.token_ids) == alone(prompt)
    assert tuple(i for u in updates for i in u.token_ids) == whole.token_ids
    assert "".join(u.text for u in updates) == whole.text
    assert all(u.token_ids for u in updates), "an update came from an unfinished prefill"
    assert len(whole.token_ids) == 8


def test_O47_a_full_pool_drops_no_prompt_in_the_middle_of_its_prefill():
    engine = arranged(num_pages=1 + 8, prefill_chunk=PAGE, enable_prefix_cache=False)
    prompts = [prompt_of(3 * PAGE - 3, i) for i in range(8)]
    want = [alone(prompt, greedy(9)) for prompt in prompts]
    for _ in range(50):
        assert tokens_of(generate(engine, prompts, greedy(9))) == want
        assert_balanced(engine)
        assert engine.scheduler.slots.num_free == SLOTS


@pytest.mark.parametrize("cache", [True, False])
def test_O105_prompts_of_unequal_length_get_together_what_they_get_alone(cache):
    lengths = [3, 17, 40, 64, 131]
    prompts = [prompt_of(length, length) for length in lengths]
    want = [alone(prompt, greedy(24)) for prompt in prompts]
    engine = arranged(enable_prefix_cache=cache)
    for _ in range(2):  # the second time from the cache
        assert tokens_of(generate(engine, prompts, greedy(24))) == want
        assert tokens_of(generate(engine, prompts[::-1], greedy(24))) == want[::-1]
