"""Which pages a request holds, from its start to its leaving: shared ones of the prefix cache
first, then its own. Knows requests, slots and pages: not who should run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scheduler.config import SchedulerConfig
from scheduler.kv_events import BYTES_PER_TOKEN
from scheduler.page_pool import PagePool
from scheduler.preemption import Preemption
from scheduler.prefix_cache import Node, PrefixCache, common_pages
from scheduler.request import Request
from scheduler.slots import Slots


class Work(NamedTuple):
    """The first `num_pages` pages of a prompt that a running request is computing."""

    owner: Request
    num_pages: int


class RequestPages:
    """The pool, the prefix cache, and what each slot has of them; and which page each prompt in
    prefill computes next, so that another one that needs it can wait instead of computing it too.
    """

    def __init__(self, config: SchedulerConfig, slots: Slots, preemption: Preemption) -> None:
        self.pool = PagePool(config.num_pages)
        self.cache = PrefixCache(self.pool, config.page_size, config.enable_prefix_cache)
        self._in_work: dict[tuple[Node, bytes], Request] = {}  # behind a node, a page's tokens
        self._work_of: dict[Request, tuple[Node, bytes]] = {}
        self._slots = slots
        self._preemption = preemption
        self._page_size = config.page_size

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def start(self, request: Request, spare: int) -> bool:
        """Gives a request a slot and pages for all of its tokens, cached ones where there are; its
        host pages are brought back. False, and no change, if less than `spare` pages would be left.

        Taking all of a prompt's pages at once keeps two half-prefilled prompts from blocking each
        other.
        """
        num_cached, num_idle = self._cached_pages(request)
        num_new = self.pages_for(request.num_tokens) - num_cached
        if self.cache.num_available - num_idle - num_new < spare:
            return False
        node, shared = None, np.zeros(0, np.int32)
        if self.cache.enabled:  # locked before anything is evicted for the rest
            tokens = request.known_bytes()
            node, shared = self.cache.acquire(request.cache_keys, tokens, num_cached)
        fresh = self.cache.allocate(num_new)
        assert fresh is not None, "the pages were counted just before"
        pages = np.concatenate([shared, fresh])
        num_computed = self._preemption.bring_back(request, pages, len(shared))
        self._slots.take(request, num_computed, pages)
        request.prefix, request.num_prefix_pages = node, len(shared)
        self.announce(request)
        return True

    def grow(self, slots: np.ndarray) -> bool:
        """Makes sure that each of these slots has a page for one more token; False, and no change,
        when there are too few."""
        table = self._slots
        lacking = slots[table.num_computed[slots] >= table.num_pages[slots] * self._page_size]
        if not lacking.size:
            return True
        pages = self.cache.allocate(lacking.size)
        if pages is None:
            return False
        table.page_table[lacking, table.num_pages[lacking]] = pages
        table.num_pages[lacking] += 1
        return True

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Makes sure that a running request has pages for so many tokens; False, and no change,
        when there are too few."""
        lacking = self.pages_for(num_tokens) - int(self._slots.num_pages[request.slot])
        pages = self.cache.allocate(max(lacking, 0))
        if pages is None:
            return False
        self._slots.add_pages(np.array([request.slot]), np.array([len(pages)]), pages)
        return True

    def offer(self, request: Request) -> None:
        """Enters the pages of a running request that are full, and whose ids are known, in the
        prefix cache; but for those of an embedding, which end with it: few prompts embedded come
        again, and those that chats share would have to go for them."""
        if request.prefix is None or request.sampling.pooling:
            return
        slot, held = request.slot, request.num_prefix_pages
        num_known = min(int(self._slots.num_computed[slot]), request.num_known_tokens)
        num_full = num_known // self._page_size
        if num_full > held:
            table = self._slots.page_table[slot]
            request.prefix, table[held:num_full] = self.cache.extend(
                request.prefix, request.known_bytes(), held, table[held:num_full]
            )
            request.num_prefix_pages = num_full

    def leave(self, request: Request) -> None:
        """Takes back all that a running request holds; its full pages stay cached."""
        self.offer(request)
        self._forget_work(request)
        self.pool.free(self._slots.pages(request)[request.num_prefix_pages :])
        if request.prefix is not None:
            self.cache.release(request.prefix)
        self._slots.leave(request)
        request.prefix, request.num_prefix_pages = None, 0

    def forget(self, request: Request) -> None:
        """Sees to it that nobody meets the pages of a request that failed."""
        self.cache.forget(request.cache_keys, request.known_bytes())

    # ---- what others are computing ----------------------------------------------------------

    def num_cached_tokens(self, request: Request) -> int:
        """How many of a request's tokens the prefix cache would spare, were it started now."""
        return self._cached_pages(request)[0] * self._page_size

    def awaited(self, request: Request) -> Work | None:
        """Returns what a waiting request had better wait for: pages of its prompt, the next one
        among them, that a running request is about to compute. None if there are none, or if that
        one is less urgent."""
        if not self._in_work:
            return None
        tokens = request.known_bytes()
        most = self._most_shared(request, tokens)
        node, num_cached = self.cache.end_of(request.cache_keys, tokens, most)
        if node is None or num_cached >= most:
            return None
        owner = self._in_work.get((node, self._page(tokens, num_cached)))
        if owner is None or request.priority < owner.priority:
            return None
        most = min(most, owner.num_prompt_tokens // self._page_size)
        size = self._page_size * BYTES_PER_TOKEN
        return Work(owner, common_pages(tokens, owner.known_bytes(), most, size))

    def is_in_work(self, work: Work) -> bool:
        """Whether there still is something to wait for."""
        owner, num_pages = work
        return owner in self._work_of and owner.num_prefix_pages < num_pages

    def announce(self, request: Request) -> None:
        """Tells others which full page of its prompt a running request computes next."""
        if request.prefix is None or request.sampling.pooling:
            return
        self._forget_work(request)
        next_page = request.num_prefix_pages
        if (next_page + 1) * self._page_size <= request.num_prompt_tokens:
            work = (request.prefix, self._page(request.known_bytes(), next_page))
            self._in_work[work] = request
            self._work_of[request] = work

    def _forget_work(self, request: Request) -> None:
        work = self._work_of.pop(request, None)
        if work is not None and self._in_work.get(work) is request:
            del self._in_work[work]

    def _page(self, tokens: bytes, page: int) -> bytes:
        size = self._page_size * BYTES_PER_TOKEN
        return tokens[page * size : (page + 1) * size]

    def _cached_pages(self, request: Request) -> tuple[int, int]:
        """How many of a request's pages are cached, and how many of those are evictable."""
        if not self.cache.enabled:
            return 0, 0
        tokens = request.known_bytes()
        return self.cache.match(request.cache_keys, tokens, self._most_shared(request, tokens))

    def _most_shared(self, request: Request, tokens: bytes) -> int:
        """The full pages that may come from the cache: at least one token must be computed, and all
        of a prompt of which something is wanted of each token."""
        if request.sampling.needs_whole_prompt and not request.num_output_tokens:
            return 0
        return min(
            (request.num_tokens - 1) // self._page_size,
            len(tokens) // (self._page_size * BYTES_PER_TOKEN),
        )

    def check_integrity(self) -> None:
        """Asserts that every page is free, cached, or one slot's own."""
        self.cache.check_integrity()
        held = [self.cache.held_pages()]
        for request in filter(None, self._slots.owners.tolist()):
            pages, shared = self._slots.pages(request), request.num_prefix_pages
            held.append(pages[shared:])
            assert np.isin(pages[:shared], held[0]).all(), "a shared page is not cached"
        self.pool.check_integrity(np.concatenate(held))
