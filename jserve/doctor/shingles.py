"""Finds text that prompts share wherever it stands in them. Knows token ids, tenants and hashes: no
pages, no text.

A shingle is `width` consecutive tokens. Its hash does not depend on where it stands, so prompts
that differ early are still seen to agree later, at any distance. All work is that of sorting the
shingles once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

_BASE, _FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


def _mixed(values: np.ndarray) -> np.ndarray:
    for _ in range(2):
        values = (values ^ (values >> np.uint64(32))) * _FACTOR
    return values ^ (values >> np.uint64(32))


def shingle_hashes(token_ids: np.ndarray, width: int) -> np.ndarray:
    """Returns u64[n - width + 1], all different: a repeated shingle's hash tells its repetition
    too, so that the second copy of a text in one prompt matches the second copy in another."""
    count = len(token_ids) - width + 1
    if count < 1:
        return np.zeros(0, np.uint64)
    tokens = _mixed(token_ids.astype(np.uint64) + _BASE)
    hashes = np.zeros(count, np.uint64)
    for offset in range(width):
        hashes = hashes * _BASE + tokens[offset : offset + count]
    order = np.argsort(hashes, kind="stable")
    index = np.arange(count)
    is_first = np.append(True, np.diff(hashes[order]) != 0)
    repetition = np.empty(count, np.uint64)
    repetition[order] = index - np.maximum.accumulate(np.where(is_first, index, 0))
    return _mixed(hashes + repetition * _FACTOR)


class SharedText:
    """Which tokens of each prompt are text that other prompts of its tenant have as well."""

    def __init__(self, prompts: Sequence[tuple[str, np.ndarray]], width: int) -> None:
        tenants: dict[str, int] = {}
        hashes = []
        for tenant, token_ids in prompts:
            salt = np.array([tenants.setdefault(tenant, len(tenants))], np.uint64)
            hashes.append(shingle_hashes(token_ids, width) ^ _mixed(salt + _BASE))
        self._width = width
        self._lengths = [len(token_ids) for _, token_ids in prompts]
        self._ends = np.cumsum([len(h) for h in hashes])
        _, first, self._ids, self._counts = np.unique(
            np.concatenate(hashes), return_index=True, return_inverse=True, return_counts=True
        )
        self._first = first + (width - 1) * np.searchsorted(self._ends, first, side="right")

    def of(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns, for each token of a prompt, (i64[n], i64[n]):

        how many prompts of the tenant have the text around it; and where they have it first, as the
        token's distance from the first of them (consecutive in one text; negative in text that an
        earlier prompt has, else the token's own position).
        """
        length, width = self._lengths[index], self._width
        position = np.arange(length)
        begin, end = (self._ends[index - 1] if index else 0), self._ends[index]
        if begin == end:
            return np.ones(length, np.int64), position
        ids = self._ids[begin:end]
        counts = self._counts[ids]
        # Of the shingles over a token the one that most prompts have speaks for it, then the last.
        over = sliding_window_view(np.pad(counts, width - 1), width)[:, ::-1]
        start = position - over.argmax(axis=1)
        own_start = begin + (width - 1) * index
        return counts[start], self._first[ids[start]] + position - start - own_start


def most_shared_first(counts: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Returns the order of a prompt's tokens with the text that most prompts have in front. Texts
    of equally many prompts stand in one order in all of them; what is its own comes last, as it
    was. For counts and first see `SharedText.of`."""
    return np.lexsort((first, -counts))
