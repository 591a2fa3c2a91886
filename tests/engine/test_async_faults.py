"""The engine in its thread when others are slow: devices that do not answer, readers that lag."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from jserve.engine.retry_advice import FIRST_GUESS_S, MOST_S, RetryAdvice
from jserve.engine.streams import MERGE_FROM, RequestStream
from jserve.errors import EngineDead, Overloaded
from jserve.messages import RequestUpdate
from tests.engine.test_async_engine import TIMEOUT_S, at_gate, ids, read, running
from tests.engine.tiny import answer, asking, tiny
from tests.server.conftest import until

LIMIT_S = 0.05


async def test_a_step_that_takes_too_long_is_reported_once_and_refuses_others_until_it_ends(caplog):
    t = tiny()
    caplog.set_level(logging.ERROR)
    request = asking("a", [1, 2], 3)
    async with running(t, step_timeout_s=LIMIT_S) as (front, gate):
        assert front.is_ready
        begun = time.monotonic()
        stream = await front.submit(request)
        await at_gate(gate)
        await until(lambda: not front.is_ready)
        assert time.monotonic() - begun > LIMIT_S
        with pytest.raises(EngineDead, match="a step has run for"):
            await front.submit(asking("b", [1], 3))
        await until(lambda: t.value("stuck_steps_total") == 1)
        gate.open()
        await read(stream)
        await until(lambda: front.is_ready)
        assert ids(await read(await front.submit(asking("c", [5], 3)))) == answer(
            asking("c", [5], 3)
        )
    reports = [r.message for r in caplog.records if "a step has run" in r.message]
    assert len(reports) == 1
    assert "num_rows=1" in reports[0]
    t.assert_idle()


async def test_what_waits_for_a_stuck_step_ends_with_an_error_and_the_engine_goes_on_after_it():
    t = tiny()
    async with running(t, step_timeout_s=LIMIT_S) as (front, gate):
        streams = [await front.submit(asking(f"r{i}", [i + 1], 30)) for i in range(6)]
        await at_gate(gate)
        for updates in await asyncio.gather(*map(read, streams)):
            assert isinstance(updates[-1].error, EngineDead)
            assert "without an end" in str(updates[-1].error)
        gate.open()
        await until(lambda: front.is_ready)
        again = asking("again", [5], 3)
        assert ids(await read(await front.submit(again))) == answer(again)
    t.assert_idle()


async def test_draining_does_not_wait_for_a_device_that_does_not_answer(monkeypatch):
    monkeypatch.setattr("jserve.engine.async_engine._LAST_STEP_S", 0.1)
    t = tiny()
    async with running(t, step_timeout_s=LIMIT_S) as (front, gate):
        stream = await front.submit(asking("r", [1], 5))
        await at_gate(gate)
        await until(lambda: not front.is_ready)
        async with asyncio.timeout(TIMEOUT_S):
            await front.drain(1000.0)
        assert isinstance((await read(stream))[-1].error, EngineDead)


async def test_without_a_limit_no_step_is_stuck():
    t = tiny()
    async with running(t, step_timeout_s=0) as (front, gate):
        stream = await front.submit(asking("r", [1], 5))
        await at_gate(gate)
        assert front.is_ready
        gate.open()
        await read(stream)


async def test_a_reader_that_leaves_too_much_unread_loses_its_request_and_no_other():
    t = tiny()
    read_on = asking("read", [4, 5], 15)
    async with running(t, max_unread_updates=8) as (front, gate):
        unread = await front.submit(asking("unread", [1, 2], 40))
        reading = asyncio.create_task(read(await front.submit(read_on)))
        longer = asyncio.create_task(read(await front.submit(asking("longer", [7], 30))))
        while not reading.done():  # token by token, so that a reader can keep up
            await at_gate(gate)
            gate.let_one_pass()
        assert ids(await reading) == answer(read_on)
        (last,) = await read(unread)
        longer.cancel()
        assert isinstance(last.error, Overloaded)
        assert "max_unread_updates=8" in str(last.error)
    assert t.value("slow_readers_total") == 1
    t.assert_idle()


async def test_a_reader_of_many_choices_may_leave_as_much_of_each_unread():
    t = tiny()
    many = asking("many", [1, 2], 15, n=6)
    async with running(t, max_unread_updates=16) as (front, gate):
        stream = await front.submit(many)
        gate.open()
        while t.value("requests_finished_total", reason="length") != 6:
            time.sleep(0.001)  # the loop has other things to do
        updates = await read(stream)
    assert updates[-1].error is None
    assert [len(ids(u for u in updates if u.index == i)) for i in range(6)] == [15] * 6


async def test_O05_what_a_slow_reader_has_missed_comes_as_one_update_of_each_choice():
    prepared = tiny().engine.processor.prepare(asking("r", [1, 2], n=2))
    stream = RequestStream(prepared, lambda stream: None)
    for token in range(5 * MERGE_FROM):
        stream.put(RequestUpdate(request_id="r", index=token % 2, text="x", token_ids=(token,)))
    assert len(stream._unread) <= 2 * MERGE_FROM, "it grows with what is unread"
    stream.put(RequestUpdate(request_id="r", index=1, finish_reason="stop", num_live_choices=1))
    stream.put(RequestUpdate(request_id="r", index=0, finish_reason="length", stop_reason="end"))
    first, last = await read(stream)
    assert (first.index, first.finish_reason, first.num_live_choices) == (1, "stop", 1)
    assert (last.index, last.finish_reason, last.stop_reason) == (0, "length", "end")
    assert first.token_ids == tuple(range(1, 5 * MERGE_FROM, 2))
    assert last.token_ids == tuple(range(0, 5 * MERGE_FROM, 2))
    assert len(last.text) == len(last.token_ids)
    assert stream.num_unread == 0


async def test_what_came_before_an_error_is_read_before_it():
    prepared = tiny().engine.processor.prepare(asking("r", [1, 2]))
    stream = RequestStream(prepared, lambda stream: None)
    for token in range(3):
        stream.put(RequestUpdate(request_id="r", token_ids=(token,)))
    stream.end(EngineDead("gone"))
    first, last = await read(stream)
    assert (first.token_ids, first.error, first.finish_reason) == ((0, 1, 2), None, None)
    assert isinstance(last.error, EngineDead)


def test_advice_before_any_request_has_ended_is_a_guess():
    assert RetryAdvice().after_s(0.0) == FIRST_GUESS_S


def test_refused_callers_are_told_one_place_after_the_other_as_fast_as_requests_end():
    advice = RetryAdvice()
    for end in range(11):
        advice.on_end(0.5 * end, arrived=0.0)
    assert [advice.after_s(5.0) for _ in range(3)] == pytest.approx([0.5, 1.0, 1.5])
    assert advice.after_s(6.0) == pytest.approx(1.0), "the line moves on with time"
    assert max(advice.after_s(6.0) for _ in range(1000)) == MOST_S


def test_a_quiet_hour_is_no_sign_of_slow_requests():
    advice = RetryAdvice()
    for end in range(11):
        advice.on_end(0.5 * end, arrived=0.0)
    advice.on_end(3600.0, arrived=3599.5)
    assert advice.after_s(3600.0) == pytest.approx(0.5)


async def test_a_refused_request_is_told_when_to_come_again():
    t = tiny(max_num_seqs=1, max_queued=1)
    async with running(t) as (front, _):
        for i in range(2):
            await front.submit(asking(f"r{i}", [i + 1], 3))
        waits = []
        for _ in range(2):
            with pytest.raises(Overloaded) as refused:
                await front.submit(asking("no", [9], 3))
            waits.append(refused.value.retry_after_s)
    assert waits == pytest.approx([FIRST_GUESS_S, 2 * FIRST_GUESS_S])
