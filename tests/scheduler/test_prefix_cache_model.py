"""PrefixCache against a dictionary of prefixes: what is cached, in which order it is evicted, which
page holds what, and what a router knows from events."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.kv_events import (
    CacheKeys,
    Cleared,
    KvEvent,
    Removed,
    Stored,
    page_digest,
    root_digest,
    token_bytes,
)
from scheduler.page_pool import PagePool
from scheduler.prefix_cache import Node, PrefixCache

PAGE = 2
NUM_PAGES = 12
TENANTS = st.sampled_from([(), (("tenant", "x"),), (("adapter", "x"),)])
TEXTS = st.lists(st.sampled_from("aab"), min_size=1, max_size=7).map("".join)  # one letter a page

Prefix = tuple[CacheKeys, str]  # names its last page


def tokens(text: str) -> bytes:
    return token_bytes([ord(letter) for letter in text for _ in range(PAGE)])


def prefixes(keys: CacheKeys, text: str) -> list[Prefix]:
    return [(keys, beginning) for beginning in accumulate(text)]


def name(prefix: Prefix) -> bytes:
    keys, text = prefix
    digest = root_digest(keys)
    for letter in text:
        digest = page_digest(digest, tokens(letter))
    return digest


class Router:
    """What is known from events alone."""

    def __init__(self) -> None:
        self.cached: set[bytes] = set()

    def __call__(self, event: KvEvent) -> None:
        if isinstance(event, Stored):
            assert len(event.token_ids) == PAGE * len(event.digests)
            parent = event.parent
            for i, digest in enumerate(event.digests):
                page = token_bytes(event.token_ids[i * PAGE : (i + 1) * PAGE])
                assert digest == page_digest(parent, page), "a name that its tokens do not give"
                assert digest not in self.cached, "stored twice"
                self.cached.add(digest)
                parent = digest
        elif isinstance(event, Removed):
            for digest in event.digests:
                self.cached.remove(digest)
        else:
            assert isinstance(event, Cleared)
            self.cached.clear()


@dataclass(eq=False)
class Holder:
    """A request: `text` is all it will ever hold, its first `num_held` pages are in the tree."""

    keys: CacheKeys
    text: str
    node: Node
    num_held: int
    pages: np.ndarray  # all of them, those not in the tree yet too

    def held(self) -> list[Prefix]:
        return prefixes(self.keys, self.text)[: self.num_held]


@dataclass
class Entry:
    """What the model knows of a cached page."""

    page: int
    locks: int = 0
    last_used: int = 0


class CacheAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(PagePool(1 + NUM_PAGES), PAGE)
        self.router = Router()
        self.cache.events = self.router
        self.model: dict[Prefix, Entry] = {}
        self.holders: list[Holder] = []
        self.others: list[np.ndarray] = []  # pages taken for something else
        self.time = 0

    # ---- the model --------------------------------------------------------------------------

    def num_free(self) -> int:
        taken = sum(map(len, self.others)) + sum(len(h.text) - h.num_held for h in self.holders)
        return NUM_PAGES - len(self.model) - taken

    def num_evictable(self) -> int:
        return sum(not entry.locks for entry in self.model.values())

    def num_cached(self, keys: CacheKeys, text: str) -> int:
        return sum(prefix in self.model for prefix in prefixes(keys, text))

    def lock(self, held: list[Prefix], count: int) -> None:
        self.time += 1
        for prefix in held:
            self.model[prefix].locks += count
            self.model[prefix].last_used = self.time

    def evict(self, count: int) -> None:
        """One page at a time: of those that nothing builds on, the one used longest ago."""
        for _ in range(count):
            built_on = {(keys, text[:-1]) for keys, text in self.model}
            idle = [p for p, e in self.model.items() if not e.locks and p not in built_on]
            del self.model[min(idle, key=lambda prefix: self.model[prefix].last_used)]

    def allocate(self, count: int) -> np.ndarray | None:
        most = self.num_free() + self.num_evictable()
        assert self.cache.num_available == most
        pages = self.cache.allocate(count)
        assert (pages is None) == (count > most)
        if pages is not None:
            self.evict(max(count - self.num_free(), 0))
        return pages

    # ---- what may happen --------------------------------------------------------------------

    @rule(keys=TENANTS, text=TEXTS, most=st.integers(0, 7))
    def start(self, keys, text, most):
        """A request comes: it locks what is cached, and takes pages for the rest."""
        most = min(most, len(text))
        num_cached = self.num_cached(keys, text[:most])
        held = prefixes(keys, text)[:num_cached]
        idle = sum(not self.model[prefix].locks for prefix in held)
        assert self.cache.match(keys, tokens(text), most) == (num_cached, idle)
        node, shared = self.cache.acquire(keys, tokens(text), most)
        assert shared.tolist() == [self.model[prefix].page for prefix in held]
        self.lock(held, 1)
        fresh = self.allocate(len(text) - num_cached)
        if fresh is None:
            self.cache.release(node)
            self.lock(held, -1)
        else:
            pages = np.concatenate([shared, fresh])
            self.holders.append(Holder(keys, text, node, num_cached, pages))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), count=st.integers(1, 4))
    def extend(self, data, count):
        """It has computed some pages; equal ones may be in the tree by now."""
        holder = data.draw(st.sampled_from(self.holders))
        old, end = holder.num_held, min(holder.num_held + count, len(holder.text))
        own = holder.pages[old:end]
        known = self.num_cached(holder.keys, holder.text[:end]) - old
        used = self.cache.extend(holder.node, tokens(holder.text), old, own)
        holder.node, holder.pages[old:end] = used
        holder.num_held = end
        for prefix, page in zip(holder.held()[old + known :], own[known:].tolist(), strict=True):
            self.model[prefix] = Entry(page)
        for prefix in holder.held()[old:]:
            self.model[prefix].locks += 1
        self.lock(holder.held(), 0)
        assert holder.pages[:end].tolist() == [self.model[p].page for p in holder.held()]

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), more=st.text("ab", max_size=3), goes_on=st.booleans())
    def leave(self, data, more, goes_on):
        """It ends; maybe the next turn of the conversation follows."""
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.cache.pool.free(holder.pages[holder.num_held :])
        self.cache.release(holder.node)
        self.lock(holder.held(), -1)
        if goes_on:
            self.start(holder.keys, holder.text + more, len(holder.text + more))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fail(self, data):
        """One ends, and what it computed may be wrong."""
        holder = min(self.holders, key=lambda h: h.num_held)  # others build on it, more likely
        self.holders.remove(holder)
        self.cache.pool.free(holder.pages[holder.num_held :])
        self.cache.release(holder.node)
        self.lock(holder.held(), -1)
        known = holder.text[: data.draw(st.integers(holder.num_held, len(holder.text)))]
        self.cache.forget(holder.keys, tokens(known))
        idle = [p for p in prefixes(holder.keys, known) if p in self.model]
        idle = [prefix for prefix in idle if not self.model[prefix].locks]
        if idle:
            keys, first = idle[0]
            for prefix in list(self.model):
                if prefix[0] == keys and prefix[1].startswith(first):
                    del self.model[prefix]

    @rule(count=st.integers(1, NUM_PAGES + 1))
    def press(self, count):
        """Something else wants pages."""
        pages = self.allocate(count)
        if pages is not None:
            self.others.append(pages)

    @precondition(lambda self: self.others)
    @rule()
    def relieve(self):
        self.cache.pool.free(self.others.pop())

    @rule()
    def reset(self):
        in_use = any(entry.locks for entry in self.model.values())
        assert self.cache.reset() != in_use
        if not in_use:
            self.model.clear()

    # ---- what always holds ------------------------------------------------------------------

    @invariant()
    def tree_and_model_agree(self):
        counted = (self.cache.num_cached, self.cache.num_evictable, self.cache.pool.num_free)
        assert counted == (len(self.model), self.num_evictable(), self.num_free())
        for keys, text in self.model:
            assert self.cache.match(keys, tokens(text), len(text))[0] == len(text)
        self.cache.check_integrity()
        private = [holder.pages[holder.num_held :] for holder in self.holders]
        self.cache.pool.check_integrity(
            np.concatenate([self.cache.held_pages(), *private, *self.others])
        )

    @invariant()
    def events_tell_all_that_is_cached_and_a_snapshot_tells_the_same(self):
        assert self.router.cached == {name(prefix) for prefix in self.model}
        late = Router()
        for event in self.cache.snapshot():
            late(event)
        assert late.cached == self.router.cached


class TestCacheAgainstModel(CacheAgainstModel.TestCase):
    settings = settings(
        max_examples=settings.default.max_examples, stateful_step_count=50, derandomize=True
    )

    def test_no_sequence_of_calls_tells_tree_and_model_apart(self):
        self.runTest()
