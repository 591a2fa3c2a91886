"""Who makes a gRPC call, as far as the transport has proven it. Knows metadata and names."""

from __future__ import annotations

import base64
from collections.abc import Mapping

import grpc

from jserve.server.caller import Gate
from jserve.server.front import Call

_NAMES = ("x509_common_name", "x509_subject_alternative_name", "x509_subject")


def identity_of(context: grpc.aio.ServicerContext) -> str:
    """Returns the common name of the certificate with which the caller authenticated itself, else
    its first alternative name, else its subject; "" without one. Nothing that the caller writes
    plays a part. gRPC gives an empty name where the certificate has none."""
    properties = context.auth_context()
    names = (name for key in _NAMES for name in properties.get(key, ()) if name)
    return next(names, b"").decode(errors="backslashreplace")


def call_of(context: grpc.aio.ServicerContext, gate: Gate, method: str) -> Call:
    """Returns what is known of a call. Raises Unauthenticated, as `gate` does."""
    metadata = {name: value for name, value in context.invocation_metadata() or ()}
    return Call(
        method=method,
        caller=gate.admit(api_key_of(metadata), identity_of(context)),
        peer=context.peer(),
        traceparent=str(metadata.get("traceparent", "")),
    )


def api_key_of(headers: Mapping[str, str | bytes]) -> str | None:
    """Returns the key of "authorization: Bearer KEY", or of "x-api-key"; None without. Names are
    in lower case. A browser asks for a name and a password and sends both as "Basic": there the
    password is the key, whatever the name (RFC 7617)."""
    scheme, _, sent = str(headers.get("authorization", "")).partition(" ")
    sent = sent.strip()
    if scheme.lower() == "bearer" and sent:
        return sent
    if scheme.lower() == "basic" and sent:
        try:
            return base64.b64decode(sent, validate=True).decode().partition(":")[2]
        except ValueError:
            return ""  # which is nobody's
    return str(headers["x-api-key"]) if "x-api-key" in headers else None
