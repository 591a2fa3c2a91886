"""Brings what schemathesis makes up nearer to what a server can do, so that more of it reaches the
engine: legal cases stay legal, illegal ones illegal. Named to schemathesis by SCHEMATHESIS_HOOKS.
"""

from __future__ import annotations

from typing import Any

import schemathesis

_TIMES = ("timeout_s", "timeout", "queue_timeout_s")
_TIMEOUT_HEADER = "x-request-timeout-ms"


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """A model that is served, most times; what others need; time to answer."""
    body, headers = case.body, case.headers
    if isinstance(body, dict):
        if isinstance(body.get("model"), str) and len(body["model"]) % 4:
            del body["model"]
        if isinstance(body.get("stream_options"), dict) and _is_off(body, "stream"):
            body["stream"] = True
        if type(body.get("top_logprobs")) is int and _is_off(body, "logprobs"):
            body["logprobs"] = True
        for name in _TIMES:
            if type(body.get(name)) in (int, float) and 0 < body[name] < 1:
                body[name] += 5
    text = headers.get(_TIMEOUT_HEADER) if headers else None
    if isinstance(text, str) and text.isdecimal() and text[0] != "0" and len(text) <= 3:
        headers[_TIMEOUT_HEADER] = text + "000"


def _is_off(body: dict[str, Any], name: str) -> bool:
    """Whether a switch is legal, and not on."""
    return body.get(name) is None or body[name] is False
