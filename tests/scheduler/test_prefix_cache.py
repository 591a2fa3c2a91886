"""PrefixCache: a radix tree of pages; locks, splits, eviction of the least used tails, events."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.kv_events import page_digest, root_digest, token_bytes
from scheduler.page_pool import PagePool
from scheduler.prefix_cache import Node, PrefixCache

PAGE = 4
A, B, C, D = ([n] * PAGE for n in (1, 2, 3, 4))


def make(num_pages: int = 9) -> PrefixCache:
    return PrefixCache(PagePool(num_pages), PAGE)


def tokens(*pages: list[int]) -> bytes:
    return token_bytes([token for page in pages for token in page])


def hold(cache: PrefixCache, *pages: list[int], keys=()) -> tuple[Node, np.ndarray]:
    """Does what a request does: locks what is cached, computes the rest, gives it to the cache."""
    text = tokens(*pages)
    node, shared = cache.acquire(keys, text, len(pages))
    fresh = cache.allocate(len(pages) - len(shared))
    assert fresh is not None, "too few pages"
    node, used = cache.extend(node, text, len(shared), fresh)
    return node, np.concatenate([shared, used])


def cached(cache: PrefixCache, *pages: list[int], keys=()) -> list[int]:
    """Pages that are in the cache and that nobody uses any more."""
    node, held = hold(cache, *pages, keys=keys)
    cache.release(node)
    check(cache)
    return held.tolist()


def num_matched(cache: PrefixCache, *pages: list[int], keys=()) -> int:
    return cache.match(keys, tokens(*pages), len(pages))[0]


def check(cache: PrefixCache, *private: np.ndarray) -> None:
    cache.check_integrity()
    cache.pool.check_integrity(np.concatenate([cache.held_pages(), *private]))


def test_a_pages_name_depends_on_its_tokens_its_parents_and_the_keys():
    def names(*pages, keys=()):
        digests = [root_digest(keys)]
        for page in pages:
            digests.append(page_digest(digests[-1], tokens(page)))
        return digests[1:]

    assert names(A, B) == names(A, B)
    assert names(A, B)[0] == names(A, C)[0]
    different = [names(A, B)[1], names(C, B)[1], names(B)[0], names(A, B, keys=(("t", "x"),))[1]]
    assert len(set(different)) == 4
    assert token_bytes([1, 23]) != token_bytes([12, 3])
    assert token_bytes(np.array([7, 8])) == token_bytes([7, 8])


def test_O55_a_tenant_and_an_adapter_of_one_name_share_nothing():
    keys = [
        (),
        (("tenant", "X"),),
        (("adapter", "X"),),
        (("tenant", "X"), ("adapter", "X")),
        (("tenant", "XX"),),
        (("tenant", ""), ("adapter", "X")),
        (("tenant", "Y"),),
    ]
    assert len({root_digest(key) for key in keys}) == len(keys)
    cache = make(20)
    for i, key in enumerate(keys):
        assert [num_matched(cache, A, keys=k) for k in keys] == [1] * i + [0] * (len(keys) - i)
        cached(cache, A, keys=key)


def test_the_longest_cached_prefix_is_found_and_looking_changes_nothing():
    cache = make()
    cached(cache, A, B)
    for _ in range(2):
        assert num_matched(cache, A, B, C) == 2
        assert num_matched(cache, A, C) == 1
        assert num_matched(cache, B) == 0
        assert cache.match((), tokens(A, B), 1) == (1, 1)
        assert cache.match((("tenant", "x"),), tokens(A, B), 2) == (0, 0)
    check(cache)


def test_a_branch_splits_a_run_and_both_holders_keep_all_they_hold():
    cache = make(20)
    first, _ = hold(cache, A, B, C)
    second, _ = hold(cache, A, B, D)
    assert cache.num_cached == 4
    check(cache)
    assert cache.num_evictable == 0
    cache.release(first)
    assert cache.num_evictable == 1, "the page of C alone"
    cache.release(second)
    assert cache.num_evictable == 4
    assert num_matched(cache, A, B, C) == num_matched(cache, A, B, D) == 3
    check(cache)


def test_a_run_that_grows_chunk_by_chunk_stays_one_node():
    cache = make(20)
    text = tokens(A, B, C)
    node, _ = cache.acquire((), text, 0)
    for held in range(3):
        node, _ = cache.extend(node, text, held, cache.allocate(1))
    assert len(node.pages) == 3
    cache.release(node)
    assert num_matched(cache, A, B, C) == 3
    check(cache)


def test_pages_of_equal_content_are_swapped_for_the_cached_ones_and_freed():
    cache = make()
    text = tokens(A, B)
    one, _ = cache.acquire((), text, 0)
    two, _ = cache.acquire((), text, 0)
    of_one, of_two = cache.allocate(2), cache.allocate(2)
    one, used_by_one = cache.extend(one, text, 0, of_one)
    free = cache.pool.num_free
    two, used_by_two = cache.extend(two, text, 0, of_two)
    assert used_by_two.tolist() == used_by_one.tolist() == of_one.tolist()
    assert cache.pool.num_free == free + 2
    for node in (one, two):
        cache.release(node)
    check(cache)


def test_O57_locked_pages_are_not_taken_for_the_rest():
    cache = make(num_pages=1 + 3)
    pages = cached(cache, A, B, C)
    assert cache.num_available == 3
    node, locked = cache.acquire((), tokens(A, B), 2)
    assert locked.tolist() == pages[:2]
    assert cache.allocate(2) is None, "two locked, one left"
    assert num_matched(cache, A, B, C) == 3, "a refusal changed something"
    assert cache.allocate(1).tolist() == pages[2:], "the recycled page of C"
    assert num_matched(cache, A, B, C) == 2
    cache.release(node)


def test_tails_are_evicted_before_what_they_build_on():
    cache = make(num_pages=1 + 4)
    cached(cache, A, B, C)
    for left in (2, 1, 0):
        taken = cache.allocate(4 - left)
        assert num_matched(cache, A, B, C) == left
        cache.pool.free(taken)
        check(cache)


def test_O61_the_least_recently_used_prefix_is_evicted_first():
    cache = make(num_pages=1 + 3)
    for page in (A, B, C):
        cached(cache, page)
    node, _ = cache.acquire((), tokens(A), 1)
    cache.release(node)
    cache.allocate(1)
    assert [num_matched(cache, page) for page in (A, B, C)] == [1, 0, 1]


def test_O58_a_recycled_page_has_lost_its_old_name():
    cache = make(num_pages=1 + 1)
    (page,) = cached(cache, A)
    taken = cache.allocate(1)
    assert taken.tolist() == [page]
    assert num_matched(cache, A) == 0
    cache.pool.free(taken)
    assert cached(cache, B) == [page]
    assert num_matched(cache, B) == 1
    assert num_matched(cache, A) == 0


def test_O60_reset_refuses_while_a_cached_page_is_in_use():
    cache = make()
    cached(cache, A, B)
    node, _ = cache.acquire((), tokens(A), 1)
    assert not cache.reset()
    assert num_matched(cache, A, B) == 2
    cache.release(node)
    assert cache.reset()
    assert num_matched(cache, A, B) == 0
    assert cache.pool.num_free == cache.pool.num_usable
    check(cache)


def test_a_lock_that_is_dropped_twice_is_caught():
    cache = make()
    node, _ = hold(cache, A)
    cache.release(node)
    with pytest.raises(AssertionError, match="more often than locked"):
        cache.release(node)


def test_what_nobody_uses_any_more_leaves_no_trace():
    cache = make(num_pages=1 + 2)
    for tenant in range(100):
        cached(cache, A, keys=(("tenant", tenant),))
    assert len(cache._roots) <= 2
    assert len(cache._leaves) < 100
