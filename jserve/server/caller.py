"""Who calls, and what they may do. Knows names and permissions: no keys, no transport."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol


class Lease(Protocol):
    """One request's part of its caller's quota, from its admission to its end."""

    def charge(self, num_tokens: int) -> None: ...  # of prompt and output, as they come

    def close(self) -> None: ...  # at the end; harmless when repeated

    def give_back(self) -> None: ...  # and close: the server had no room for the request


class Quota(Protocol):
    def enter(self) -> Lease:
        """Raises Overloaded, with `retry_after_s`, where the caller has used up its share."""
        ...

    def headers(self) -> dict[str, str]:
        """Returns what is left, for the caller to see."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Attributes:
    name: for logs: of the key or the certificate; "" is nobody in particular.
    tenant: whose cached prefixes it may find; "" leaves that to each request.
    request_classes: those that it may name; None: any.
    is_admin: may look at the live page, profile and reset.
    quota: None is none.
    """

    name: str = ""
    tenant: str = ""
    request_classes: frozenset[str] | None = None
    is_admin: bool = False
    quota: Quota | None = None


# Whom the guards have admitted for the call that runs in this context.
admitted: ContextVar[Caller] = ContextVar("jserve_admitted", default=Caller())  # noqa: B039


class Gate(Protocol):
    """Decides who calls."""

    def admit(self, key: str | None, certificate: str) -> Caller:
        """Returns who has this API key, or this name in a certificate that the transport has
        verified ("" without). Raises Unauthenticated."""
        ...


class OpenGate:
    """Without keys anyone may do all; a certificate's name keeps tenants apart."""

    def admit(self, key: str | None, certificate: str) -> Caller:
        return Caller(name=certificate, tenant=certificate, is_admin=True)
