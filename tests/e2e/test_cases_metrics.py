"""Fault reports about metrics, on the real engine: counts once, gauges that come back."""

from __future__ import annotations

import asyncio
import time

import pytest

from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams
from tests.e2e.real_engine import (
    PAGE,
    arranged,
    greedy,
    idle,
    prompt_of,
    serving_real,
    value,
)
from tests.engine.tiny import run
from tests.server.conftest import until

AT_ONCE_S = 2.0
ENDLESS = 4000
REASONS = ("stop", "length", "abort", "deadline", "error")


def asking(prompt, max_tokens: int, **fields) -> GenerateRequest:
    return GenerateRequest(prompt_token_ids=prompt, sampling=greedy(max_tokens), **fields)


def finished(engine) -> dict[str, float]:
    counts = {r: value(engine, "requests_finished_total", reason=r) for r in REASONS}
    return {reason: count for reason, count in counts.items() if count}


async def begun(s, prompts) -> list:
    """Streams of endless requests that have all been accepted."""
    tasks = []
    for prompt in prompts:
        stream = s.client.stream(asking(prompt, ENDLESS))
        tasks.append(asyncio.create_task(anext(stream)))
    await until(lambda: len(s.engine._streams) == len(prompts))
    return tasks


async def cancelled(tasks) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_O93_gauges_go_back_after_everything_was_cancelled_and_nothing_more_comes():
    engine = arranged(enable_prefix_cache=False)
    async with serving_real(engine) as s:
        tasks = await begun(s, [prompt_of(20, i) for i in range(20)])
        await until(lambda: value(engine, "requests_running") == 4)
        # Streams that have brought their first update are closed with their clients.
        begin = time.monotonic()
        await cancelled(tasks)
        await s.client.close()
        await until(
            lambda: not value(engine, "requests_running") and not value(engine, "requests_waiting")
        )
        assert time.monotonic() - begin < AT_ONCE_S
        await idle(engine)
        assert value(engine, "kv_pages", state="used") == 0
        assert value(engine, "kv_pages", state="free") == engine.scheduler.pool.num_usable
    assert finished(engine) == {"abort": 20}


def test_O94_first_tokens_and_finished_requests_are_each_counted_once():
    engine = arranged(num_pages=1 + 12, enable_prefix_cache=False)
    for i in range(50):
        engine.add(asking(prompt_of(5 + i, i), 20 + i, request_id=f"r{i}"))
    with_first_token = set()
    for _ in range(40):
        with_first_token |= {u.request_id for u in engine.step() if u.token_ids}
    for i in range(0, 50, 5):
        engine.abort(f"r{i}")
    with_first_token |= {u.request_id for u in run(engine, max_turns=20_000) if u.token_ids}
    assert value(engine, "preemptions_total") > 0
    assert value(engine, "time_to_first_token_seconds_count") == len(with_first_token)
    assert value(engine, "queue_time_seconds_count") == len(with_first_token)
    counts = finished(engine)
    assert sum(counts.values()) == value(engine, "e2e_latency_seconds_count") == 50
    assert 0 < counts["abort"] <= 10
    assert counts["abort"] + counts["length"] == 50


def test_O94_each_of_two_choices_counts_as_one_and_their_prompt_once():
    engine = arranged()
    for i in range(3):
        message = GenerateRequest(
            prompt_token_ids=prompt_of(40, i), sampling=SamplingParams(n=2, max_tokens=5)
        )
        engine.add(message)
    run(engine)
    assert value(engine, "prompt_tokens_total") == 3 * 40
    for name in ("time_to_first_token", "e2e_latency", "prefill_time", "decode_time"):
        assert value(engine, f"{name}_seconds_count") == 6
    assert sum(finished(engine).values()) == 6
    assert value(engine, "request_output_tokens_sum") == value(engine, "output_tokens_total")


async def test_O95_disconnects_are_counted_as_aborts_and_as_nothing_else():
    engine = arranged()
    async with serving_real(engine) as s:
        streams = [s.client.stream(asking(prompt_of(9, i), ENDLESS)) for i in range(4)]
        for stream in streams:
            await anext(stream)
        queued = asyncio.create_task(s.client.generate(asking([1], ENDLESS)))
        await until(lambda: engine.stats()["waiting"] == 1)
        queued.cancel()
        for stream in streams:
            await stream.aclose()
        await idle(engine)
    assert finished(engine) == {"abort": 5}


def test_O96_the_page_gauges_show_what_is_held():
    engine = arranged(enable_prefix_cache=False, overlap=False)
    usable = engine.scheduler.pool.num_usable
    lengths = [40, 100, 7]
    for i, length in enumerate(lengths):
        engine.add(asking(prompt_of(length, i), 50, request_id=f"r{i}"))
    while value(engine, "live_tokens") < sum(lengths):
        engine.step()
    used, live = value(engine, "kv_pages", state="used"), value(engine, "live_tokens")
    held = [len(request.token_ids) - 1 for request in engine.scheduler.running]
    assert live == sum(held)  # the newest token of each has no KV yet
    assert used == sum(-(-length // PAGE) for length in held)
    assert used + value(engine, "kv_pages", state="free") == usable
    run(engine)
    assert value(engine, "kv_pages", state="used") == value(engine, "live_tokens") == 0
    assert value(engine, "kv_pages", state="free") == usable


def test_O96_when_idle_only_cached_pages_are_left():
    engine = arranged()
    engine.add(asking(prompt_of(3 * PAGE), 2))
    run(engine)
    assert value(engine, "kv_pages", state="used") == 0
    assert value(engine, "kv_pages", state="cached") == 3


@pytest.mark.parametrize("overlap", [True, False])
def test_the_overlap_gauge_says_how_the_engine_runs(overlap):
    assert value(arranged(overlap=overlap), "overlap_active") == overlap
