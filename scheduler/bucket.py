"""The fixed list of compiled shapes, and which one a step takes. Knows counts only."""

from __future__ import annotations

from typing import NamedTuple


class Bucket(NamedTuple):
    """One compiled shape. With `decode_only`, T == S and no row has more than one token."""

    num_tokens: int  # T
    num_rows: int  # S
    decode_only: bool


FEW_ROWS = 4
# XLA on CPUs turns a product with one column into one that lays out the weights anew at each call:
# on a model of 135 M parameters a decode step of 1 row took 1750 ms, one of 2 or of 4 rows 45 ms.
LEAST_ROWS = 2


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

    Decode: 4, 8, 16, ... rows (fewer cost the same). Mixed: 32, 64, 128, ... tokens, the smallest
    with few rows, as for a short prompt alone the LM head's rows would weigh most.
    """
    max_rows = max(LEAST_ROWS, max_num_seqs)
    max_tokens = max(max_rows, max_num_batched_tokens)
    few_rows = min(FEW_ROWS, max_rows)
    decode = [Bucket(n, n, True) for n in _doubling(few_rows, max_rows)]
    sizes = _doubling(min(32, max_tokens), max_tokens)
    mixed = [Bucket(size, max_rows, False) for size in sizes[1:] or sizes]
    return decode + list(dict.fromkeys([Bucket(sizes[0], few_rows, False), *mixed]))


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
