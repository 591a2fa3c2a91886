"""Listens for HTTP in the event loop that gRPC runs in, and stops without losing answers. Knows
sockets and uvicorn: no routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from jserve.config import ServerSettings
from jserve.errors import ConfigError
from jserve.server.http_connection import HttpConnection

KEEP_ALIVE_S = 75  # longer than the pools of common clients and proxies keep a connection
_BACKLOG = 2048

logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # main.py tells the server's life


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are main.py's


class HttpServer:
    """An HTTP server that is bound from construction on, and answers once started.

    Raises:
      ConfigError: the address cannot be bound.
    """

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, tls: ssl.SSLContext | None = None
    ) -> None:
        self._sockets = _bound(settings.host, settings.http_port)
        self.port: int = self._sockets[0].getsockname()[1]
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"{'https' if tls else 'http'}://{host}:{self.port}"
        config = uvicorn.Config(
            app,
            http=HttpConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # a caller must not choose its own address
            server_header=False,
            h11_max_incomplete_event_size=settings.max_header_bytes,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        config.load()
        config.ssl = tls
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._serving = asyncio.create_task(self._server.serve(self._sockets))

    async def stop(self, grace_s: float) -> None:
        """Closes the port, waits for open answers for up to `grace_s` seconds, cuts the rest."""
        if self._serving is None:
            for bound in self._sockets:
                bound.close()
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait({self._serving}, timeout=grace_s + 0.2)
        if not done:
            self._server.force_exit = True
            for task in self._server.server_state.tasks:
                task.cancel()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
        await self._serving


def _bound(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address of `host`, all with one port."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        families = {family: address for family, _, _, _, address in found}
        for family, address in families.items():
            sockets.append(
                socket.create_server(
                    (address[0], port),
                    family=family,
                    backlog=_BACKLOG,
                    dualstack_ipv6=family == socket.AF_INET6 and len(families) == 1,
                )
            )
            # Those accepted inherit it. asyncio would do it, but not for sockets without a named
            # protocol; then each answer's second packet waits 40 ms for the first one's receipt.
            sockets[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            port = sockets[0].getsockname()[1]
    except OSError as error:
        for bound in sockets:
            bound.close()
        raise ConfigError(
            f"cannot serve HTTP on {host}:{port} ({error}); choose a free --http_port (0 draws "
            "one), a --host of this machine, or --noenable_http"
        ) from error
    return sockets
