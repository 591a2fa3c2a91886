"""The server's certificate, and whose certificates it takes: read from files, again when these
change. Knows PEM, OpenSSL and gRPC's credentials: no calls.

Both fronts ask `TlsFiles` at every handshake, so a new pair serves the next connection, and those
that are open go on.
"""

from __future__ import annotations

import logging
import re
import ssl
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from jserve.config import SecuritySettings
from jserve.errors import ConfigError
from jserve.server.watch import Watch

logger = logging.getLogger(__name__)

_ALPN = ["http/1.1"]
# Parts of a subject as gRPC's x509_subject writes them (RFC 2253).
_SHORT = {
    "commonName": "CN",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "countryName": "C",
    "localityName": "L",
    "stateOrProvinceName": "ST",
}
_SPECIAL = re.compile(r'[,+"\\<>;]')


@dataclass(frozen=True, slots=True)
class _Loaded:
    context: ssl.SSLContext
    for_grpc: Any  # grpc.ServerCertificateConfiguration


class TlsFiles:
    """The files of `SecuritySettings`, as they last were any good. For any thread.

    Raises:
      ConfigError: at the start they are not.
    """

    def __init__(self, settings: SecuritySettings) -> None:
        self._settings = settings
        names = (settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        self._paths = [name for name in names if name]
        self._lock = threading.Lock()
        self._watch = Watch(self._paths)
        try:
            self._loaded = self._load()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(
                f"tls_cert={settings.tls_cert!r} and tls_key={settings.tls_key!r}"
                + f", tls_client_ca={settings.tls_client_ca!r}" * bool(settings.tls_client_ca)
                + f" are no good ({error}); give a chain, its unencrypted key, and authorities, "
                "all in PEM"
            ) from error

    def current(self) -> _Loaded:
        with self._lock:
            if self._watch.has_changed():
                try:
                    self._loaded = self._load()
                    logger.info("TLS: read %s again", ", ".join(self._paths))
                except (OSError, ValueError) as error:
                    logger.error("TLS: the old certificate stays: %s (%s)", error, self._paths)
            return self._loaded

    def _load(self) -> _Loaded:
        s = self._settings
        before = _read(self._paths)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(_ALPN)
        context.load_cert_chain(s.tls_cert, s.tls_key, password=lambda: "no key is encrypted")
        if s.tls_client_ca:
            context.load_verify_locations(s.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        contents = _read(self._paths)
        if contents != before:  # then nobody has said that they belong together
            raise ValueError("the files change while they are read")
        chain, key, *authorities = contents
        for_grpc = grpc.ssl_server_certificate_configuration([(key, chain)], *authorities)
        return _Loaded(context, for_grpc)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        given = self._loaded

        def news() -> Any:  # gRPC asks before each handshake, one at a time
            nonlocal given
            before, given = given, self.current()
            return None if given is before else given.for_grpc

        return grpc.dynamic_ssl_server_credentials(
            given.for_grpc,
            news,
            require_client_authentication=bool(self._settings.tls_client_ca),
        )

    def http_context(self) -> ssl.SSLContext:
        return _CurrentContext(self)


class _CurrentContext(ssl.SSLContext):
    """Hands each handshake to the context of the newest files. A new one each time, as one cannot
    forget an authority, or the sessions of those that it signed for."""

    _files: TlsFiles

    def __new__(cls, files: TlsFiles) -> _CurrentContext:
        self = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        self._files = files
        return self

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        return self._files.current().context.wrap_bio(*args, **kwargs)


def _read(paths: Sequence[str]) -> list[bytes]:
    return [Path(path).read_bytes() for path in paths]


def name_in(certificate: Mapping[str, Any] | None) -> str:
    """Returns the name of a verified certificate, as ssl.SSLObject.getpeercert gives it: the one
    that `identity.identity_of` finds over gRPC. "" without a certificate."""
    certificate = certificate or {}
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    common = [value for kind, value in subject if kind == "commonName"]
    others = [value for _, value in certificate.get("subjectAltName", ())]
    parts = ((_SHORT.get(kind, kind), _SPECIAL.sub(r"\\\g<0>", value)) for kind, value in subject)
    whole = ",".join(reversed([f"{kind}={value}" for kind, value in parts]))
    return next((name for name in (*common, *others, whole) if name), "")
