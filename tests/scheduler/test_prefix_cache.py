"""PrefixCache: chained names, pinning, eviction of leaves first and the least used first, reset."""

from __future__ import annotations

from scheduler.page_pool import PagePool
from scheduler.prefix_cache import PrefixCache, page_digest, root_digest

PAGE = 4


def chain(*pages: list[int], keys: tuple = ()) -> list[bytes]:
    """The digests of a sequence of full pages."""
    digests, parent = [], root_digest(keys)
    for tokens in pages:
        parent = page_digest(parent, tokens)
        digests.append(parent)
    return digests


def cached(cache: PrefixCache, digests: list[bytes]) -> list[int]:
    """Pages that hold `digests` in the cache and that nobody uses any more."""
    matched = cache.match(digests)
    pages = cache.acquire(matched, len(digests) - len(matched))
    for digest, page in zip(digests, pages, strict=True):
        cache.insert(digest, page)
    cache.release(pages)
    cache.check_integrity()
    return pages


def make(num_pages: int = 9) -> PrefixCache:
    return PrefixCache(PagePool(num_pages))


A, B, C = [1] * PAGE, [2] * PAGE, [3] * PAGE


def test_a_pages_name_depends_on_its_tokens_its_parents_and_the_keys():
    assert chain(A, B) == chain(A, B)
    assert chain(A, B)[0] == chain(A, C)[0]
    names = [chain(A, B)[1], chain(C, B)[1], chain(B)[0], chain(A, B, keys=(("tenant", "x"),))[1]]
    assert len(set(names)) == 4
    assert page_digest(b"", [1, 23]) != page_digest(b"", [12, 3])


def test_O55_a_tenant_and_an_adapter_of_one_name_share_no_name_space():
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


def test_the_longest_cached_prefix_is_matched():
    cache = make()
    pages = cached(cache, chain(A, B))
    assert cache.match(chain(A, B, C)) == pages
    assert cache.match(chain(A, C)) == pages[:1]
    assert cache.match(chain(B)) == []
    assert cache.match([]) == []


def test_O57_matched_pages_are_pinned_before_anything_is_evicted_for_the_rest():
    cache = make(num_pages=1 + 3)
    pages = cached(cache, chain(A, B, C))
    assert cache.num_available == 3
    assert cache.acquire(pages[:2], 2) is None, "two matched, one left"
    assert cache.match(chain(A, B, C)) == pages, "a refusal changed something"
    got = cache.acquire(pages[:2], 1)
    assert got == pages, "the third is the recycled page of C"
    assert cache.match(chain(A, B, C)) == pages[:2]
    cache.check_integrity()


def test_leaves_are_evicted_before_their_parents():
    cache = make(num_pages=1 + 4)
    pages = cached(cache, chain(A, B, C))
    for left in (2, 1, 0):
        taken = cache.acquire((), 5 - left - 1)
        assert cache.match(chain(A, B, C)) == pages[:left]
        cache.release(taken)
        cache.check_integrity()


def test_O61_the_least_recently_used_prefix_is_evicted_first():
    cache = make(num_pages=1 + 3)
    for tokens in (A, B, C):
        cached(cache, chain(tokens))
    used_again = cache.acquire(cache.match(chain(A)), 0)
    cache.release(used_again)
    cache.acquire((), 1)
    assert [len(cache.match(chain(tokens))) for tokens in (A, B, C)] == [1, 0, 1]


def test_O58_a_recycled_page_has_lost_its_old_name():
    cache = make(num_pages=1 + 1)
    (page,) = cached(cache, chain(A))
    assert cache.acquire((), 1) == [page]
    assert cache.match(chain(A)) == []
    assert not cache.holds(page)
    cache.insert(chain(B)[0], page)
    cache.release([page])
    assert cache.match(chain(B)) == [page]
    cache.check_integrity()


def test_a_second_page_of_equal_content_stays_private_and_is_freed():
    cache = make()
    (first,) = cached(cache, chain(A))
    (second,) = cache.acquire((), 1)
    cache.insert(chain(A)[0], second)
    assert cache.match(chain(A)) == [first]
    cache.release([second])
    assert (cache.num_cached, cache.num_evictable) == (1, 1)
    cache.check_integrity()


def test_pages_shared_by_several_users_are_not_evictable_until_the_last_leaves():
    cache = make()
    pages = cached(cache, chain(A))
    for _ in range(2):
        cache.acquire(pages, 0)
    cache.release(pages)
    assert cache.num_evictable == 0
    cache.release(pages)
    assert cache.num_evictable == 1


def test_O60_reset_refuses_while_a_cached_page_is_in_use():
    cache = make()
    pages = cached(cache, chain(A, B))
    cache.acquire(pages[:1], 0)
    assert not cache.reset()
    assert cache.match(chain(A, B)) == pages
    cache.release(pages[:1])
    assert cache.reset()
    assert cache.match(chain(A, B)) == []
    assert cache.pool.num_free == cache.pool.num_usable
    cache.check_integrity()


def test_a_disabled_cache_remembers_nothing():
    cache = PrefixCache(PagePool(5), enabled=False)
    assert cached(cache, chain(A)) == [1]
    assert cache.match(chain(A)) == []
    assert cache.num_cached == 0
