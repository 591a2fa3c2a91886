"""How a client proves who it is, and knows whom it asks: an API key, TLS, a certificate. Knows
files and gRPC's credentials: no requests.

A key comes from a file, never from the command line, which other users of a machine can read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from absl import flags

from jserve.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Attributes:
    api_key: sent with each call; "" for none. Without TLS whoever is on the way can read it.
    credentials: for TLS; None goes without.
    """

    api_key: str = ""
    credentials: grpc.ChannelCredentials | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def open_channel(self, target: str) -> grpc.aio.Channel:
        options = [("grpc.max_receive_message_length", -1)]
        if self.credentials is None:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, self.credentials, options=options)


def define_access_flags(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    to: dict[str, Any] = {"flag_values": flag_values}
    text = flags.DEFINE_string
    text("api_key_file", "", "File with the API key to send.", **to)
    flags.DEFINE_boolean("tls", False, "Use TLS, with the authorities that gRPC trusts.", **to)
    text("tls_ca", "", "Use TLS, and trust the authorities of this PEM file instead.", **to)
    text("tls_cert", "", "PEM file of a certificate to show, for mutual TLS.", **to)
    text("tls_key", "", "PEM file with its private key.", **to)


def access_from_flags(flag_values: Any = flags.FLAGS) -> Access:
    """Raises ConfigError for a file that cannot be read, or a setting without its other half."""
    f = flag_values
    if bool(f.tls_cert) != bool(f.tls_key):
        raise ConfigError("--tls_cert and --tls_key belong together; give both, or neither")
    credentials = None
    if f.tls or f.tls_ca or f.tls_cert:
        parts = [_read(name, f[name].value) for name in ("tls_ca", "tls_key", "tls_cert")]
        credentials = grpc.ssl_channel_credentials(*parts)
    try:
        key = (_read("api_key_file", f.api_key_file) or b"").decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--api_key_file={f.api_key_file} holds no API key") from error
    return Access(api_key=key, credentials=credentials)


def _read(name: str, path: str) -> bytes | None:
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise ConfigError(f"--{name}={path} cannot be read: {error.strerror}") from error
