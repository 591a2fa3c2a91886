"""The state of running requests that changes with every step, in arrays over their slots, so that a
step costs a few array operations and not a loop. Knows counts and page ids: no decisions."""

from __future__ import annotations

import numpy as np

from scheduler.page_pool import NULL_PAGE
from scheduler.request import Request


class Slots:
    """One entry per slot; those of free slots are zero.

    Attributes:
      num_computed: tokens whose KV is in pages, steps in flight included.
      num_tokens: tokens that exist, those in flight included.
      end: the length at which a request is complete: its prompt and max_tokens.
      num_pages: pages that it holds.
      page_table: those pages, i32[slots, J].
      is_decoding: it has one token to compute, which the device keeps.
      owners: its request, or None.
    """

    def __init__(self, num_slots: int, max_pages: int, page_size: int) -> None:
        self.num_computed = np.zeros(num_slots, np.int32)
        self.num_tokens = np.zeros(num_slots, np.int32)
        self.end = np.zeros(num_slots, np.int32)
        self.num_pages = np.zeros(num_slots, np.int32)
        self.page_table = np.full((num_slots, max_pages), NULL_PAGE, np.int32)
        self.is_decoding = np.zeros(num_slots, bool)
        self.owners = np.empty(num_slots, object)
        self._page_size = page_size
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request: Request, num_computed: int, pages: np.ndarray) -> None:
        """Gives a request a slot and its pages i32[n]."""
        slot = request.slot = self._free.pop()
        self.owners[slot] = request
        self.num_computed[slot] = num_computed
        self.num_tokens[slot] = request.num_tokens
        self.end[slot] = request.num_prompt_tokens + request.sampling.max_tokens
        self.page_table[slot, : len(pages)] = pages
        self.num_pages[slot] = len(pages)

    def leave(self, request: Request) -> None:
        """Frees a request's slot."""
        slot = request.slot
        self.page_table[slot, : self.num_pages[slot]] = NULL_PAGE
        for array in (self.num_computed, self.num_tokens, self.end, self.num_pages):
            array[slot] = 0
        self.is_decoding[slot] = False
        self.owners[slot] = None
        self._free.append(slot)
        request.slot = -1

    def extend(self, request: Request, num_more: int) -> None:
        """Replaces the tokens in flight of a request that decodes by `num_more` known ones, to be
        computed like a prompt. KV of those in flight does not count: it is written once more."""
        slot, num_known = request.slot, request.num_known_tokens
        self.num_computed[slot] = min(self.num_computed[slot], num_known)
        self.num_tokens[slot] = num_known + num_more
        self.is_decoding[slot] = False

    def pages(self, request: Request) -> np.ndarray:
        """Returns the pages of a running request, i32[n], to be read at once."""
        pages: np.ndarray = self.page_table[request.slot, : self.num_pages[request.slot]]
        return pages

    def decoding(self) -> np.ndarray:
        """Returns the slots that decode, ascending."""
        slots: np.ndarray = self.is_decoding.nonzero()[0]
        return slots

    def lacking(self, slots: np.ndarray, num_steps: int = 1) -> np.ndarray:
        """Returns how many pages each of `slots` lacks for `num_steps` more tokens."""
        needed = -(-(self.num_computed[slots] + num_steps) // self._page_size)
        missing: np.ndarray = np.maximum(needed - self.num_pages[slots], 0)
        return missing

    def add_pages(self, slots: np.ndarray, counts: np.ndarray, pages: np.ndarray) -> None:
        """Appends counts[i] of `pages` to the pages of slots[i]."""
        rows = np.repeat(slots, counts)
        within = np.arange(len(pages)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.page_table[rows, self.num_pages[rows] + within] = pages
        self.num_pages[slots] += counts

    def advance(self, slots: np.ndarray, num_steps: int = 1) -> np.ndarray:
        """Lets `slots` decode; returns those of them that reach their end."""
        self.num_computed[slots] += num_steps
        num_tokens = self.num_tokens[slots] + num_steps
        self.num_tokens[slots] = num_tokens
        ended: np.ndarray = slots[num_tokens >= self.end[slots]]
        self.is_decoding[ended] = False
        return ended
