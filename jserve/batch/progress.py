"""Shows how far a batch job is. Knows bytes, tokens and a terminal: no lines, no engine."""

from __future__ import annotations

import time

from tqdm import tqdm

_FORMAT = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


class BatchProgress:
    """A bar on stderr whose length is the input's bytes, so that no line need be counted ahead.

    ETA follows from the bytes answered in this run; those of an earlier run move the bar only.
    """

    def __init__(self, total_bytes: int, enabled: bool) -> None:
        # smoothing 0: the mean rate of the whole run; lines end in clumps.
        self._bar = tqdm(
            total=total_bytes, disable=not enabled, bar_format=_FORMAT, smoothing=0, unit="B"
        )
        self._started = time.monotonic()
        self._num_tokens = self._num_ok = self._num_errors = 0

    def __enter__(self) -> BatchProgress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()

    def skip(self, num_bytes: int) -> None:
        if not self._bar.disable:
            self._bar.initial += num_bytes  # out of the rate that the ETA is made from
        self._bar.update(num_bytes)

    def answered(self, num_bytes: int, num_tokens: int, *, ok: bool) -> None:
        self._num_tokens += num_tokens
        self._num_ok += ok
        self._num_errors += not ok
        rate = self._num_tokens / max(time.monotonic() - self._started, 1e-9)
        text = f"{self._num_ok} ok, {self._num_errors} errors, {rate:.1f} tok/s"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(num_bytes)
