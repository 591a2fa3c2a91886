"""What becomes of a preempted request's pages: copied to host memory and back, or recomputed, as is
cheaper. Knows counts, page ids and predicted seconds: not who is preempted, not how pages move."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import numpy as np

from scheduler.config import SchedulerConfig
from scheduler.page_pool import PagePool
from scheduler.plan import NO_COPIES
from scheduler.request import Request
from scheduler.step_shape import StepShape
from scheduler.step_time import StepTime

log = logging.getLogger(__name__)


class Preemption:
    """Host pages, and the copies that the next step has to make.

    Args:
      swap_page_s: seconds that copying one page out, or in, takes.

    Attributes:
      counts: preemptions by cause.
      num_swapped_out, num_swapped_in: pages copied so far.
      listener: told of each preemption and its cause.
    """

    def __init__(self, config: SchedulerConfig, step_time: StepTime, swap_page_s: float) -> None:
        self.host = PagePool(config.num_host_pages, first=0)
        self.counts = Counter[str]()
        self.num_swapped_out = self.num_swapped_in = 0
        self.listener: Callable[[Request, str], None] | None = None
        self._config = config
        self._step_time = step_time
        self.swap_page_s = swap_page_s
        self._out: list[np.ndarray] = []
        self._in: list[np.ndarray] = []
        self._given_back: list[np.ndarray] = []  # still read or written by copies not handed over

    def on_preempt(self, request: Request, pages: np.ndarray, num_computed: int, why: str) -> None:
        """Counts and logs a preemption, and keeps the pages of what is computed if that pays."""
        self.counts[why] += 1
        if self.listener:
            self.listener(request, why)
        pages = pages[: -(-num_computed // self._config.page_size)]
        how = "swap" if self._keep(request, pages, num_computed) else "recompute"
        log.info(
            "preempted %s with %d computed tokens: %s; %s",
            request.request_id,
            num_computed,
            why,
            how,
        )

    def _keep(self, request: Request, pages: np.ndarray, num_computed: int) -> bool:
        if not 0 < len(pages) <= self.host.num_free:
            return False
        if 2 * len(pages) * self.swap_page_s >= self._recompute_s(num_computed):
            return False
        host_pages = self.host.allocate(len(pages))
        assert host_pages is not None, "the host pages were counted just before"
        self._out.append(np.stack([pages, host_pages], axis=1))
        self.num_swapped_out += len(pages)
        request.host_pages, request.num_swapped_tokens = host_pages, num_computed
        return True

    def _recompute_s(self, num_tokens: int) -> float:
        config = self._config
        chunk = min(num_tokens, config.prefill_chunk, config.max_num_batched_tokens)
        middle = StepShape(1, 0, chunk, (num_tokens + chunk) // 2, chunk * num_tokens // 2)
        return self._step_time.predict(middle) * num_tokens / chunk

    def bring_back(self, request: Request, pages: np.ndarray, num_cached: int) -> int:
        """Fills `pages` of a request that starts again, the first `num_cached` of which hold their
        content already. Returns the tokens whose KV they will have."""
        size = self._config.page_size
        host_pages, num_computed = request.host_pages, num_cached * size
        if host_pages is not None and request.num_swapped_tokens > num_computed:
            num_computed = request.num_swapped_tokens
            missing = slice(num_cached, len(host_pages))
            self._in.append(np.stack([host_pages[missing], pages[missing]], axis=1))
            self.num_swapped_in += len(host_pages) - num_cached
        self.drop(request)
        return num_computed

    def drop(self, request: Request) -> None:
        """Lets go of a request's host pages."""
        if request.host_pages is not None:
            self._given_back.append(request.host_pages)
            request.host_pages, request.num_swapped_tokens = None, 0

    def take_copies(self) -> tuple[np.ndarray, np.ndarray]:
        """Hands over the copies to make before the next step: out i32[n, 2], then in i32[m, 2]."""
        if not (self._out or self._in or self._given_back):
            return NO_COPIES, NO_COPIES
        out, back = (np.concatenate([NO_COPIES, *pairs]) for pairs in (self._out, self._in))
        for pages in self._given_back:
            self.host.free(pages)
        self._out, self._in, self._given_back = [], [], []
        return out, back

    @property
    def num_host_pages_used(self) -> int:
        given_back = sum(map(len, self._given_back))
        return self.host.num_usable - self.host.num_free - given_back
