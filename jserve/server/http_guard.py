"""Stands before every HTTP route: who may see which, how large a request's head may be. Knows
paths, headers and callers: no bodies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jserve.errors import Forbidden, Unauthenticated
from jserve.server.caller import Caller, Quota, admitted
from jserve.server.front import Front
from jserve.server.http_errors import error_response
from jserve.server.identity import api_key_of

OPEN_PATHS = ("/health", "/health/live", "/health/ready")
# What any key opens. All else (the live page, metrics, profiles) shows or changes something of all
# callers, and is for administrators.
CALLER_PATHS = ("/v1/", "/tokenize", "/detokenize", "/openapi.json")


class HttpGuard:
    """Refuses, before anything of its body is read, a request whose caller is not known or may not
    see this, whose head is too large, or that another site's page made a browser send.

    With `local_names_only` it has to be addressed by number or as localhost: a name that a site has
    pointed at this machine makes a browser take its page for ours. Pages of `allowed_origins` may
    do all that their callers may.
    """

    def __init__(
        self,
        app: ASGIApp,
        front: Front,
        max_header_bytes: int,
        *,
        local_names_only: bool = False,
        allowed_origins: Sequence[str] = (),
    ) -> None:
        self._app = app
        self._front = front
        self._max_header_bytes = max_header_bytes
        self._local_names_only = local_names_only
        self._allowed_origins = allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
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
        if self._local_names_only and not _is_local(headers.get("host", "")):
            raise HTTPException(
                421,
                f"this server is not {headers['host']!r:.80}: without keys it answers to localhost "
                "and addresses only; start it with --api_keys, or behind a proxy with --insecure",
            )
        certificate = scope.get("state", {}).get("certificate", "")  # see http_connection
        caller = self._front.gate.admit(api_key_of(headers), certificate)
        admitted.set(caller)
        if not caller.is_admin and not _is_for_callers(scope):
            raise Forbidden(f"{scope['path']} is for administrators; use a key with admin rights")
        # "*" lets any page use a key of its own: not the password that a browser keeps.
        is_allowed = headers.get("origin") in self._allowed_origins
        changes = scope["method"] not in ("GET", "HEAD")
        if changes and not is_allowed and _is_of_another_site(headers):
            raise Forbidden("a page of another site made this request; use this server's own")
        return caller


def _is_local(host: str) -> bool:
    """Whether a Host header is empty, an address or localhost."""
    name = re.sub(r":\d*$", "", host.strip()).strip("[]").lower().rstrip(".")
    if not name or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_of_another_site(headers: Headers) -> bool:
    """Whether a browser sends what another site's page asked for, and adds by itself what opens
    this server: the password that it was told, or where it runs. A page cannot make it add a key.

    Source: W3C, Fetch Metadata Request Headers, which browsers send over TLS and to this machine
    only; elsewhere there is the origin (WHATWG, Fetch, "Origin").
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is None and origin is not None:
        is_own = _host_of(origin) == headers.get("host", "")
    else:
        is_own = site in (None, "same-origin", "none")
    is_password = headers.get("authorization", "basic").lower().startswith("basic")
    has_key = "x-api-key" in headers or not is_password
    return not is_own and not has_key


def _host_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:  # http://[
        return None


def _is_for_callers(scope: Scope) -> bool:
    path: str = scope["path"]
    return path.startswith(CALLER_PATHS)


def _telling_quota(send: Send, quota: Quota) -> Send:
    async def send_with_quota(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(quota.headers())
        await send(message)

    return send_with_quota
