"""What every backend of ragged paged attention has to keep, whatever it computes with: tests that
its own test module inherits, and a prompt in chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from tests.rpa_cases import Case, Step, build

Run = Callable[[Case, Step], tuple[np.ndarray, np.ndarray | None]]


class AttentionProperties:
    """Attributes:
    run: (case, step) -> the output and, unless it is another's to write, the pool.
    case: the step that is disturbed.
    poisoned: what that step is changed to, before what nobody reads is filled with NaN.
    skips_what_the_window_left: whether that is not read either.
    """

    run: Run
    case: Case
    poisoned: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    skips_what_the_window_left = False

    def test_nan_in_unused_pages_and_padding_changes_nothing(self):
        for changes in self.poisoned:
            case = dataclasses.replace(self.case, **changes)
            step = build(case)
            clean, _ = self.run(case, step)
            used = np.zeros(step.kv_pool.shape[1:3], bool)
            for s, (kv_len, q_len) in enumerate(case.rows):
                begin, end = 0, kv_len - q_len
                if self.skips_what_the_window_left and case.sliding_window:
                    begin = max(0, end - case.sliding_window + 1)
                position = np.arange(begin, end)
                pages = step.page_indices[s, position // case.page_size]
                used[pages, position % case.page_size] = True
            step.kv_pool[:, ~used] = np.nan  # whole pages, the null page, tails of last pages
            for array in (step.q, step.k, step.v):
                array[step.num_real_tokens :] = np.nan
            out, _ = self.run(case, step)
            np.testing.assert_array_equal(out, clean, err_msg=str(changes))

    def test_entries_of_page_indices_past_a_row_are_not_followed(self):
        step = build(self.case)
        clean, _ = self.run(self.case, step)
        for s, pages in enumerate(self.case.pages_of_rows):
            step.page_indices[s, pages:] = 10**6
        out, _ = self.run(self.case, step)
        np.testing.assert_array_equal(out, clean)

    def test_permuting_physical_pages_changes_nothing(self):
        step = build(self.case)
        clean, clean_pool = self.run(self.case, step)
        num_pages = step.kv_pool.shape[1]
        moved = np.concatenate([[0], 1 + np.random.default_rng(7).permutation(num_pages - 1)])
        pool = np.empty_like(step.kv_pool)
        pool[:, moved] = step.kv_pool  # page i now lies at moved[i]
        step.kv_pool, step.page_indices = pool, moved[step.page_indices].astype(np.int32)
        out, out_pool = self.run(self.case, step)
        np.testing.assert_array_equal(out, clean)
        if clean_pool is not None:
            np.testing.assert_array_equal(out_pool[:, moved[1:]], clean_pool[:, 1:])

    def test_a_row_that_went_wrong_spoils_only_itself(self):
        step = build(self.case)
        clean, _ = self.run(self.case, step)
        step.q[1] = np.nan
        if self.case.rows[1][1] == 1:  # else others of its row read its key
            step.k[1], step.v[1] = np.nan, np.nan
        out, _ = self.run(self.case, step)
        assert np.isnan(out[1]).all()
        np.testing.assert_array_equal(np.delete(out, 1, axis=0), np.delete(clean, 1, axis=0))


def in_chunks(run: Run, case: Case, chunk: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Runs the one row of `case`, a whole prompt, chunk by chunk on one pool, in steps of
    `num_tokens`; returns the output of all and the pool."""
    whole = build(case)
    (kv_len, _), outs, pool = case.rows[0], [], whole.kv_pool
    for start in range(0, kv_len, chunk):
        end = min(start + chunk, kv_len)
        row, padding = (end, end - start), num_tokens - (end - start)
        part = build(dataclasses.replace(case, rows=(row,), padding_tokens=padding))
        for name in "qkv":
            getattr(part, name)[: end - start] = getattr(whole, name)[start:end]
        part.kv_pool, part.page_indices = pool, whole.page_indices
        out, pool = run(case, part)
        outs.append(out[: end - start])
    return np.concatenate(outs), pool
