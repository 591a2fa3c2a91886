"""Hands out KV pages and counts who uses them. Knows ids and counts: not tokens, not arrays."""

from __future__ import annotations

NULL_PAGE = 0  # padding writes land here; never handed out, never read


class PagePool:
    """A free list with reference counts over pages 1 .. num_pages - 1."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))  # a stack: low ids first
        self._ref_counts = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """All pages that can be handed out: the capacity."""
        return self.num_pages - 1

    def ref_count(self, page: int) -> int:
        return self._ref_counts[page]

    def allocate(self, count: int) -> list[int] | None:
        """Returns `count` pages, each with one reference, or None when fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._ref_counts[page] = 1
        return pages

    def retain(self, page: int) -> None:
        """Adds a reference to a page that has one already."""
        assert self._ref_counts[page] > 0, f"retain of free page {page}"
        self._ref_counts[page] += 1

    def release(self, page: int) -> int:
        """Drops one reference and returns how many are left; at 0 the page is free."""
        count = self._ref_counts[page] - 1
        assert count >= 0, f"release of free page {page}"
        self._ref_counts[page] = count
        if count == 0:
            self._free.append(page)
        return count

    def check_integrity(self) -> None:
        """Asserts that each page is either free or referenced, exactly once on the free list."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is on the free list twice"
        assert NULL_PAGE not in free, "the null page is on the free list"
        for page in range(1, self.num_pages):
            count = self._ref_counts[page]
            assert (count == 0) == (page in free), f"page {page}: {count} references, free list"
