"""Readers of the prefix cache's events: all that is cached, then each change, in order, though they
be slow."""

from __future__ import annotations

import asyncio

import pytest

from jserve.engine.kv_events import Cleared, KvEventFeed, KvSubscription, Removed, Stored
from jserve.errors import EngineDead

TIMEOUT_S = 20.0


class FakeCache:
    """Holds pages named by single bytes, each behind none."""

    def __init__(self) -> None:
        self.events = None
        self.names: list[bytes] = []

    def snapshot(self) -> list[Stored]:
        return [Stored(b"", (name,), (1, 2)) for name in self.names]

    def store(self, name: bytes) -> None:
        self.names.append(name)
        if self.events:
            self.events(self.snapshot()[-1])

    def remove(self, name: bytes) -> None:
        self.names.remove(name)
        if self.events:
            self.events(Removed((name,)))


class Reader:
    """Applies what it reads, as a router would."""

    def __init__(self, max_batches: int = 8) -> None:
        self.subscription = KvSubscription(max_batches)
        self.names: set[bytes] = set()
        self.sequences: list[int] = []
        self.num_starts = 0

    async def read(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            batch = await self.subscription.get()
        self.sequences.append(batch.sequence)
        for event in batch.events:
            if isinstance(event, Stored):
                self.names |= set(event.digests)
            elif isinstance(event, Removed):
                self.names -= set(event.digests)
            else:
                self.names.clear()
                self.num_starts += 1


@pytest.fixture
def cache() -> FakeCache:
    return FakeCache()


@pytest.fixture
def feed(cache) -> KvEventFeed:
    return KvEventFeed(cache, lambda function, *args: function(*args))


async def test_a_reader_hears_what_is_cached_and_then_each_turns_changes(cache, feed):
    cache.store(b"a")
    reader = Reader()
    feed.subscribe(reader.subscription)
    cache.store(b"b")
    cache.store(b"c")
    feed.publish()
    cache.remove(b"a")
    feed.publish()
    feed.publish()
    await reader.read()
    assert reader.names == {b"a"}
    await reader.read()
    assert reader.names == {b"a", b"b", b"c"}
    await reader.read()
    assert reader.names == {b"b", b"c"}
    assert reader.sequences == [0, 1, 2]


async def test_a_second_reader_is_not_told_twice_what_came_before_it(cache, feed):
    first, second = Reader(), Reader()
    feed.subscribe(first.subscription)
    cache.store(b"a")
    feed.subscribe(second.subscription)
    cache.store(b"b")
    feed.publish()
    for reader, num_batches in ((first, 3), (second, 2)):
        for _ in range(num_batches):
            await reader.read()
        assert reader.names == {b"a", b"b"}
        assert reader.subscription._batches.empty()
    assert (first.sequences, second.sequences) == ([0, 1, 2], [1, 2])


async def test_a_reader_that_falls_behind_holds_little_and_is_told_all_anew(cache, feed):
    slow, fast = Reader(max_batches=3), Reader(max_batches=1000)
    feed.subscribe(slow.subscription)
    feed.subscribe(fast.subscription)
    for i in range(200):
        cache.store(bytes([i]))
        if i >= 10:
            cache.remove(bytes([i - 10]))
        feed.publish()
        assert slow.subscription._batches.qsize() <= 3
    assert slow.subscription.is_behind
    feed.subscribe(slow.subscription)
    cache.store(b"last")
    feed.publish()
    await slow.read()
    await slow.read()
    assert (slow.names, slow.num_starts) == (set(cache.names), 1)
    assert slow.sequences == [200, 201]
    while not fast.subscription._batches.empty():
        await fast.read()
    assert fast.names == set(cache.names)


async def test_without_readers_the_cache_is_told_to_say_nothing(cache, feed):
    assert cache.events is None
    reader = Reader()
    feed.subscribe(reader.subscription)
    assert cache.events is not None
    cache.store(b"a")
    feed.unsubscribe(reader.subscription)
    feed.unsubscribe(reader.subscription)
    assert cache.events is None
    feed.publish()
    await reader.read()
    assert reader.subscription._batches.empty()


async def test_a_failed_subscription_gives_what_it_has_and_then_its_error(cache, feed):
    reader = Reader()
    feed.subscribe(reader.subscription)
    reader.subscription.fail(EngineDead("gone"))
    await reader.read()
    with pytest.raises(EngineDead):
        await reader.read()


async def test_a_slow_reader_hears_of_the_end_whatever_was_on_its_way_then(cache, feed):
    reader = Reader(max_batches=1)
    feed.subscribe(reader.subscription)
    reader.subscription.fail(EngineDead("the engine has stopped"))
    cache.store(b"a")
    feed.publish()
    await reader.read()
    with pytest.raises(EngineDead):
        await reader.read()


def test_the_events_are_those_of_the_scheduler():
    from scheduler import kv_events

    assert kv_events.KvEvent == Stored | Removed | Cleared
