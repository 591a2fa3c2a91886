"""Who is calling, as far as the transport has proven it. Knows certificates' names only."""

from __future__ import annotations

import grpc

_NAMES = ("x509_common_name", "x509_subject_alternative_name", "x509_subject")


def identity_of(context: grpc.aio.ServicerContext) -> str:
    """Returns the common name of the certificate with which the caller authenticated itself, else
    its first alternative name, else its subject; "" without one. Nothing that the caller writes
    plays a part. gRPC gives an empty name where the certificate has none."""
    properties = context.auth_context()
    names = (name for key in _NAMES for name in properties.get(key, ()) if name)
    return next(names, b"").decode(errors="backslashreplace")
