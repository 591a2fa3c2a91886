"""Keeps KV pages of preempted requests in host memory. Knows pages by id, not whose they are.

Each page leaves as one array of its own, which the runtime moves to the devices' pinned host memory
and back: nobody waits, no byte passes through numpy, a device's part of a split page stays its own,
and the host holds no more than the pages that are out. What is read before it is written, and what
comes back before it has quite left, is in order because each array depends on the one before.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jserve.runner.mesh import pool_sharding
from pallas_kernels.kv_layout import NULL_PAGE
from pallas_kernels.page_copy import gather_pages, scatter_pages

log = logging.getLogger(__name__)
# On a CPU a page costs four times as much alone, and no less with more than 8; a page of a large
# model is 8 MiB, which fills a link to the host by itself.
COPY_PAGES = 8  # per call of a program
# Pages on their way take device memory besides the pool. More calls than these wait for the oldest.
MOST_CALLS_ON_THEIR_WAY = 4
_TIMED_CALLS = 5

Page = Float[Array, "L p R W"]


def take_pages(kv_pool: Float[Array, "L P p R W"], page_ids: Int[Array, " n"]) -> tuple[Page, ...]:
    """Returns n pages, each an array of its own, so that each can go its own way."""
    return tuple(gather_pages(kv_pool, page_ids[i : i + 1])[0] for i in range(COPY_PAGES))


def put_pages(
    kv_pool: Float[Array, "L P p R W"], pages: tuple[Page, ...], page_ids: Int[Array, " n"]
) -> tuple[Float[Array, "L P p R W"], Int[Array, " n"]]:
    """Returns the pool, to be donated, with pages[i] in page_ids[i]; and the ids, for whoever wants
    to know when that is done."""
    for i, page in enumerate(pages):
        kv_pool = scatter_pages(kv_pool, page[None], page_ids[i : i + 1])
    return kv_pool, page_ids


def page_sharding(mesh: Mesh) -> NamedSharding:
    """A page [L, p, R, W] is split as the pool is."""
    layers, _, *rest = pool_sharding(mesh).spec
    return NamedSharding(mesh, PartitionSpec(layers, *rest))


class SwapSpace:
    """Host memory for `num_host_pages` pages, and the two compiled programs that lead there.

    Attributes:
      seconds_per_page: what a page takes one way, as measured by `warm_up`.
    """

    def __init__(
        self,
        mesh: Mesh,
        kv_pool: Float[Array, "L P p R W"],
        take: Callable[..., tuple[Page, ...]],
        put: Callable[..., tuple[Array, Array]],
        num_host_pages: int,
    ) -> None:
        self._on_device = page_sharding(mesh)
        self._on_host = self._on_device.with_memory_kind("pinned_host")
        self._take, self._put = take, put
        self._num_pages = kv_pool.shape[1]
        self._pages: list[Page | None] = [None] * num_host_pages
        self._null_page = take(kv_pool, _padded([]))[0]
        self._on_their_way: deque[Sequence[Array]] = deque()
        self.seconds_per_page = 0.0

    def move(
        self, kv_pool: Float[Array, "L P p R W"], copies_out: np.ndarray, copies_in: np.ndarray
    ) -> Float[Array, "L P p R W"]:
        """Takes pages out, then brings pages in; returns the pool, which is donated if any come in.

        Copies are i32[n, 2] pairs (from, to). A host page is held until it comes in or another
        takes its place; those of the last few calls a little longer.
        """
        for device_ids, host_ids in self._calls(*copies_out.T):
            for host_id, page in zip(host_ids, self._out(kv_pool, device_ids), strict=True):
                self._pages[host_id] = page
        for device_ids, host_ids in self._calls(*copies_in.T[::-1]):
            kv_pool = self._in(kv_pool, [self._leave(i) for i in host_ids], device_ids)
        return kv_pool

    def warm_up(self, kv_pool: Float[Array, "L P p R W"]) -> Float[Array, "L P p R W"]:
        """Times the two ways on the null page; returns the pool, which is donated."""
        seconds = []
        for _ in range(_TIMED_CALLS):
            kv_pool.block_until_ready()
            begin = time.perf_counter()
            pages = self._out(kv_pool, [NULL_PAGE] * COPY_PAGES)
            kv_pool = self._in(kv_pool, pages, [NULL_PAGE] * COPY_PAGES)
            kv_pool.block_until_ready()
            seconds.append(time.perf_counter() - begin)
        self.seconds_per_page = float(np.median(seconds)) / (2 * COPY_PAGES)
        log.info(
            "swap space for %d pages, %.1f MiB: %.3f ms per page and way",
            len(self._pages),
            len(self._pages) * self._null_page.nbytes / 2**20,
            1e3 * self.seconds_per_page,
        )
        return kv_pool

    def reset(self) -> None:
        """Forgets all pages, those on their way included."""
        self._pages = [None] * len(self._pages)
        self._on_their_way.clear()

    def _calls(
        self, device_ids: np.ndarray, host_ids: np.ndarray
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yields the ids of each call. An id out of range fails on no device, it corrupts."""
        assert ((device_ids > NULL_PAGE) & (device_ids < self._num_pages)).all(), f"{device_ids=}"
        assert ((host_ids >= 0) & (host_ids < len(self._pages))).all(), f"{host_ids=}"
        for start in range(0, len(host_ids), COPY_PAGES):
            call = slice(start, start + COPY_PAGES)
            yield device_ids[call].tolist(), host_ids[call].tolist()

    def _out(self, kv_pool: Array, page_ids: Sequence[int]) -> Sequence[Page]:
        pages = self._take(kv_pool, _padded(page_ids))[: len(page_ids)]
        pages = jax.device_put(pages, self._on_host)
        self._wait_behind(pages)
        return pages

    def _in(self, kv_pool: Array, pages: Sequence[Page], page_ids: Sequence[int]) -> Array:
        pages = jax.device_put(tuple(pages), self._on_device)
        unused = COPY_PAGES - len(pages)
        kv_pool, done = self._put(kv_pool, (*pages, *[self._null_page] * unused), _padded(page_ids))
        self._wait_behind((done,))
        return kv_pool

    def _leave(self, host_id: int) -> Page:
        page, self._pages[host_id] = self._pages[host_id], None
        assert page is not None, f"host page {host_id} holds nothing"
        return page

    def _wait_behind(self, call: Sequence[Array]) -> None:
        self._on_their_way.append(call)
        if len(self._on_their_way) > MOST_CALLS_ON_THEIR_WAY:
            jax.block_until_ready(self._on_their_way.popleft())


def _padded(page_ids: Sequence[int]) -> np.ndarray:
    return np.array([*page_ids, *[NULL_PAGE] * (COPY_PAGES - len(page_ids))], np.int32)
