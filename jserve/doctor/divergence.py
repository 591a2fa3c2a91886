"""Tells where a prompt leaves what earlier ones have computed although text that they share
follows, and what stands there. Knows token ids: text only through a function that decodes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jserve.doctor.kinds import kind_of

Decode = Callable[[np.ndarray], str]

ORDER = "shared texts in varying order"
MAX_EXAMPLES = 3
NUM_VALUES_READ = 20  # of those at one site, to tell what they look like
_TOKENS_BEFORE, _TOKENS_AFTER, _TOKENS_OF_SPAN, _TOKENS_OF_JUMP = 16, 12, 64, 8


class Site(NamedTuple):
    """Where one prompt parts from earlier ones: tokens start to end vary; with start == end, two
    shared texts meet that did not meet before."""

    start: int
    end: int
    num_shared_behind: int  # tokens behind it of text that earlier prompts have


def find_site(
    counts: np.ndarray, first: np.ndarray, num_hit_tokens: int, page_size: int
) -> Site | None:
    """Returns the site in the first page that a prompt has to compute; None where nothing that is
    shared follows. For counts and first see `SharedText.of`.

    A token varies if text behind it is in at least twice as many prompts.
    """
    page = slice(num_hit_tokens, num_hit_tokens + page_size)
    most_behind = np.append(np.maximum.accumulate(counts[:0:-1])[::-1], 0)
    varies = 2 * counts <= most_behind
    if varies[page].any():
        at = num_hit_tokens + int(varies[page].argmax())
        start = at - int((~varies[at::-1]).argmax()) + 1 if not varies[: at + 1].all() else 0
        end = at + int((~varies[at:]).argmax())
    else:
        jumps = np.diff(first[max(num_hit_tokens - 1, 0) : page.stop]) != 1
        if not jumps.any() or not (first[page] < 0).all():
            return None
        start = end = max(num_hit_tokens, 1) + int(jumps.argmax())
    return Site(start, end, int((first[end:] < 0).sum()))


class Description(NamedTuple):
    """What several prompts have at one site."""

    positions: dict[str, float]  # percentiles, in tokens
    kind: str
    examples: list[str]


def describe(prompts: Sequence[np.ndarray], sites: Sequence[Site], decode: Decode) -> Description:
    """Says what the values at the sites of `prompts` look like."""
    is_order = sites[0].start == sites[0].end
    values = [p[site.start : site.end] for p, site in zip(prompts, sites, strict=True)]
    # What is alike in all of them, such as the label of a value, is no part of it.
    alike = min(_common_prefix(values[0], value) for value in values) if len(values) > 1 else 0
    kinds: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for token_ids, site in list(zip(prompts, sites, strict=True))[:NUM_VALUES_READ]:
        start = site.start + alike
        end = max(site.end, start + _TOKENS_OF_JUMP * is_order)
        before = decode(token_ids[max(start - _TOKENS_BEFORE, 0) : start])
        value = _decode_ends(token_ids[start:end], decode)
        after = decode(token_ids[end : end + _TOKENS_AFTER])
        kinds[ORDER if is_order else kind_of(before, value, after)] += 1
        examples.setdefault(value, f"{before}[[{value}]]{after}")
    return Description(
        positions={
            f"p{p}": float(np.percentile([site.start + alike for site in sites], p))
            for p in (10, 50, 90)
        },
        kind=kinds.most_common(1)[0][0],
        examples=list(examples.values())[:MAX_EXAMPLES],
    )


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def _decode_ends(value: np.ndarray, decode: Decode) -> str:
    if len(value) <= _TOKENS_OF_SPAN:
        return decode(value)
    half = _TOKENS_OF_SPAN // 2
    return f"{decode(value[:half])} ... {decode(value[-half:])}"
