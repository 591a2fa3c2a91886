"""Which pages a request holds, from its start to its leaving: shared ones of the prefix cache
first, then its own. Knows requests, slots and pages: not who should run."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from scheduler.config import SchedulerConfig
from scheduler.kv_events import BYTES_PER_TOKEN
from scheduler.page_pool import PagePool
from scheduler.preemption import Preemption
from scheduler.prefix_cache import PrefixCache
from scheduler.request import Request
from scheduler.slots import Slots


class RequestPages:
    """The pool, the prefix cache, and what each slot has of them.

    `in_work` names the next full page of each prompt in prefill, so that another prompt that needs
    the same page can wait for it instead of computing it too.
    """

    def __init__(self, config: SchedulerConfig, slots: Slots, preemption: Preemption) -> None:
        self.pool = PagePool(config.num_pages)
        self.cache = PrefixCache(self.pool, config.page_size, config.enable_prefix_cache)
        self.in_work: dict[Hashable, Request] = {}
        self._name_of: dict[Request, Hashable] = {}  # its entry of in_work
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

    def offer(self, request: Request) -> None:
        """Enters the pages of a running request that are full, and whose ids are known, in the
        prefix cache."""
        if request.prefix is None:
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

    # ---- what others are computing ----------------------------------------------------------

    def num_cached_tokens(self, request: Request) -> int:
        """How many of a request's tokens the prefix cache would spare, were it started now."""
        return self._cached_pages(request)[0] * self._page_size

    def page_in_work(self, request: Request) -> Hashable | None:
        """Names the page that a waiting request lacks first, if a running one will compute it."""
        if not self.in_work:
            return None
        num_cached, _ = self._cached_pages(request)
        tokens = request.known_bytes()
        if num_cached >= self._most_shared(request, tokens):
            return None
        name = self._name(request, tokens, num_cached)
        return name if name in self.in_work else None

    def announce(self, request: Request) -> None:
        """Names the next full page of its prompt that a running request will compute."""
        if request.prefix is None:
            return
        self._forget_work(request)
        next_page = request.num_prefix_pages
        if (next_page + 1) * self._page_size <= request.num_prompt_tokens:
            name = self._name(request, request.known_bytes(), next_page)
            self.in_work[name] = request
            self._name_of[request] = name

    def _forget_work(self, request: Request) -> None:
        name = self._name_of.pop(request, None)
        if name is not None and self.in_work.get(name) is request:
            del self.in_work[name]

    def _name(self, request: Request, tokens: bytes, page: int) -> Hashable:
        end = (page + 1) * self._page_size * BYTES_PER_TOKEN
        return hash((request.cache_keys, tokens[:end]))  # two of one name: one waits in vain

    def _cached_pages(self, request: Request) -> tuple[int, int]:
        """How many of a request's pages are cached, and how many of those are evictable."""
        if not self.cache.enabled:
            return 0, 0
        tokens = request.known_bytes()
        return self.cache.match(request.cache_keys, tokens, self._most_shared(request, tokens))

    def _most_shared(self, request: Request, tokens: bytes) -> int:
        """The full pages that may come from the cache: at least one token must be computed."""
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
