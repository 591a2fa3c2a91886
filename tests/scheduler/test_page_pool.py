"""PagePool: a stack of free pages that are handed out once and taken back once."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.page_pool import NULL_PAGE, PagePool


def test_pages_are_handed_out_once_low_ids_first_and_never_the_null_page():
    pool = PagePool(5)
    assert pool.num_usable == 4
    assert pool.allocate(3).tolist() == [3, 2, 1]
    assert pool.allocate(1).tolist() == [4]
    assert pool.num_free == 0
    assert NULL_PAGE not in range(1, 5)


def test_a_shortage_is_a_return_value_and_takes_nothing():
    pool = PagePool(4)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert len(pool.allocate(0)) == 0


def test_what_comes_back_is_handed_out_again():
    pool = PagePool(4)
    pages = pool.allocate(3)
    pool.free(pages[:2])
    assert sorted(pool.allocate(2).tolist()) == sorted(pages[:2].tolist())


def test_a_page_that_is_given_back_twice_is_caught():
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.free(pages)
    with pytest.raises(AssertionError, match="a free page is given back"):
        pool.free(pages[:1])


def test_host_pages_begin_at_zero_and_may_be_none():
    assert sorted(PagePool(2, first=0).allocate(2).tolist()) == [0, 1]
    assert PagePool(0, first=0).allocate(1) is None


def test_integrity_needs_every_page_exactly_once():
    pool = PagePool(5)
    held = pool.allocate(2)
    pool.check_integrity(held)
    with pytest.raises(AssertionError, match="lost"):
        pool.check_integrity(held[:1])
    with pytest.raises(AssertionError, match="two holders"):
        pool.check_integrity(np.concatenate([held, held[:1]]))
