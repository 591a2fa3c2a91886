"""Fault reports about cancellation, ids and slow readers, on the real engine behind real gRPC."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from jserve.client import GenerateClient
from jserve.errors import InvalidRequest
from jserve.messages import GenerateRequest
from jserve.server.grpc_service import GENERATE_SERVICE
from jserve.server.proto import generate_pb2 as pb
from jserve.server.rpc import stub_of
from tests.e2e.real_engine import (
    PAGE,
    SLOTS,
    alone,
    arranged,
    assert_balanced,
    generate,
    greedy,
    idle,
    prompt_of,
    serving_real,
    tokens_of,
    value,
)
from tests.engine.tiny import Clock, joined, run
from tests.server.conftest import until

READER_PAUSE_S = 0.005  # several times what a step takes
AT_ONCE_S = 2.0
ENDLESS = 4000  # tokens: seconds of work


def asking(prompt, max_tokens: int, **fields) -> GenerateRequest:
    return GenerateRequest(prompt_token_ids=prompt, sampling=greedy(max_tokens), **fields)


async def test_O05_slow_readers_get_every_token_in_order_and_then_the_end():
    prompts = [prompt_of(5 + i, i) for i in range(8)]
    want = tokens_of(generate(arranged(), prompts, greedy(256)))
    engine = arranged()

    async def read_slowly(client, prompt):
        ids, reasons = [], []
        async for update in client.stream(asking(prompt, 256)):
            ids += update.token_ids
            reasons.append(update.finish_reason)
            await asyncio.sleep(READER_PAUSE_S)  # the subject: a reader slower than the engine
        assert reasons[-1] == "length"
        assert set(reasons[:-1]) == {None}
        return ids

    async with serving_real(engine) as s:
        assert await asyncio.gather(*(read_slowly(s.client, p) for p in prompts)) == want


@pytest.mark.parametrize("streaming", [True, False])
async def test_O48_a_client_that_disconnects_stops_its_generation(streaming):
    engine = arranged(max_num_seqs=1)
    message = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2, 3]),
        sampling=pb.SamplingParams(temperature=0, max_tokens=ENDLESS),
    )
    async with serving_real(engine) as s:
        async with grpc.aio.insecure_channel(s.target) as channel:
            stub = stub_of(channel, GENERATE_SERVICE)
            if streaming:
                call = stub.GenerateStream(message)
                for _ in range(3):
                    await call.read()
            else:
                call = stub.Generate(message)
                await until(lambda: value(engine, "time_to_first_token_seconds_count") == 1)
        begun = time.monotonic()
        await until(lambda: value(engine, "requests_running") == 0)
        assert time.monotonic() - begun < AT_ONCE_S
        assert value(engine, "requests_finished_total", reason="abort") == 1
        assert value(engine, "output_tokens_total") < ENDLESS
        whole = await s.client.generate(asking([4, 5], 3))
        assert list(whole.token_ids) == alone([4, 5], greedy(3))


async def test_O49_queued_requests_whose_clients_have_gone_are_never_run():
    engine = arranged(max_num_seqs=1)
    async with serving_real(engine) as s:
        busy = s.client.stream(asking([1, 2], ENDLESS))
        await anext(busy)
        queued = [asyncio.create_task(s.client.generate(asking([i] * 50, 9))) for i in range(5)]
        await until(lambda: engine.stats()["waiting"] == 5)
        for task in queued:
            task.cancel()
        await until(lambda: engine.stats()["waiting"] == 0)
        await busy.aclose()
        await idle(engine)
    assert value(engine, "requests_finished_total", reason="abort") == 6
    assert value(engine, "time_to_first_token_seconds_count") == 1
    computed = value(engine, "step_tokens_total", kind="real")
    busy_alone = 2 + value(engine, "output_tokens_total") + 2  # its prompt; steps in flight
    assert computed <= busy_alone


async def test_O50_a_second_request_with_a_live_id_is_refused():
    engine = arranged()
    want = alone([1, 2, 3], greedy(200))
    async with serving_real(engine) as s:
        first = s.client.stream(asking([1, 2, 3], 200, request_id="same"))
        ids = list((await anext(first)).token_ids)
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="request_id='same' is in use"):
                await s.client.generate(asking([9], 5, request_id="same"))
        assert ids + [i async for u in first for i in u.token_ids] == want
        again = await s.client.generate(asking([9], 5, request_id="same"))
        assert list(again.token_ids) == alone([9], greedy(5))
    assert value(engine, "requests_finished_total", reason="length") == 2


async def test_O50_an_id_can_be_used_again_right_after_its_call_was_cancelled():
    engine = arranged()
    want = alone([9, 8], greedy(12))
    async with serving_real(engine) as s:
        for _ in range(20):
            stream = s.client.stream(asking([1, 2, 3], ENDLESS, request_id="same"))
            await anext(stream)
            await stream.aclose()
            await until(lambda: not s.engine._streams)  # the server has seen the cancellation
            again = await s.client.generate(asking([9, 8], 12, request_id="same"))
            assert list(again.token_ids) == want


@pytest.mark.parametrize("overlap", [True, False])
def test_O51_requests_that_end_at_their_first_token_leak_no_slot(overlap):
    engine = arranged(overlap=overlap)
    prompts = [prompt_of(3 + i % 40, i) for i in range(204)]
    params = [greedy(60 if i % 68 == 0 else 1) for i in range(204)]
    outputs = tokens_of(generate(engine, prompts, params))
    assert [len(ids) for ids in outputs] == [p.max_tokens for p in params]
    for i in range(0, 204, 68):
        assert outputs[i] == alone(prompts[i], greedy(60))
    assert_balanced(engine)
    assert engine.scheduler.slots.num_free == SLOTS


def test_O52_requests_that_leave_the_queue_leave_nothing_of_their_cache_look_up():
    clock = Clock()
    engine = arranged(max_num_seqs=1, clock=clock, overlap=False)
    prefix = prompt_of(2 * PAGE + 1)
    generate(engine, [prefix], greedy(1))
    cached = engine.stats()["pages_cached"]
    assert cached == 2
    engine.add(asking([1], 8, request_id="busy"))
    engine.step()
    for i in range(20):
        timeout_s = 5.0 if i >= 15 else None
        engine.add(asking(prefix, 2, request_id=f"q{i}", timeout_s=timeout_s))
    engine.step()
    for i in range(10):
        engine.abort(f"q{i}")
    clock.now = 6.0
    outputs = joined(run(engine))
    ends = [outputs[f"q{i}"].last for i in range(10, 20)]
    assert [end.finish_reason for end in ends] == ["length"] * 5 + ["deadline"] * 5
    assert all(end.usage.cached_tokens == 2 * PAGE for end in ends[:5])
    assert_balanced(engine)
    assert engine.stats()["pages_cached"] == cached


async def test_the_deadline_of_a_call_ends_it_and_frees_its_slot():
    engine = arranged(max_num_seqs=1)
    async with serving_real(engine) as s, GenerateClient(s.target) as client:
        with pytest.raises(Exception, match="deadline"):
            await client.generate(asking([1], ENDLESS, timeout_s=0.2))
        await idle(engine)
    assert value(engine, "requests_finished_total", reason="deadline") == 1
