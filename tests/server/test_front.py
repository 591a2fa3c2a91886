"""What a caller's quota is charged for its requests, whatever becomes of them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from jserve.errors import InvalidRequest, Overloaded
from jserve.server.caller import Caller
from jserve.server.front import Call, Front
from jserve.server.quota import CallerQuota, QuotaLimits, one_request
from tests.engine.test_async_engine import running
from tests.engine.tiny import asking, tiny

RATE = 1000


def front_of(engine) -> tuple[Front, Call]:
    """The front of an engine, and a call of somebody with a quota."""
    front = Front()
    front.open(engine)
    limits = QuotaLimits(requests_per_minute=RATE, tokens_per_minute=RATE)
    quota = CallerQuota(limits, clock=lambda: 0.0)
    return front, Call(method="test", caller=Caller(name="alice", quota=quota))


def used(call: Call, what: str) -> int:
    return RATE - int(call.caller.quota.headers()[f"x-ratelimit-remaining-{what}"])


@pytest.mark.parametrize("choices", [{"n": 1}, {"n": 3}, {"n": 1, "best_of": 4}], ids=str)
async def test_all_that_the_usage_tells_is_charged(choices):
    t = tiny()
    async with running(t) as (engine, gate):
        gate.open()
        front, call = front_of(engine)
        async with await front.submit(asking("r", [1, 2, 3], 10, **choices), call) as answer:
            usages = [u.usage async for u in answer if u.usage]
        assert used(call, "tokens") == 3 + sum(usage.completion_tokens for usage in usages)
        assert used(call, "tokens") == 3 + 10 * max(choices.values())


@pytest.mark.parametrize("is_share", [True, False], ids=["HTTP", "gRPC"])
async def test_a_request_for_which_there_is_no_room_costs_nothing_and_a_faulty_one_does(is_share):
    t = tiny(max_num_seqs=1, max_queued=1)
    async with running(t) as (engine, gate):
        front, call = front_of(engine)
        answers = [await front.submit(asking(f"r{i}", [1], 5), call) for i in range(2)]

        async def ask(name: str, prompt: list[int]) -> None:
            with one_request(call.caller) if is_share else nullcontext(call.caller) as caller:
                await front.submit(asking(name, prompt, 5), replace(call, caller=caller))

        for _ in range(50):
            with pytest.raises(Overloaded):
                await ask("more", [1])
        assert (used(call, "requests"), used(call, "tokens")) == (2, 2)
        with pytest.raises(InvalidRequest):
            await ask("faulty", [])
        assert used(call, "requests") == 3
        for answer in answers:
            answer.close()
        gate.open()
