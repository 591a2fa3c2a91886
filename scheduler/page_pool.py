"""Hands out pages of memory and takes them back. Knows ids only: not tokens, not who holds what."""

from __future__ import annotations

import numpy as np

NULL_PAGE = 0  # padding writes land here; never handed out, never read


class PagePool:
    """A stack of free pages out of `first` .. num_pages - 1; each is free or has one holder."""

    def __init__(self, num_pages: int, first: int = NULL_PAGE + 1) -> None:
        self.num_pages = num_pages
        self.num_usable = num_pages - first  # all pages that can be handed out
        self.num_free = self.num_usable
        self._first = first
        self._stack = np.arange(first, num_pages, dtype=np.int32)[::-1].copy()  # low ids on top
        self._is_free = np.arange(num_pages) >= first

    def allocate(self, count: int) -> np.ndarray | None:
        """Returns `count` pages i32[count], or None when fewer are free."""
        left = self.num_free - count
        if left < 0:
            return None
        pages: np.ndarray = self._stack[left : self.num_free].copy()
        self._is_free[pages] = False
        self.num_free = left
        return pages

    def free(self, pages: np.ndarray) -> None:
        """Takes back pages i32[n] that were handed out."""
        assert not self._is_free[pages].any(), f"a free page is given back: {pages}"
        end = self.num_free + len(pages)
        self._stack[self.num_free : end] = pages[::-1]
        self._is_free[pages] = True
        self.num_free = end

    def check_integrity(self, held: np.ndarray) -> None:
        """Asserts that `held` pages and free ones are all there are, each once."""
        pages = np.concatenate([held, self._stack[: self.num_free]])
        expected = np.arange(self._first, self.num_pages)
        assert np.array_equal(np.sort(pages), expected), "a page is lost or has two holders"
        assert int(self._is_free.sum()) == self.num_free, "free pages are miscounted"
