"""The fixed list of compiled shapes, and which one a step takes. Knows counts only."""

from __future__ import annotations

from typing import NamedTuple


class Bucket(NamedTuple):
    """One compiled shape. With `decode_only`, T == S and no row has more than one token."""

    num_tokens: int  # T
    num_rows: int  # S
    decode_only: bool


FEW_ROWS = 4
# Matmuls take tokens and rows in groups; a group that is not full may be computed in another way.
INVARIANT_GROUP = 32


def _doubling(low: int, high: int) -> list[int]:
    """low, 2 low, 4 low, ... and high itself, whatever it is."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= 2
    return [*sizes, high]


def make_buckets(max_num_seqs: int, max_num_batched_tokens: int) -> list[Bucket]:
    """Returns every shape, cheapest first within each kind: few, as each costs start-up time and
    memory.

    Decode: 1 row, then 4, 8, 16, ... (2 rows cost what 4 do). Mixed: 32, 64, 128, ... tokens, the
    smallest with few rows, as for a short prompt alone the LM head's rows would weigh most.
    """
    few_rows = min(FEW_ROWS, max_num_seqs)
    decode = [Bucket(n, n, True) for n in sorted({1, *_doubling(few_rows, max_num_seqs)})]
    sizes = _doubling(min(32, max_num_batched_tokens), max_num_batched_tokens)
    mixed = [Bucket(size, max_num_seqs, False) for size in sizes[1:] or sizes]
    return decode + list(dict.fromkeys([Bucket(sizes[0], few_rows, False), *mixed]))


def make_invariant_buckets(max_num_seqs: int, max_num_batched_tokens: int) -> list[Bucket]:
    """Returns the one shape of an engine whose results may not depend on the shape of a step. Every
    step costs what a full one does: use a small `max_num_batched_tokens`."""
    sizes = max_num_batched_tokens, max_num_seqs
    num_tokens, num_rows = (-(-n // INVARIANT_GROUP) * INVARIANT_GROUP for n in sizes)
    return [Bucket(num_tokens, num_rows, False)]


def choose_bucket(
    buckets: list[Bucket], num_tokens: int, num_rows: int, *, keeps_tokens: bool = False
) -> Bucket:
    """Returns the first bucket that holds the step; a decode bucket only when all rows are single
    tokens, and never for a step with `keeps_tokens`, whose tokens' states are wanted besides those
    of its rows. The list's order makes it the cheapest."""
    decode_only = num_tokens == num_rows and not keeps_tokens
    for bucket in buckets:
        if (
            num_tokens <= bucket.num_tokens
            and num_rows <= bucket.num_rows
            and (decode_only or not bucket.decode_only)
        ):
            return bucket
    raise AssertionError(f"no bucket holds {num_tokens=}, {num_rows=}; the list is {buckets}")
