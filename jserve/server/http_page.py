"""The live page, and what it draws: files, and the engine's activity as JSON. For administrators.
Knows no requests and no HTML.
"""

from __future__ import annotations

import asyncio
from importlib.resources import files
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jserve.errors import EngineDead
from jserve.server.front import Front
from jserve.server.http_errors import JsonResponse
from jserve.server.http_request import admin_call_of_http, front_of

ANSWER_WITHIN_S = 2.0  # the engine answers between two steps; a longer one is told as such
FILES = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.svg": "image/svg+xml",
    **dict.fromkeys(("page.js", "charts.js", "panels.js", "prompt.js"), "text/javascript"),
}
# All comes from here, and nothing of it runs in another site's frame.
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def routes(front: Front) -> list[Route]:
    return [
        Route("/", page),
        Route("/page/{name}", page),
        Route("/debug/state", state),
    ]


async def page(request: Request) -> Response:
    """A file of the page; index.html without a name."""
    admin_call_of_http(request)
    name = request.path_params.get("name", "index.html")
    if name not in FILES:
        raise HTTPException(404, f"there is no {request.url.path}")
    content = (files("jserve.server") / "page" / name).read_bytes()
    return Response(content, headers=_HEADERS, media_type=FILES[name])


async def state(request: Request) -> Response:
    """What the engine does now, with its steps after number `since` (query; default 0).

    `status` is "loading", "serving", "draining" or "stuck"; `reason` says why it is not serving.
    `activity` is None where the engine does not tell in time: while it loads, or a step takes long.
    """
    admin_call_of_http(request)
    since = request.query_params.get("since", "0")
    if not (since.isascii() and since.isdigit() and len(since) < 16):
        raise HTTPException(400, f"since={since!r} must be the number of a step, 0 or more")
    answer = await _state(front_of(request), int(since))
    return JsonResponse(answer, headers={"cache-control": "no-store"})


async def _state(front: Front, since: int) -> dict[str, Any]:
    try:
        engine = front.loaded_engine
    except EngineDead as error:
        return {"status": "loading", "reason": str(error), "model": "", "activity": None}
    status, reason = "serving", ""
    try:
        if not front.engine.is_ready:
            status, reason = "stuck", "the engine takes no requests; the server's log says why"
    except EngineDead as error:
        status, reason = "draining", str(error)
    activity: dict[str, Any] | None = None
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            activity = await engine.activity(since)
    except TimeoutError:
        reason = reason or f"the step that runs takes more than {ANSWER_WITHIN_S:g} s"
    except EngineDead as error:
        status, reason = "stuck" if status == "serving" else status, str(error)
    return {
        "status": status,
        "reason": reason,
        "model": engine.processor.limits.name,
        "is_chat_model": engine.processor.tokenizer.chat_template is not None,
        "activity": activity,
    }
