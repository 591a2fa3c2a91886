"""Remembers which pages hold which prefixes, and takes back the least useful ones. Knows token ids
and page ids: not requests, not arrays on devices."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from scheduler.kv_events import (
    BYTES_PER_TOKEN,
    CacheKeys,
    Cleared,
    Digest,
    KvEvent,
    Removed,
    Stored,
    page_digest,
    root_digest,
)
from scheduler.page_pool import PagePool


class Node:
    """A run of full pages that always follow each other; branches begin at its children.

    `locks` counts the holders of this node and of all below it, so a node with none is evictable,
    and so is everything below it.
    """

    __slots__ = ("children", "digests", "last_used", "locks", "pages", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: bytes, pages: np.ndarray) -> None:
        self.parent = parent
        self.tokens = tokens  # of all its pages, BYTES_PER_TOKEN each
        self.pages = pages  # i32[n]
        self.children: dict[bytes, Node] = {}  # by the tokens of their first page
        self.locks = 0
        self.last_used = 0
        self.digests: list[Digest] = []  # of its first pages, as far as somebody asked


class Root(Node):
    __slots__ = ("keys",)

    def __init__(self, keys: CacheKeys) -> None:
        super().__init__(None, b"", np.zeros(0, np.int32))
        self.keys = keys


class PrefixCache:
    """Page allocation with reuse: a radix tree of full pages for each set of cache keys.

    Every page that is not free belongs to the tree or to one request. A request locks the deepest
    node that it uses. Unlocked pages stay until they are needed; then the tails of the leaves that
    were used longest ago go first.
    """

    def __init__(self, pool: PagePool, page_size: int, enabled: bool = True) -> None:
        self.pool = pool
        self.enabled = enabled
        self.events: Callable[[KvEvent], None] | None = None
        self.num_cached = 0
        self.num_evictable = 0
        self.num_evicted = 0  # ever
        self._page_bytes = page_size * BYTES_PER_TOKEN
        self._roots: dict[CacheKeys, Root] = {}
        self._leaves: list[tuple[int, int, Node]] = []  # heap; out-of-date entries are skipped
        self._num_nodes = 0
        self._sequence = itertools.count(1)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return self.pool.num_free + self.num_evictable

    def allocate(self, count: int) -> np.ndarray | None:
        """Returns `count` pages, evicting as many as it takes; None when there are not enough."""
        if count > self.num_available:
            return None
        if count > self.pool.num_free:
            self._evict(count - self.pool.num_free)
        return self.pool.allocate(count)

    def match(self, keys: CacheKeys, tokens: bytes, most: int) -> tuple[int, int]:
        """Returns how many of the first `most` pages of `tokens` are cached, and how many of those
        are evictable. Changes nothing."""
        root = self._roots.get(keys)
        if root is None:
            return 0, 0
        at: Node | None
        at, inside, num_cached = self._walk(root, tokens, 0, most)
        num_idle = 0
        while at is not None and not at.locks:  # what is above a locked node is locked
            num_idle += inside
            at = at.parent
            inside = 0 if at is None else len(at.pages)
        return num_cached, num_idle

    def end_of(self, keys: CacheKeys, tokens: bytes, most: int) -> tuple[Node | None, int]:
        """Returns how many of the first `most` pages of `tokens` are cached, and the node that ends
        there; None where they end inside a node. Changes nothing."""
        root = self._roots.get(keys)
        if root is None:
            return None, 0
        node, inside, num_cached = self._walk(root, tokens, 0, most)
        return (node if inside == len(node.pages) else None), num_cached

    def acquire(self, keys: CacheKeys, tokens: bytes, most: int) -> tuple[Node, np.ndarray]:
        """Locks the longest cached prefix, at most `most` pages; returns its node and its pages."""
        root = self._roots.get(keys)
        if root is None:
            root = self._roots[keys] = Root(keys)
        node = self._reach(root, tokens, 0, most)
        self._lock(node)
        return node, self._path_pages(node)

    def extend(
        self, node: Node, tokens: bytes, held: int, pages: np.ndarray
    ) -> tuple[Node, np.ndarray]:
        """Gives the pages i32[n] that follow the `held` pages of a locked node to the tree.

        Returns the node to hold instead and the n pages to use: where the tree has pages of equal
        content, those; the caller's copies are freed.
        """
        end = held + len(pages)
        target = self._reach(node, tokens, held, end)
        known = self._path_pages(target)[held:]
        self.pool.free(pages[: len(known)])
        fresh = pages[len(known) :]
        if len(fresh):
            size = self._page_bytes
            new_tokens = tokens[(end - len(fresh)) * size : end * size]
            target = self._append(target, node, new_tokens, fresh.copy())
        if target is not node:
            self._lock(target)
            self.release(node)
        return target, np.concatenate([known, fresh])

    def release(self, node: Node) -> None:
        """Drops a holder's lock. What nobody holds stays cached, evictable."""
        now = next(self._sequence)
        at: Node | None = node
        while at is not None:
            at.locks -= 1
            at.last_used = now
            assert at.locks >= 0, "a node is released more often than locked"
            if at.locks == 0:
                self.num_evictable += len(at.pages)
                self._offer_leaf(at)
            at = at.parent

    def forget(self, keys: CacheKeys, tokens: bytes) -> None:
        """Removes the pages of `tokens` that nobody holds, and all that was computed behind them: a
        request with these tokens failed, so they may be spoiled. Who holds the others shows whether
        those are: he succeeds, or fails and they are removed in turn."""
        at: Node | None = self._roots.get(keys)
        if at is None:
            return
        at, _, _ = self._walk(at, tokens, 0, len(tokens) // self._page_bytes)
        doomed: list[Node] = []
        while at is not None and at.parent is not None and not at.locks:
            doomed, at = [at], at.parent
        for node in doomed:
            doomed += node.children.values()
        for node in reversed(doomed):  # children before parents
            self._shorten(node, 0)

    def reset(self) -> bool:
        """Forgets everything; False, and no change, while a request uses a cached page."""
        if self.num_evictable != self.num_cached:
            return False
        events, self.events = self.events, None
        self._evict(self.num_cached)
        self.events = events
        if events:
            events(Cleared())
        return True

    def snapshot(self) -> list[Stored]:
        """Returns everything that is cached, parents before children."""
        return [self._stored(node, 0) for node in self._nodes() if node.parent is not None]

    # ---- the tree ---------------------------------------------------------------------------

    def _walk(self, node: Node, tokens: bytes, at: int, end: int) -> tuple[Node, int, int]:
        """Follows `tokens` from page `at` below `node` to page `end` at most. Returns the deepest
        node touched, how many of its pages match, and the page reached."""
        inside, size = len(node.pages), self._page_bytes
        while at < end:
            child = node.children.get(tokens[at * size : (at + 1) * size])
            if child is None:
                break
            most = min(len(child.pages), end - at)
            if most == len(child.pages) and tokens.startswith(child.tokens, at * size):
                inside = most
            else:
                inside = common_pages(child.tokens, tokens[at * size :], most, size)
            node, at = child, at + inside
            if inside < len(child.pages):
                break
        return node, inside, at

    def _reach(self, node: Node, tokens: bytes, at: int, end: int) -> Node:
        """The same, as a node that ends exactly there: one that matches in part is split."""
        node, inside, _ = self._walk(node, tokens, at, end)
        return node if inside == len(node.pages) else self._split(node, inside)

    def _split(self, node: Node, count: int) -> Node:
        """Moves the first `count` pages of a node to a new parent, and returns that. The node keeps
        its tail, so whoever holds it still holds all of it."""
        assert node.parent is not None, "a root has no pages to split"
        cut = count * self._page_bytes
        head = Node(node.parent, node.tokens[:cut], node.pages[:count])
        head.locks, head.last_used = node.locks, node.last_used
        node.parent.children[node.tokens[: self._page_bytes]] = head
        head.children[node.tokens[cut : cut + self._page_bytes]] = node
        node.parent, node.tokens, node.pages = head, node.tokens[cut:], node.pages[count:]
        head.digests, node.digests = node.digests[:count], node.digests[count:]
        self._num_nodes += 1
        return head

    def _append(self, target: Node, holder: Node, tokens: bytes, fresh: np.ndarray) -> Node:
        """Adds pages behind `target`: to the node itself where only its holder knows it."""
        if target is holder and target.parent and target.locks == 1 and not target.children:
            old = len(target.pages)
            target.tokens += tokens
            target.pages = np.concatenate([target.pages, fresh])
            leaf = target
        else:
            old = 0
            leaf = Node(target, tokens, fresh)
            target.children[tokens[: self._page_bytes]] = leaf
            self.num_evictable += len(fresh)  # until it is locked
            self._num_nodes += 1
        self.num_cached += len(fresh)
        if self.events:
            self.events(self._stored(leaf, old))
        return leaf

    def _lock(self, node: Node) -> None:
        now = next(self._sequence)
        at: Node | None = node
        while at is not None:
            if at.locks == 0:
                self.num_evictable -= len(at.pages)
            at.locks += 1
            at.last_used = now
            at = at.parent

    def _path_pages(self, node: Node) -> np.ndarray:
        """The pages from the root to the end of `node`."""
        parts = []
        at: Node | None = node
        while at is not None:
            parts.append(at.pages)
            at = at.parent
        return np.concatenate(parts[::-1])

    # ---- eviction ---------------------------------------------------------------------------

    def _offer_leaf(self, node: Node) -> None:
        """Lists an unlocked leaf for eviction; lets go of a root that leads nowhere."""
        if node.children or node.locks:
            return
        if isinstance(node, Root):
            del self._roots[node.keys]
            return
        heapq.heappush(self._leaves, (node.last_used, next(self._sequence), node))
        if len(self._leaves) > 2 * self._num_nodes + 64:  # mostly out of date
            self._leaves = [entry for entry in self._leaves if self._is_current(entry)]
            heapq.heapify(self._leaves)

    def _is_current(self, entry: tuple[int, int, Node]) -> bool:
        last_used, _, node = entry
        is_leaf = not node.children and not node.locks and len(node.pages) > 0
        return is_leaf and node.last_used == last_used

    def _evict(self, count: int) -> None:
        while count > 0:
            entry = heapq.heappop(self._leaves)
            if not self._is_current(entry):
                continue
            leaf = entry[2]
            kept = max(len(leaf.pages) - count, 0)
            count -= len(leaf.pages) - kept
            self._shorten(leaf, kept)
            if kept:
                heapq.heappush(self._leaves, entry)

    def _shorten(self, leaf: Node, kept: int) -> None:
        """Frees all but the first `kept` pages of an idle leaf, which goes with the last."""
        gone = leaf.pages[kept:]
        if self.events:
            self.events(Removed(tuple(self._digests(leaf)[kept:])))
        self.pool.free(gone)
        self.num_cached -= len(gone)
        self.num_evictable -= len(gone)
        self.num_evicted += len(gone)
        first, parent = leaf.tokens[: self._page_bytes], leaf.parent
        leaf.pages, leaf.tokens = leaf.pages[:kept], leaf.tokens[: kept * self._page_bytes]
        del leaf.digests[kept:]
        if not kept and parent is not None:
            del parent.children[first]
            self._num_nodes -= 1
            self._offer_leaf(parent)

    # ---- what others look at ----------------------------------------------------------------

    def _digests(self, node: Node) -> list[Digest]:
        size, digests = self._page_bytes, node.digests
        for page in range(len(digests), len(node.pages)):
            before = digests[-1] if digests else self._last_digest(node.parent)
            digests.append(page_digest(before, node.tokens[page * size : (page + 1) * size]))
        return digests

    def _last_digest(self, node: Node | None) -> Digest:
        if isinstance(node, Root):
            return root_digest(node.keys)
        assert node is not None, "every node has a root"
        return self._digests(node)[-1]

    def _stored(self, node: Node, first: int) -> Stored:
        """What says that the pages of `node` from `first` on are cached."""
        digests = self._digests(node)
        parent = digests[first - 1] if first else self._last_digest(node.parent)
        ids = np.frombuffer(node.tokens[first * self._page_bytes :], np.int32)
        return Stored(parent, tuple(digests[first:]), tuple(ids.tolist()))

    def _nodes(self) -> Iterator[Node]:
        stack: list[Node] = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def held_pages(self) -> np.ndarray:
        """Returns every page in the tree."""
        return np.concatenate([np.zeros(0, np.int32), *(node.pages for node in self._nodes())])

    def check_integrity(self) -> None:
        """Asserts that counts, locks and the tree's shape agree."""
        cached = evictable = nodes = 0
        for node in self._nodes():
            cached += len(node.pages)
            evictable += 0 if node.locks else len(node.pages)
            nodes += node.parent is not None
            assert len(node.tokens) == len(node.pages) * self._page_bytes, "tokens without pages"
            assert node.locks >= sum(child.locks for child in node.children.values()), "locks"
            for first, child in node.children.items():
                assert child.tokens[: self._page_bytes] == first, "a child under a wrong name"
                assert child.parent is node, "a child of another parent"
        counted = (self.num_cached, self.num_evictable, self._num_nodes)
        assert counted == (cached, evictable, nodes), f"{counted=}, {(cached, evictable, nodes)=}"
        listed = {id(entry[2]) for entry in self._leaves if self._is_current(entry)}
        for node in self._nodes():
            if node.parent is not None and not node.children and not node.locks:
                assert id(node) in listed, "an evictable leaf is not listed"


def common_pages(a: bytes, b: bytes, most: int, page_bytes: int) -> int:
    """How many of the first `most` pages of two runs of tokens are equal."""
    ends = most * page_bytes
    left = np.frombuffer(a[:ends], np.int32).reshape(most, -1)
    right = np.frombuffer(b[:ends], np.int32).reshape(most, -1)
    differs = (left != right).any(axis=1)
    return int(differs.argmax()) if differs.any() else most
