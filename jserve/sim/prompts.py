"""Prompts that stand for others of their length. Knows ids and which begin alike: no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

_STARTS = 1 << 22  # prompts until a first id comes again
LONGEST_PROMPT = 1 << 20
_SHARED_BLOCK_BASE = 1 << 28  # ids of named blocks are above those of unique prompts


class UniquePrompts:
    """Prompts no two of which begin alike: windows of one array, so none takes memory."""

    def __init__(self) -> None:
        self._ramp = np.arange(_STARTS + LONGEST_PROMPT, dtype=np.int32)
        self._ramp.flags.writeable = False
        self._next = 0

    def take(self, num_tokens: int) -> Sequence[int]:
        """Returns i32[num_tokens] whose first id has not been used."""
        assert num_tokens <= LONGEST_PROMPT, f"a prompt of {num_tokens} tokens"
        start = self._next
        self._next = (start + 1) % _STARTS
        return cast(Sequence[int], self._ramp[start : start + num_tokens])


def from_blocks(block_ids: Sequence[int], block_size: int, num_tokens: int) -> Sequence[int]:
    """Returns i32[num_tokens] in which equal ids make equal blocks of `block_size` tokens.

    The blocks must reach to the end of the prompt; the last one may be cut.
    """
    ids = np.asarray(block_ids, np.int64) % (2**31 - _SHARED_BLOCK_BASE) + _SHARED_BLOCK_BASE
    prompt = np.repeat(ids.astype(np.int32), block_size)[:num_tokens]
    assert len(prompt) == num_tokens, f"{len(block_ids)} blocks do not hold {num_tokens} tokens"
    return cast(Sequence[int], prompt)
