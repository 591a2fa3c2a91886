"""Counts what a prefix cache could have saved. Knows token ids and tenants: no text, no
templates."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np


def possible_hit_tokens(
    prompts: Iterable[tuple[str, Sequence[int] | np.ndarray]], page_size: int, num_pages: int = 0
) -> Iterator[int]:
    """Yields for each prompt how many of its tokens a prefix cache would hold already.

    The rules are the engine's: full pages, chained from the first token on, apart for each tenant;
    a prompt's last token is always computed. It is a count without a clock: every earlier prompt
    counts as computed, and neither outputs nor pages in use take room.

    Args:
      prompts: (tenant, token ids), in order of arrival; read as the result is.
      num_pages: pages of a pool, its null page included, that drops the least recently used;
        0: no bound.
    """
    capacity = num_pages - 1
    cached: OrderedDict[int, None] = OrderedDict()  # names of pages, least recently used first
    for tenant, token_ids in prompts:
        names = page_names(tenant, token_ids, page_size)
        matched = next((i for i, name in enumerate(names) if name not in cached), len(names))
        yield max(min(matched, (len(token_ids) - 1) // page_size), 0) * page_size
        if not num_pages:
            cached.update(dict.fromkeys(names[matched:]))
            continue
        # Last page first, as requests release theirs: a page goes before the one it builds on.
        for name in reversed(names[:capacity]):
            cached[name] = None
            cached.move_to_end(name)
        while len(cached) > capacity:
            cached.popitem(last=False)


def page_names(tenant: str, token_ids: Sequence[int] | np.ndarray, page_size: int) -> list[int]:
    """Returns a number for each full page that stands for it, all before it, and its tenant.

    64 bits: of n pages, two share a number with a chance of n * n / 2**65.
    """
    data = np.asarray(token_ids, np.int32).tobytes()
    num_bytes = 4 * page_size
    name, names = hash(tenant), []
    for start in range(0, len(data) - num_bytes + 1, num_bytes):
        name = hash((name, data[start : start + num_bytes]))
        names.append(name)
    return names
