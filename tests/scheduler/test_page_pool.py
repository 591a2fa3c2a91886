"""PagePool: pages are handed out once, counted, and come back."""

from __future__ import annotations

import pytest

from scheduler.page_pool import NULL_PAGE, PagePool


def test_all_pages_but_the_null_page_are_handed_out_low_ids_first():
    pool = PagePool(6)
    assert pool.num_usable == pool.num_free == 5
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(2) == [4, 5]
    assert pool.num_free == 0
    assert NULL_PAGE == 0
    pool.check_integrity()


def test_a_shortage_is_none_and_changes_nothing():
    pool = PagePool(4)
    pool.allocate(1)
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    assert pool.allocate(2) == [2, 3]
    assert pool.allocate(0) == []


def test_a_page_is_free_when_its_last_user_lets_go():
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.retain(page)
    assert pool.ref_count(page) == 2
    assert pool.release(page) == 1
    assert pool.num_free == 1
    assert pool.release(page) == 0
    assert pool.num_free == 2
    pool.check_integrity()


def test_using_a_free_page_is_a_broken_invariant():
    pool = PagePool(3)
    with pytest.raises(AssertionError, match="release of free page 2"):
        pool.release(2)
    with pytest.raises(AssertionError, match="retain of free page 2"):
        pool.retain(2)


def test_the_integrity_check_finds_a_page_that_is_free_and_used():
    pool = PagePool(4)
    pool.allocate(2)
    pool._ref_counts[3] = 1
    with pytest.raises(AssertionError, match="page 3: 1 references"):
        pool.check_integrity()
