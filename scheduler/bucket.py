"""The fixed list of compiled shapes, and which one a step takes. Knows counts only."""

from __future__ import annotations

from typing import NamedTuple


class Bucket(NamedTuple):
    """One compiled shape. With `decode_only`, T == S and no row has more than one token."""

    num_tokens: int  # T
    num_rows: int  # S
    decode_only: bool


def _doubling(low: int, high: int) -> list[int]:
    """low, 2 low, 4 low, ... and high itself, whatever it is."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= 2
    return [*sizes, high]


def make_buckets(max_num_seqs: int, max_num_batched_tokens: int) -> list[Bucket]:
    """Returns every shape, cheapest first within each kind.

    Decode: 1, 2, 4, ... rows. Mixed: 16, 32, 64, ... tokens, each with few rows and with all rows,
    because the rows cost as much as tokens do in the LM head.
    """
    decode = [Bucket(n, n, True) for n in _doubling(1, max_num_seqs)]
    row_sizes = sorted({min(4, max_num_seqs), max_num_seqs})
    token_sizes = _doubling(min(16, max_num_batched_tokens), max_num_batched_tokens)
    return decode + [Bucket(t, s, False) for t in token_sizes for s in row_sizes if s <= t]


def choose_bucket(buckets: list[Bucket], num_tokens: int, num_rows: int) -> Bucket:
    """Returns the first bucket that holds the step; a decode bucket only when all rows are single
    tokens. The list's order makes it the cheapest."""
    decode_only = num_tokens == num_rows
    for bucket in buckets:
        if (
            num_tokens <= bucket.num_tokens
            and num_rows <= bucket.num_rows
            and (decode_only or not bucket.decode_only)
        ):
            return bucket
    raise AssertionError(f"no bucket holds {num_tokens=}, {num_rows=}; the list is {buckets}")
