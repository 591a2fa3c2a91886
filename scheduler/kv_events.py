"""How cached pages are named, and what is said when they come and go: for routers, which send a
request to the engine that has its prefix. Knows token ids only."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

Digest = bytes  # 128 bits: names a page by everything before it, so equal names mean equal content
CacheKeys = tuple[tuple[str, Hashable], ...]  # tagged: ("tenant", salt), ("adapter", id)
BYTES_PER_TOKEN = 4


def token_bytes(token_ids: Sequence[int] | np.ndarray) -> bytes:
    """Returns ids as the int32 bytes by which prefixes are compared."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.astype(np.int32, copy=False).tobytes()
    return array("i", token_ids).tobytes()


def root_digest(keys: CacheKeys) -> Digest:
    """Returns the parent of a first page. Keys are tagged, so that no two kinds of key share one
    name space."""
    return blake2b(repr(keys).encode(), digest_size=16).digest()


def page_digest(parent: Digest, page: bytes) -> Digest:
    """Returns the name of the full page with these tokens behind `parent`."""
    return blake2b(parent + page, digest_size=16).digest()


class Stored(NamedTuple):
    """Pages entered the cache behind the page `parent`."""

    parent: Digest
    digests: tuple[Digest, ...]
    token_ids: tuple[int, ...]


class Removed(NamedTuple):
    """Pages left the cache."""

    digests: tuple[Digest, ...]


class Cleared(NamedTuple):
    """All pages left the cache."""


KvEvent = Stored | Removed | Cleared
