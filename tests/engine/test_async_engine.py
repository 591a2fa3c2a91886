"""The engine in its thread: streams, aborts, failure, draining. The fake device waits at a gate, so
that a test decides when each step happens."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from jserve.engine.async_engine import INLINE_CHARS, AsyncEngine
from jserve.engine.kv_events import Cleared, KvEvent, Removed, Stored
from jserve.errors import EngineDead, InvalidRequest, Overloaded
from jserve.messages import GenerateRequest, RequestUpdate
from jserve.sampling_params import SamplingParams
from tests.engine.tiny import MAX_MODEL_LEN, Tiny, answer, asking, tiny

TIMEOUT_S = 20.0
BRIEF = SamplingParams(temperature=0, max_tokens=3)


class Gate:
    """Lets steps be collected one by one, or all of them once it is open."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._is_open = threading.Event()
        self.waiting = threading.Event()  # the engine's thread stands at the gate

    def pass_through(self) -> None:
        if not self._is_open.is_set():
            self.waiting.set()
            assert self._permits.acquire(timeout=TIMEOUT_S), "the test never opened the gate"

    def let_one_pass(self) -> None:
        self.waiting.clear()
        self._permits.release()

    def open(self) -> None:
        self._is_open.set()
        self._permits.release(1000)


@contextlib.asynccontextmanager
async def running(t: Tiny, **limits):
    """The engine of `t` in its thread, at a closed gate."""
    gate = Gate()
    t.device.on_collect = gate.pass_through
    front = AsyncEngine(t.engine, **limits)
    try:
        yield front, gate
    finally:
        gate.open()
        await front.drain(0)


async def read(stream) -> list[RequestUpdate]:
    async with asyncio.timeout(TIMEOUT_S):
        return [update async for update in stream]


async def at_gate(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.waiting.wait, TIMEOUT_S)


def ids(updates: list[RequestUpdate]) -> list[int]:
    return [token_id for update in updates for token_id in update.token_ids]


async def test_concurrent_streams_each_get_their_own_tokens_and_end():
    t = tiny()
    requests = [asking(f"r{i}", [i + 1] * (i + 1), 10 + i) for i in range(8)]
    async with running(t) as (front, gate):
        gate.open()
        streams = [await front.submit(request) for request in requests]
        outputs = await asyncio.gather(*map(read, streams))
    for request, updates in zip(requests, outputs, strict=True):
        assert ids(updates) == answer(request)
        assert [u.finish_reason for u in updates[:-1]] == [None] * (len(updates) - 1)
        assert updates[-1].finish_reason == "length"
    t.assert_idle()


async def test_bad_requests_are_refused_before_the_engine_sees_them():
    t = tiny()
    async with running(t) as (front, _):
        with pytest.raises(InvalidRequest, match="empty"):
            await front.submit(asking("a", [], 3))
        with pytest.raises(InvalidRequest, match=f"max_model_len={MAX_MODEL_LEN}"):
            await front.submit(GenerateRequest(prompt="X" * (INLINE_CHARS + 1)))
        assert not t.engine.has_work


async def test_long_texts_and_chats_are_prepared_outside_the_loops_thread(monkeypatch):
    t = tiny()
    threads = []
    prepare = t.engine.processor.prepare

    def noting(message, arrival_time):
        threads.append(threading.current_thread() is threading.main_thread())
        return prepare(message)

    monkeypatch.setattr(t.engine.processor, "prepare", noting)
    one_token = asking("", [1], 1).sampling
    async with running(t) as (front, gate):
        gate.open()
        await front.submit(GenerateRequest(prompt="ABC", sampling=one_token))
        await front.submit(
            GenerateRequest(messages=[{"role": "user", "content": "HI"}], sampling=one_token)
        )
        with pytest.raises(InvalidRequest):
            await front.submit(GenerateRequest(prompt="X" * (INLINE_CHARS + 1)))
    assert threads == [True, False, False]


async def test_O50_an_id_in_use_is_refused_and_the_first_stream_goes_on():
    t = tiny()
    first = asking("same", [1, 2], 6)
    async with running(t) as (front, gate):
        stream = await front.submit(first)
        with pytest.raises(InvalidRequest, match="in use"):
            await front.submit(asking("same", [3], 6))
        gate.open()
        assert ids(await read(stream)) == answer(first)


async def test_a_full_queue_is_overloaded():
    t = tiny(max_num_seqs=1, max_queued=2)
    async with running(t) as (front, gate):
        streams = [await front.submit(asking(f"r{i}", [i + 1], 3)) for i in range(3)]
        with pytest.raises(Overloaded, match="3 requests"):
            await front.submit(asking("r3", [9], 3))
        gate.open()
        await asyncio.gather(*map(read, streams))
        await read(await front.submit(asking("r3", [9], 3)))


