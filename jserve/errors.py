"""The errors a caller can meet, and what each is called on the wire. Knows no transport library."""

from __future__ import annotations

from typing import NamedTuple


class JserveError(Exception):
    """Base of every error that jserve raises on purpose; its text is one line with the remedy."""


class InvalidRequest(JserveError):
    """The caller's request can never be served as it stands."""


class Overloaded(JserveError):
    """The queue is full; the same request may succeed later."""


class DeadlineExceeded(JserveError):
    """The request's own deadline passed before it finished."""


class RequestFailed(JserveError):
    """The request cannot go on, though it was legal and the engine is well; others are not hurt."""


class EngineDead(JserveError):
    """The engine is not running (not started, draining, stopped, or failed)."""


class ConfigError(JserveError):
    """The engine's settings contradict each other or the device."""


class CheckpointError(JserveError):
    """A model's files are missing, damaged, or of a kind that is not supported."""


class WireCode(NamedTuple):
    """What an error is called over gRPC (status name) and HTTP (status code)."""

    grpc: str
    http: int


WIRE_CODES: dict[type[JserveError], WireCode] = {
    InvalidRequest: WireCode("INVALID_ARGUMENT", 400),
    Overloaded: WireCode("RESOURCE_EXHAUSTED", 429),
    DeadlineExceeded: WireCode("DEADLINE_EXCEEDED", 504),
    EngineDead: WireCode("UNAVAILABLE", 503),
}
INTERNAL = WireCode("INTERNAL", 500)


def wire_code(error: BaseException) -> WireCode:
    """Returns the wire code of `error`; anything not in the table is INTERNAL."""
    return next((code for kind, code in WIRE_CODES.items() if isinstance(error, kind)), INTERNAL)
