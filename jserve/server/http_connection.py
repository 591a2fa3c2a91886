"""One HTTP connection: whose certificate it has, and how long a request may take to arrive and its
answer to be taken. Knows uvicorn's protocol: no routes.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jserve.server.tls import name_in

# From a connection's first moment, or a request's first byte, until the request is complete: who
# sends a byte now and then would hold a connection for ever.
ARRIVAL_LIMIT_S = 60.0
# For as long a client may take nothing of an answer of which more waits than the system buffers.
STALL_LIMIT_S = 60.0


class HttpConnection(H11Protocol):
    """The kind of uvicorn's two that bounds a request's head."""

    _late: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None:  # each request's scope gets a copy of this state
            self.app_state = {**self.app_state, "certificate": name_in(tls.getpeercert())}
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unwatch()
        if self._stalled is not None:
            self._stalled.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_LIMIT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def _watch(self) -> None:
        is_arriving = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if not is_arriving:
            self._unwatch()
        elif self._late is None:
            self._late = self.loop.call_later(ARRIVAL_LIMIT_S, self.transport.abort)

    def _unwatch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
