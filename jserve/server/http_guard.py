"""Stands before every HTTP route: who may see which, how large a request's head may be. Knows
paths, headers and callers: no bodies.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jserve.errors import Forbidden, Unauthenticated
from jserve.server.caller import Caller, Gate, Quota, admitted
from jserve.server.http_errors import error_response
from jserve.server.identity import api_key_of

OPEN_PATHS = ("/health", "/health/live", "/health/ready")
# What any key opens. All else (the live page, metrics, profiles) shows or changes something of all
# callers, and is for administrators.
CALLER_PATHS = ("/v1/", "/tokenize", "/detokenize", "/openapi.json")


class HttpGuard:
    """Refuses, before anything of its body is read, a request whose caller is not known or may not
    see this, whose head is too large, or that another site's page made a browser send."""

    def __init__(self, app: ASGIApp, gate: Gate, max_header_bytes: int) -> None:
        self._app = app
        self._gate = gate
        self._max_header_bytes = max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        scope["jserve.certificate"] = scope.get("state", {}).get("certificate", "")
        try:
            caller = self._admitted(scope)
        except (Unauthenticated, Forbidden, HTTPException) as error:
            response = error_response(error)
            if isinstance(error, Unauthenticated) and not _is_for_callers(scope):
                response.headers.append("www-authenticate", 'Basic realm="jserve"')
            await response(scope, receive, send)
            return
        if caller.quota is not None:
            send = _telling_quota(send, caller.quota)
        await self._app(scope, receive, send)

    def _admitted(self, scope: Scope) -> Caller:
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size + len(scope.get("raw_path") or b"") + len(scope["query_string"]) > (
            self._max_header_bytes
        ):
            raise HTTPException(
                431, f"the head is larger than {self._max_header_bytes} bytes (--max_header_bytes)"
            )
        headers = Headers(scope=scope)
        caller = self._gate.admit(api_key_of(headers), scope["jserve.certificate"])
        admitted.set(caller)
        if not caller.is_admin and not _is_for_callers(scope):
            raise Forbidden(f"{scope['path']} is for administrators; use a key with admin rights")
        # A browser adds the key that it was told to whatever any page has it send here.
        is_foreign = headers.get("sec-fetch-site", "none") not in ("same-origin", "none")
        if is_foreign and scope["method"] not in ("GET", "HEAD"):
            raise Forbidden("this request was made by a page of another site; use this server's")
        return caller


def _is_for_callers(scope: Scope) -> bool:
    path: str = scope["path"]
    return path.startswith(CALLER_PATHS)


def _telling_quota(send: Send, quota: Quota) -> Send:
    async def send_with_quota(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(quota.headers())
        await send(message)

    return send_with_quota
