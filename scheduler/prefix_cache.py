"""Remembers which pages hold which prefixes, and takes back the least useful ones. Knows token ids
and page ids: not requests, not arrays."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from hashlib import blake2b

from scheduler.page_pool import PagePool

Digest = bytes  # 128 bits: names a page by everything before it, so equal names mean equal content


def root_digest(keys: tuple[Hashable, ...]) -> Digest:
    """Returns the parent of a first page. `keys` are tagged pairs, ("adapter", id) and the like, so
    that no two kinds of key share one name space."""
    return blake2b(repr(keys).encode(), digest_size=16).digest()


def page_digest(parent: Digest, token_ids: Sequence[int]) -> Digest:
    """Returns the name of the full page of `token_ids` behind `parent`."""
    return blake2b(parent + array("i", token_ids).tobytes(), digest_size=16).digest()


class PrefixCache:
    """Page allocation with reuse: a tree of full pages, named by chained digests.

    The cache holds one reference of its own on every page in it. A cached page that nobody else
    uses is evictable and sits in `_lru`. Requests release their pages last page first, so leaves
    precede their parents there and are evicted before them. (A page may outlive a parent that was
    another request's; it is then out of reach until it is evicted.)
    """

    def __init__(self, pool: PagePool, enabled: bool = True) -> None:
        self.pool = pool
        self.enabled = enabled
        self._page_of: dict[Digest, int] = {}
        self._digest_of: dict[int, Digest] = {}
        self._lru: OrderedDict[int, None] = OrderedDict()  # evictable pages, oldest first

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return self.pool.num_free + len(self._lru)

    @property
    def num_cached(self) -> int:
        return len(self._page_of)

    @property
    def num_evictable(self) -> int:
        return len(self._lru)

    def holds(self, page: int) -> bool:
        return page in self._digest_of

    def match(self, digests: Sequence[Digest]) -> list[int]:
        """Returns the pages of the longest cached prefix of `digests`, without pinning them."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def acquire(self, matched: Sequence[int], num_new: int) -> list[int] | None:
        """Pins the `matched` pages and adds `num_new` fresh ones; None, and no change, when there
        are not enough. Matched pages are pinned first, so that no eviction can take them."""
        num_idle = sum(page in self._lru for page in matched)
        if num_new > self.num_available - num_idle:
            return None
        for page in matched:
            self.pool.retain(page)
            self._lru.pop(page, None)
        while self.pool.num_free < num_new:
            self._evict_oldest()
        fresh = self.pool.allocate(num_new)
        assert fresh is not None
        return [*matched, *fresh]

    def insert(self, digest: Digest, page: int) -> None:
        """Enters a full page that its caller holds. A second one of equal content stays private."""
        if self.enabled and digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest
            self.pool.retain(page)

    def release(self, pages: Sequence[int]) -> None:
        """Drops the caller's reference on `pages`, in order; cached ones stay, evictable."""
        for page in reversed(pages):
            if self.pool.release(page) == 1 and page in self._digest_of:
                self._lru[page] = None

    def reset(self) -> bool:
        """Forgets everything; False, and no change, while a request uses a cached page."""
        if len(self._lru) != len(self._page_of):
            return False
        while self._lru:
            self._evict_oldest()
        return True

    def _evict_oldest(self) -> None:
        page, _ = self._lru.popitem(last=False)
        del self._page_of[self._digest_of.pop(page)]
        left = self.pool.release(page)
        assert left == 0, f"evicted page {page} has {left} users"

    def check_integrity(self) -> None:
        """Asserts that pool, names and the evictable list agree."""
        self.pool.check_integrity()
        assert {d: p for p, d in self._digest_of.items()} == self._page_of, "names disagree"
        for page in self._digest_of:
            idle = self.pool.ref_count(page) == 1
            assert idle == (page in self._lru), f"page {page}: idle is {idle}, against the list"
        assert all(page in self._digest_of for page in self._lru), "an uncached page is evictable"
