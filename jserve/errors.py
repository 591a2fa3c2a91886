"""The errors a caller can meet, and what each is called on the wire. Knows no transport library."""

from __future__ import annotations

import traceback
from typing import NamedTuple


class JserveError(Exception):
    """Base of every error that jserve raises on purpose; its text is one line with the remedy."""


class InvalidRequest(JserveError):
    """The caller's request can never be served as it stands."""


class UnknownModel(InvalidRequest):
    """The caller asks for a model that is not served here."""


class Unauthenticated(JserveError):
    """The caller has not proven who it is, and this server wants that."""


class Forbidden(JserveError):
    """The caller is known, and may not do this."""


class Unsupported(JserveError):
    """A protocol that is served here has this call, and this server has not."""


class Overloaded(JserveError):
    """The queue is full, or the caller's share used up; the same request may succeed later, at the
    earliest after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


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
    UnknownModel: WireCode("NOT_FOUND", 404),  # before the kind that it is one of
    InvalidRequest: WireCode("INVALID_ARGUMENT", 400),
    Unauthenticated: WireCode("UNAUTHENTICATED", 401),
    Forbidden: WireCode("PERMISSION_DENIED", 403),
    Unsupported: WireCode("UNIMPLEMENTED", 501),
    Overloaded: WireCode("RESOURCE_EXHAUSTED", 429),
    DeadlineExceeded: WireCode("DEADLINE_EXCEEDED", 504),
    EngineDead: WireCode("UNAVAILABLE", 503),
}
INTERNAL = WireCode("INTERNAL", 500)


def wire_code(error: BaseException) -> WireCode:
    """Returns the wire code of `error`; anything not in the table is INTERNAL."""
    return next((code for kind, code in WIRE_CODES.items() if isinstance(error, kind)), INTERNAL)


def let_go(error: BaseException) -> None:
    """Frees what the functions that `error` came through held, such as long prompts: an error that
    a server has answered often stays in a cycle of references until the collector finds it."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None


def trace_of(error: BaseException | None) -> str:
    """Returns where an error and its causes were raised, and what kinds they are, for a log. Not
    their own words: those may quote what a caller sent."""
    parts = []
    while error is not None:
        frames = "".join(traceback.format_tb(error.__traceback__))
        parts.append(f"{type(error).__name__}, raised at\n{frames}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "because of ".join(parts)
