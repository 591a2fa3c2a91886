"""Device profiles, started over HTTP. For administrators. Knows when a profile begins and ends: not
what is in it.
"""

from __future__ import annotations

import asyncio
import math

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jserve.errors import Forbidden
from jserve.server.front import Front
from jserve.server.http_errors import JsonResponse
from jserve.server.http_request import admin_call_of_http, unless_gone

DEFAULT_S, MAX_S = 3.0, 60.0


def routes(front: Front) -> list[Route]:
    return [Route("/debug/profile", Profile(front).post, methods=["POST"])]


class Profile:
    """One profile at a time, of the engine behind `front`."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._is_running = False

    async def post(self, request: Request) -> Response:
        """Records for `seconds` (query; at most MAX_S), then answers with the folder it wrote. Ends
        early if the client leaves. 409 while another one runs."""
        admin_call_of_http(request)
        seconds = _seconds(request.query_params.get("seconds", str(DEFAULT_S)))
        profiler = self._front.engine.profiler
        if profiler is None:
            raise Forbidden("profiles are off; start the server with --profile_dir=FOLDER")
        if self._is_running:
            raise HTTPException(409, "a profile is being taken; try again when it has ended")
        self._is_running = True
        try:
            folder = await asyncio.to_thread(profiler.start)
            try:
                await unless_gone(request, asyncio.sleep(seconds))
            finally:
                await asyncio.to_thread(profiler.stop)
        finally:
            self._is_running = False
        return JsonResponse({"folder": folder, "seconds": seconds})


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_S:
        raise HTTPException(400, f"seconds={text!r:.50} must be above 0 and at most {MAX_S:g}")
    return seconds