async def test_an_aborted_stream_frees_its_pages_and_the_others_go_on():
    t = tiny()
    kept = asking("kept", [4, 5], 12)
    async with running(t) as (front, gate):
        stream = await front.submit(kept)
        gone = await front.submit(asking("gone", [1] * 20, 40))
        await at_gate(gate)
        gone.abort()
        gone.abort()
        gate.open()
        assert ids(await read(stream)) == answer(kept)
        assert t.value("requests_finished_total", reason="abort") == 1
    t.assert_idle()


async def test_O50_a_request_that_takes_an_aborted_ones_id_gets_none_of_its_tokens():
    """The step that runs during the abort still yields a token of the old request."""
    t = tiny()
    again = asking("same", [30, 40, 50], 6)
    async with running(t) as (front, gate):
        old = await front.submit(asking("same", [1, 2], 40))
        await at_gate(gate)
        gate.let_one_pass()
        await at_gate(gate)
        old.abort()
        new = await front.submit(again)
        gate.open()
        updates = await read(new)
        assert ids(updates) == answer(again)
        assert updates[0].prompt_token_ids == tuple(again.prompt_token_ids)


async def test_O50_a_late_abort_leaves_the_request_alone_that_took_the_id_since():
    """The first one has ended in the engine, though its client has not read it to the end."""
    t = tiny()
    second = asking("same", [30, 40, 50], 6)
    async with running(t) as (front, gate):
        old = await front.submit(asking("same", [1, 2], 1))
        gate.open()
        await read(old)
        new = await front.submit(second)
        old.abort()
        assert ids(await read(new)) == answer(second)


async def test_draining_gives_up_on_a_device_that_does_not_answer():
    t = tiny()
    async with running(t) as (front, gate):
        await front.submit(asking("r", [1], 5))
        await at_gate(gate)
        before = set(threading.enumerate())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await front.drain(0)
        fresh = set(threading.enumerate()) - before
        assert not fresh, "a thread that waits for the device would keep the process"


async def test_a_failure_of_the_device_ends_every_stream_and_refuses_new_requests():
    t = tiny(fail_at=3, max_num_seqs=2)
    async with running(t) as (front, gate):
        streams = [await front.submit(asking(f"r{i}", [i + 1], 30)) for i in range(4)]
        assert front.is_ready
        gate.open()
        for updates in await asyncio.gather(*map(read, streams)):
            assert updates[-1].finish_reason == "error"
            assert isinstance(updates[-1].error, EngineDead)
            assert "the engine failed" in str(updates[-1].error)
        assert not front.is_ready
        with pytest.raises(EngineDead, match=r"the engine failed.*another server"):
            await front.submit(asking("r9", [1], 3))
    assert t.value("requests_finished_total", reason="error") == 4
    t.assert_idle()


async def test_draining_lets_live_requests_finish_and_refuses_new_ones():
    t = tiny(max_num_seqs=2)
    requests = [asking(f"r{i}", [i + 1], 9) for i in range(4)]
    async with running(t) as (front, gate):
        streams = [await front.submit(request) for request in requests]
        await at_gate(gate)
        drained = asyncio.create_task(front.drain(TIMEOUT_S))
        await asyncio.sleep(0)  # lets the task begin
        assert not front.is_ready
        with pytest.raises(EngineDead, match="shutting down"):
            await front.submit(asking("new", [1], 3))
        gate.open()
        for request, updates in zip(
            requests, await asyncio.gather(*map(read, streams)), strict=True
        ):
            assert ids(updates) == answer(request)
        async with asyncio.timeout(TIMEOUT_S):
            await drained
    t.assert_idle()


async def test_with_no_time_to_drain_every_stream_ends_with_an_error():
    t = tiny(max_num_seqs=2)
    async with running(t) as (front, gate):
        streams = [await front.submit(asking(f"r{i}", [i + 1], 50)) for i in range(4)]
        await at_gate(gate)
        drained = asyncio.create_task(front.drain(0))
        ends = [updates[-1] for updates in await asyncio.gather(*map(read, streams))]
        gate.open()
        await drained
    assert [end.finish_reason for end in ends] == ["error"] * 4
    assert all("shut down before" in str(end.error) for end in ends)
    t.assert_idle()


async def test_draining_an_engine_that_failed_returns_at_once():
    t = tiny(fail_at=0)
    async with running(t) as (front, _):
        stream = await front.submit(asking("a", [1], 3))
        assert isinstance((await read(stream))[-1].error, EngineDead)
        async with asyncio.timeout(TIMEOUT_S):
            await front.drain(1000.0)


async def test_a_deadline_ends_the_stream_with_its_error():
    t = tiny()
    async with running(t) as (front, gate):
        stream = await front.submit(asking("late", [1, 2], 40, timeout_s=5.0))
        await at_gate(gate)
        t.clock.now = 6.0
        gate.open()
        assert (await read(stream))[-1].finish_reason == "deadline"
    t.assert_idle()


