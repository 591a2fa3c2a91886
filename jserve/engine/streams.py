"""The updates of one request on their way to their reader, in one event loop. Knows updates: no
engine's thread, no transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from jserve.engine.input_processor import PreparedRequest
from jserve.messages import RequestUpdate, merged

MERGE_FROM = 32  # unread updates per choice: their objects take more than what they say


class RequestStream:
    """Updates of one request, in order; the last one says so (`is_last`).

    A reader that lags gets what it has missed as one update per choice.

    Attributes:
      num_unread: updates that came since the reader last took some.
    """

    def __init__(
        self, prepared: PreparedRequest, on_abort: Callable[[RequestStream], None]
    ) -> None:
        self.request_id = prepared.request.request_id
        self.num_prompt_tokens = prepared.request.num_prompt_tokens
        self.num_choices = len(prepared.choices)
        self.num_unread = 0
        self._on_abort = on_abort
        self._unread: list[RequestUpdate] = []
        self._arrival: asyncio.Future[None] | None = None  # what a reader waits for

    async def __aiter__(self) -> AsyncIterator[RequestUpdate]:
        while True:
            while not self._unread:
                self._arrival = asyncio.get_running_loop().create_future()
                await self._arrival
            unread, self._unread, self.num_unread = self._unread, [], 0
            for update in unread if len(unread) == 1 else merged(unread):
                yield update
                if update.is_last:
                    return

    def abort(self) -> None:
        """Ends the request, now; harmless after its end. Whoever still reads is told."""
        self._on_abort(self)
        self.put(RequestUpdate(request_id=self.request_id, finish_reason="abort"))

    def put(self, update: RequestUpdate) -> None:
        self.num_unread += 1
        self._unread.append(update)
        if len(self._unread) >= MERGE_FROM * self.num_choices:
            self._unread = merged(self._unread)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def end(self, error: Exception, *, drop_unread: bool = False) -> None:
        """Lets an error be the last update, behind those that are unread, or in place of them."""
        if drop_unread:
            self._unread = []
        update = RequestUpdate(request_id=self.request_id, finish_reason="error", error=error)
        self.put(update)
