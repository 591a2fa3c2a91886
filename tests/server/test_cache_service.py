"""CacheService over a real channel: the reset call, and the cache's events in messages of bounded
size."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from jserve.engine.kv_events import Cleared, KvEventBatch, Removed, Stored
from jserve.errors import JserveError
from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams
from jserve.server.cache_service import CACHE_SERVICE, KV_SERVICE, batch_to_proto
from jserve.server.proto import generate_pb2 as pb
from jserve.server.rpc import stub_of
from tests.e2e.real_engine import arranged, prompt_of, serving_real
from tests.server.conftest import TIMEOUT_S, serving, until
from tests.server.fake_engine import FakeEngine

BATCHES = [
    KvEventBatch(4, (Cleared(), Stored(b"root", (b"a", b"b"), (1, 2, 3, 4, 5, 6)))),
    KvEventBatch(5, (Removed((b"b",)), Stored(b"a", (b"c",), (7, 8, 9)))),
]


def events_of(channel: grpc.aio.Channel):
    return stub_of(channel, KV_SERVICE).KvEvents(pb.KvEventsRequest())


def held_by(messages, held: dict[bytes, tuple[bytes, tuple[int, ...]]]) -> None:
    """Applies messages to what is held: each page's parent and tokens by its hash."""
    for message in messages:
        for event in message.events:
            if event.HasField("cleared"):
                held.clear()
            for name in event.removed.page_hashes:
                del held[name]
            stored, parent = event.stored, event.stored.parent_hash
            for i, name in enumerate(stored.page_hashes):
                size = stored.page_size
                held[name] = (parent, tuple(stored.token_ids[i * size : (i + 1) * size]))
                parent = name


async def test_without_its_flag_there_is_no_such_service(served):
    with pytest.raises(JserveError, match="UNIMPLEMENTED"):
        await served.client.reset_prefix_cache()
    assert served.engine.num_resets == 0


async def test_a_reset_says_whether_it_was_done():
    engine = FakeEngine(interval_s=None)
    async with serving(engine, enable_cache_service=True) as s:
        assert await s.client.reset_prefix_cache() is True
        stream = s.client.stream(GenerateRequest(prompt="x"))
        first = asyncio.create_task(anext(stream))
        await until(lambda: engine.live)
        assert await s.client.reset_prefix_cache() is False
        engine.step()
        await first
        await stream.aclose()
    assert engine.num_resets == 2


async def test_events_arrive_as_they_were_and_a_reader_that_leaves_is_forgotten():
    engine = FakeEngine()
    engine.kv_batches = BATCHES
    async with serving(engine, enable_cache_service=True) as s:
        call = events_of(s.channel)
        async with asyncio.timeout(TIMEOUT_S):
            first, second = [await call.read() for _ in range(2)]
        assert (first.sequence, second.sequence) == (4, 5)
        held: dict = {}
        held_by([first], held)
        assert held == {b"a": (b"root", (1, 2, 3)), b"b": (b"a", (4, 5, 6))}
        held_by([second], held)
        assert held == {b"a": (b"root", (1, 2, 3)), b"c": (b"a", (7, 8, 9))}
        assert engine.num_kv_readers == 1
        call.cancel()
        await until(lambda: engine.num_kv_readers == 0)


async def test_both_calls_are_unavailable_while_there_is_no_engine_and_refuse_unknown_fields():
    async with serving(loaded=False, enable_cache_service=True) as s:
        for method, code in ((b"", "UNAVAILABLE"), (b"\x0a\x01x", "INVALID_ARGUMENT")):
            calls = (
                s.channel.unary_unary(f"/{CACHE_SERVICE}/ResetPrefixCache")(method),
                s.channel.unary_unary(f"/{CACHE_SERVICE}/KvEvents")(method),
            )
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code().name == code


@pytest.mark.parametrize("max_tokens", [1, 4, 7, 64, 10_000])
def test_a_long_batch_comes_in_messages_of_bounded_size_that_say_the_same(max_tokens):
    names = [bytes([i]) for i in range(100)]
    tokens = tuple(range(400))
    events = (Cleared(), Stored(b"r", tuple(names), tokens), *(Removed((n,)) for n in names[50:]))
    messages = list(batch_to_proto(KvEventBatch(9, events), max_tokens))
    whole: dict = {}
    held_by(messages, whole)
    assert list(whole) == names[:50]
    assert whole[names[49]] == (names[48], tokens[4 * 49 : 4 * 50])
    assert {m.sequence for m in messages} == {9}
    for message in messages:
        assert sum(len(e.stored.token_ids) for e in message.events) < max_tokens + max(
            max_tokens, 4
        )
    assert (len(messages) == 1) == (max_tokens == 10_000)


async def test_a_router_can_rebuild_what_a_real_engine_has_cached():
    engine = arranged(num_pages=1 + 12)
    short = SamplingParams(max_tokens=2)
    async with serving_real(engine, enable_cache_service=True) as s:
        call = events_of(s.channel)
        held: dict = {}
        async with asyncio.timeout(TIMEOUT_S):
            held_by([await call.read()], held)
            assert held == {}
            for i in range(5):  # the pool holds 12 pages: the oldest of these 15 go
                prompt = prompt_of(50, i)
                await s.client.generate(GenerateRequest(prompt_token_ids=prompt, sampling=short))
            cached = {d for event in engine.scheduler.cache.snapshot() for d in event.digests}
            while set(held) != cached:
                held_by([await call.read()], held)
            assert tuple(prompt[:16]) in {tokens for _, tokens in held.values()}
            assert await s.client.reset_prefix_cache()
            while held:
                held_by([await call.read()], held)
        call.cancel()
        await until(lambda: engine.scheduler.cache.events is None)
