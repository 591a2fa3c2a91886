"""Grammars that take long to compile: who waits for them, and who does not."""

from __future__ import annotations

import asyncio
import threading

import pytest

from jserve.engine.async_engine import MAX_WAITING_GRAMMARS, _forces_call
from jserve.errors import EngineDead, InvalidRequest, Overloaded
from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams
from jserve.structured import StructuredOutput
from tests.engine.test_async_engine import TIMEOUT_S, ids, read, running
from tests.engine.tiny import asking, tiny

BRIEF = SamplingParams(temperature=0, max_tokens=3)


async def test_grammars_that_take_long_hold_up_neither_chats_nor_the_queue():
    t = tiny(eos=(96,))
    release = threading.Event()

    def slow(structured):
        assert release.wait(TIMEOUT_S)
        raise InvalidRequest("too slow")

    t.engine.processor._new_matcher = slow
    form = StructuredOutput.of_choice(["a"])
    async with running(t) as (front, gate):
        gate.open()
        slow_ones = [
            asyncio.create_task(front.submit(asking(f"g{i}", [1], structured=form)))
            for i in range(MAX_WAITING_GRAMMARS)
        ]
        await asyncio.sleep(0)  # each runs up to its own wait
        with pytest.raises(Overloaded, match="64 grammars wait"):
            await front.submit(asking("one more", [1], structured=form))
        chat = GenerateRequest(messages=[{"role": "user", "content": "HI"}], sampling=BRIEF)
        async with asyncio.timeout(TIMEOUT_S):
            assert len(ids(await read(await front.submit(chat)))) == 3
        release.set()
        found = await asyncio.gather(*slow_ones, return_exceptions=True)
        assert all(isinstance(error, InvalidRequest) for error in found)
    t.assert_idle()


class Anything:
    """A grammar that is compiled."""

    is_finished, error = False, None

    def fill(self, words) -> bool:
        words.fill(0xFFFFFFFF)
        return True

    def accept(self, token_id) -> bool:
        return True

    def forced_tokens(self) -> list[int]:
        return []

    def copy(self):
        return self


async def test_known_grammars_pass_those_that_are_being_compiled():
    t = tiny(eos=(96,))
    release = threading.Event()
    new, known = (StructuredOutput.of_choice([name]) for name in ("new", "known"))

    def compile_it(structured):
        assert structured == known or release.wait(TIMEOUT_S)
        return Anything()

    t.engine.processor._new_matcher = compile_it
    t.engine.processor.knows_grammar = lambda structured: structured == known
    async with running(t) as (front, gate):
        gate.open()
        slow = [
            asyncio.create_task(front.submit(asking(f"s{i}", [1], 3, structured=new)))
            for i in range(8)
        ]
        await asyncio.sleep(0)
        async with asyncio.timeout(TIMEOUT_S):
            stream = await front.submit(asking("known", [1], 3, structured=known))
            assert len(ids(await read(stream))) == 3
        t.clock.now = 7.0  # what comes late out of the threads came when it was sent
        release.set()
        for stream in await asyncio.gather(*slow):
            updates = await read(stream)
            assert updates[-1].timings.e2e_s == 7.0
    t.assert_idle()


async def test_draining_answers_those_that_wait_for_a_grammar():
    t = tiny(eos=(96,))
    release = threading.Event()
    t.engine.processor._new_matcher = lambda form: release.wait(TIMEOUT_S) and Anything()
    form = StructuredOutput.of_choice(["a"])
    async with running(t) as (front, gate):
        gate.open()
        waiting = [
            asyncio.create_task(front.submit(asking(f"g{i}", [1], structured=form)))
            for i in range(9)
        ]
        await asyncio.sleep(0)
        await front.drain(0)
        release.set()
        async with asyncio.timeout(TIMEOUT_S):
            found = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(error, EngineDead) for error in found), found


@pytest.mark.parametrize(
    ("tool_choice", "strict", "expected"),
    [
        (None, False, False),
        ("auto", False, False),
        ("none", False, False),
        ("auto", True, True),
        ("required", False, True),
    ],
)
def test_chats_that_force_a_call_are_known_to_need_a_grammar(tool_choice, strict, expected):
    tools = [{"type": "function", "function": {"name": "f", "strict": strict}}]
    message = GenerateRequest(messages=[], tools=tools, tool_choice=tool_choice)
    assert _forces_call(message) == expected
