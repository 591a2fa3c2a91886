"""What operators ask over HTTP: is it alive, is it ready, what does it serve, what did it do. Knows
the front and its engine's metrics and limits: no requests.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jserve.errors import UnknownModel
from jserve.server.exposition import CONTENT_TYPE, metrics_text
from jserve.server.front import Front
from jserve.server.http_errors import JsonResponse
from jserve.server.http_request import call_of_http, front_of


def routes(front: Front) -> list[Route]:
    return [
        Route("/health/live", live),
        Route("/health/ready", ready),
        Route("/health", ready),
        Route("/version", show_version),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
    ]


async def live(request: Request) -> Response:
    """200 unless only a restart can help: an engine that has failed does not come back."""
    is_dead = front_of(request).is_dead
    return JsonResponse({"status": "dead" if is_dead else "live"}, 503 if is_dead else 200)


async def ready(request: Request) -> Response:
    """200 while requests are served; 503 while loading, draining, stuck or dead."""
    is_ready = front_of(request).is_ready
    return JsonResponse({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)


async def show_version(request: Request) -> Response:
    call_of_http(request)
    return JsonResponse({"version": version("jserve")})


def metrics(request: Request) -> Response:
    """The engine's registry. In a thread: it takes milliseconds."""
    registry = front_of(request).loaded_engine.metrics.registry
    return Response(metrics_text(registry), headers={"content-type": CONTENT_TYPE})


async def models(request: Request) -> Response:
    call_of_http(request)
    return JsonResponse({"object": "list", "data": [_model(request)]})


async def model(request: Request) -> Response:
    call_of_http(request)
    served, asked = _model(request), request.path_params["name"]
    if asked != served["id"]:
        raise UnknownModel(f"model={asked!r} is not served here; use {served['id']!r}")
    return JsonResponse(served)


_STARTED = int(time.time())


def _model(request: Request) -> dict[str, Any]:
    limits = front_of(request).engine.processor.limits
    return {
        "id": limits.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "jserve",
        "max_model_len": limits.max_model_len,
    }
