"""The list of compiled shapes: short, and something in it holds every step."""

from __future__ import annotations

import pytest

from scheduler.bucket import Bucket, choose_bucket, make_buckets

SIZES = [(1, 1), (1, 64), (2, 2), (3, 7), (4, 64), (8, 512), (32, 512), (100, 1000), (256, 256)]


@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), SIZES)
def test_every_step_within_the_limits_has_a_bucket_that_holds_it(
    max_num_seqs, max_num_batched_tokens
):
    buckets = make_buckets(max_num_seqs, max_num_batched_tokens)
    for num_rows in range(1, max_num_seqs + 1):
        for num_tokens in {num_rows, num_rows + 1, 2 * num_rows, max_num_batched_tokens}:
            if num_rows <= num_tokens <= max_num_batched_tokens:
                bucket = choose_bucket(buckets, num_tokens, num_rows)
                assert bucket.num_tokens >= num_tokens
                assert bucket.num_rows >= num_rows
                assert not bucket.decode_only or num_tokens == num_rows


@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), SIZES)
def test_the_list_grows_with_the_logarithm_of_the_limits(max_num_seqs, max_num_batched_tokens):
    buckets = make_buckets(max_num_seqs, max_num_batched_tokens)
    assert len(set(buckets)) == len(buckets)
    assert len(buckets) <= max_num_seqs.bit_length() + 2 * max_num_batched_tokens.bit_length()
    assert all(b.num_tokens == b.num_rows for b in buckets if b.decode_only)


def test_a_step_of_single_tokens_takes_a_decode_bucket_and_the_smallest():
    buckets = make_buckets(16, 64)
    for num_rows in range(1, 17):
        bucket = choose_bucket(buckets, num_rows, num_rows)
        assert bucket.decode_only
        fitting = [b for b in buckets if b.decode_only and b.num_rows >= num_rows]
        assert bucket.num_rows == min(b.num_rows for b in fitting)


def test_a_step_with_a_chunk_never_takes_a_decode_bucket():
    assert not choose_bucket(make_buckets(16, 64), 3, 2).decode_only


def test_a_step_beyond_the_largest_bucket_is_a_broken_invariant():
    with pytest.raises(AssertionError, match="no bucket holds num_tokens=65"):
        choose_bucket(make_buckets(4, 64), 65, 3)


def test_the_next_larger_bucket_is_taken_where_the_fitting_one_is_missing():
    buckets = [Bucket(16, 4, False), Bucket(64, 4, False)]
    assert choose_bucket(buckets, 17, 1) == Bucket(64, 4, False)
    assert choose_bucket(buckets, 2, 2) == Bucket(16, 4, False)
