"""The HTTP front end put together: every route, what all of them share, and the errors. Knows no
endpoint's insides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jserve.config import ServerSettings
from jserve.errors import JserveError, Overloaded
from jserve.server import (
    http_completions,
    http_debug,
    http_embeddings,
    http_health,
    http_page,
    http_tokens,
    openapi,
)
from jserve.server.front import Front
from jserve.server.http_errors import ClientGone, Faults, error_response, on_error
from jserve.server.http_guard import HttpGuard

# What each part of the API adds, in order of matching.
ROUTES: tuple[Callable[[Front], list[Route]], ...] = (
    http_health.routes,
    http_completions.routes,
    http_embeddings.routes,
    http_tokens.routes,
    openapi.routes,
    http_page.routes,
    http_debug.routes,
)
# What answers however many calls are open: probes must.
_UNCOUNTED = ("/health", "/metrics")
EXPOSED_HEADERS = (  # that a page of another site may read of an answer
    *("x-request-id", "retry-after", "retry-after-ms", "x-should-retry"),
    *(
        f"x-ratelimit-{what}-{of}"
        for what in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    ),
)


def make_app(
    front: Front,
    settings: ServerSettings,
    *,
    extra_routes: Sequence[Route] = (),
    local_names_only: bool = False,
    allowed_origins: Sequence[str] = (),
) -> Starlette:
    """Returns the HTTP API over the engine behind `front`, as an ASGI application; for the last
    arguments see HttpGuard."""
    kinds = (JserveError, HTTPException, ClientGone, RecursionError)
    app = Starlette(
        routes=[*(route for routes in ROUTES for route in routes(front)), *extra_routes],
        exception_handlers=dict.fromkeys(kinds, on_error),
    )
    app.state.front = front
    app.state.settings = settings
    app.add_middleware(OpenCalls, limit=settings.max_open_streams)
    app.add_middleware(Faults)
    app.add_middleware(
        HttpGuard,
        front=front,
        max_header_bytes=settings.max_header_bytes,
        local_names_only=local_names_only,
        allowed_origins=allowed_origins,
    )
    if allowed_origins:  # before the guard: a browser asks without a key whether it may send one
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    return app


class OpenCalls:
    """Refuses calls beyond `limit` at once."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_UNCOUNTED):
            await self._app(scope, receive, send)
            return
        if self._num_open >= self._limit:
            error = Overloaded(f"{self._num_open} calls are open; try again later")
            await error_response(error)(scope, receive, send)
            return
        self._num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_open -= 1