async def test_prompt_tokens_are_counted_once_on_their_way_to_the_queue_and_in_it():
    t = tiny(max_num_seqs=1, max_queued_tokens=10)
    async with running(t) as (front, gate):
        streams = [await front.submit(asking("runs", [1, 2], 6))]
        await at_gate(gate)
        for i in range(2):
            streams.append(await front.submit(asking(f"r{i}", [i] * 4, 2)))
        for where in ("the inbox", "the queue"):
            with pytest.raises(Overloaded, match="8 prompt tokens"):
                await front.submit(asking(where, [1, 2, 3], 2))
            gate.let_one_pass()
            await at_gate(gate)
        streams.append(await front.submit(asking("fits", [1, 2], 2)))
        gate.open()
        await asyncio.gather(*map(read, streams))
        assert front._inbox_tokens == 0
    t.assert_idle()


async def test_an_engine_that_can_do_nothing_waits_and_does_not_spin(monkeypatch):
    t = tiny(batching="dynamic", batch_window_s=5.0)
    turns, step = [], t.engine.step
    monkeypatch.setattr(t.engine, "step", lambda: turns.append("step") or step())

    class NotingEvent(threading.Event):
        def wait(self, timeout=None):
            turns.append(timeout)
            return super().wait(timeout)

    async with running(t) as (front, gate):
        gate.open()
        front._wake, old = NotingEvent(), front._wake
        old.set()  # the thread goes on with the new one
        stream = await front.submit(asking("a", [1, 2], 3))
        async with asyncio.timeout(TIMEOUT_S):
            while 1.0 not in turns:
                await asyncio.sleep(0.001)
        first = turns.index("step")
        assert "step" not in turns[first + 1 : turns.index(1.0)], "it did not wait after a turn"
        t.clock.now = 6.0
        assert len(ids(await read(stream))) == 3
    t.assert_idle()


async def test_the_prefix_cache_is_reset_between_steps_and_only_when_nobody_uses_it():
    t = tiny()
    prompt = list(range(1, 20))
    async with running(t) as (front, gate):
        stream = await front.submit(asking("a", prompt, 6))
        await at_gate(gate)
        in_use = asyncio.create_task(front.reset_prefix_cache())
        await asyncio.sleep(0)  # the task runs up to its own wait: its question is asked
        gate.open()
        assert await in_use is False
        await read(stream)
        assert t.engine.stats()["pages_cached"] > 0
        assert await front.reset_prefix_cache() is True
        assert t.engine.stats()["pages_cached"] == 0
    with pytest.raises(EngineDead):
        await front.reset_prefix_cache()


async def test_a_reader_of_kv_events_can_rebuild_what_the_cache_holds():
    t = tiny(num_pages=1 + 20)
    async with running(t) as (front, gate):
        gate.open()
        await read(await front.submit(asking("before", list(range(20)), 6)))
        held: set[bytes] = set()
        events = front.kv_events()
        async with asyncio.timeout(TIMEOUT_S):
            await take(events, held)
            for i in range(6):  # more than the pool holds: some must go
                await read(await front.submit(asking(f"r{i}", [i + 1] * 24, 6)))
            await front.reset_prefix_cache()
            await read(await front.submit(asking("after", [90] * 20, 6)))
            while held != cached(t):
                await take(events, held)
        assert len(held) >= 5
        await events.aclose()
        await front.reset_prefix_cache()
        assert t.engine.scheduler.cache.events is None


async def test_a_slow_reader_of_kv_events_is_told_all_anew_and_a_failure_ends_it():
    t = tiny(fail_at=40)
    async with running(t) as (front, gate):
        gate.open()
        held: set[bytes] = set()
        events = front.kv_events(max_batches=1)
        await take(events, held)
        for i in range(4):
            await read(await front.submit(asking(f"r{i}", [i + 1] * 16, 6)))
        assert Cleared() in await take(events, held)
        assert held == cached(t)
        stream = await front.submit(asking("fails", [1], 60))
        assert (await read(stream))[-1].finish_reason == "error"
        with pytest.raises(EngineDead, match="the engine failed"):
            await take_all(events, held)


async def take_all(events, held: set[bytes]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            await take(events, held)


async def take(events, held: set[bytes]) -> list[KvEvent]:
    """Applies the next batch to the names of the pages that are held, and returns it."""
    batch = await anext(events)
    for event in batch.events:
        if isinstance(event, Stored):
            held |= set(event.digests)
        elif isinstance(event, Removed):
            held -= set(event.digests)
        else:
            held.clear()
    return list(batch.events)


def cached(t: Tiny) -> set[bytes]:
    """The names of the pages that the cache holds; the engine must be idle."""
    return {name for event in t.engine.scheduler.cache.snapshot() for name in event.digests}
