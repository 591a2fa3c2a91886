"""Tells readers which pages the prefix cache holds, as they come and go. Knows events and queues:
not how they come about, no transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from scheduler.kv_events import Cleared, KvEvent, Removed, Stored

__all__ = [
    "Cleared",
    "KvEvent",
    "KvEventBatch",
    "KvEventFeed",
    "KvSubscription",
    "Removed",
    "Stored",
]

MAX_BATCHES = 1024  # that may wait for a reader


class KvEventBatch(NamedTuple):
    """What happened in one turn of the engine. Numbers rise by one from batch to batch; after a gap
    comes a batch that begins with Cleared and then tells all that is cached."""

    sequence: int
    events: tuple[KvEvent, ...]


class KvSubscription:
    """One reader's batches, for the event loop's thread. It begins with all that is cached, and
    so it does again after the reader has been too slow."""

    def __init__(self, max_batches: int = MAX_BATCHES) -> None:
        self.is_behind = True  # until it is told all anew
        self._has_failed = False
        self._max_batches = max_batches
        self._batches: asyncio.Queue[KvEventBatch | Exception] = asyncio.Queue()

    def begin(self, whole: KvEventBatch) -> None:
        self.is_behind = False
        self._batches.put_nowait(whole)

    def offer(self, batch: KvEventBatch) -> None:
        """Adds a batch; one too many drops all that wait, but for an error."""
        if self.is_behind or self._has_failed:
            return
        if self._batches.qsize() < self._max_batches:
            self._batches.put_nowait(batch)
            return
        self.is_behind = True
        while not self._batches.empty():
            self._batches.get_nowait()

    def fail(self, error: Exception) -> None:
        """Lets an error be the last that the reader gets."""
        self._has_failed = True
        self._batches.put_nowait(error)

    async def get(self) -> KvEventBatch:
        """Returns the next batch. Raises what the subscription failed with."""
        item = await self._batches.get()
        if isinstance(item, Exception):
            raise item
        return item


class Cache(Protocol):
    """What the feed needs of a prefix cache."""

    events: Callable[[KvEvent], None] | None  # called with each event; None costs nothing

    def snapshot(self) -> list[Stored]: ...


class KvEventFeed:
    """The cache's side, for the engine's thread.

    Args:
      post: calls a function of the event loop's thread there, in order.
    """

    def __init__(self, cache: Cache, post: Callable[..., Any]) -> None:
        self._cache = cache
        self._post = post
        self._pending: list[KvEvent] = []
        self._subscriptions: set[KvSubscription] = set()
        self._sequence = 0

    def subscribe(self, subscription: KvSubscription) -> None:
        """Tells a subscription all that is cached now, and from now on what changes."""
        self.publish()  # is in what follows
        self._subscriptions.add(subscription)
        self._cache.events = self._pending.append
        whole = KvEventBatch(self._sequence, (Cleared(), *self._cache.snapshot()))
        self._post(subscription.begin, whole)

    def unsubscribe(self, subscription: KvSubscription) -> None:
        self._subscriptions.discard(subscription)
        if not self._subscriptions:
            self._cache.events = None
            self._pending.clear()

    def publish(self) -> None:
        """Sends off what happened since the last call."""
        if self._pending:
            self._sequence += 1
            batch = KvEventBatch(self._sequence, tuple(self._pending))
            self._pending.clear()
            for subscription in self._subscriptions:
                self._post(subscription.offer, batch)
