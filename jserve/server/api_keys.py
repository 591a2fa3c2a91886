"""The file of API keys: what is in it, and how a key gets there. Knows hashes, never a key for
longer than it takes to make or to check one.

A key is 256 random bits that we draw, so one SHA-256 is all it needs at rest: what makes passwords
need a salt and a slow hash (bcrypt, scrypt) is that they can be guessed, and these cannot. A slow
hash would also hand whoever sends wrong keys a way to keep the server busy.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import tempfile
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jserve.errors import ConfigError
from jserve.server.quota import QuotaLimits

KEY_PREFIX = "jserve-"  # so that scanners for leaked secrets can find them
KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """One caller of the file. It has either a key or, over mutual TLS, a certificate.

    Attributes:
      name: for logs, unique in its file.
      sha256: of its key; b"" if it has none.
      certificate: the name in its certificate; "" if it has none.
      tenant: whose cached prefixes it shares; by default its own name.
      request_classes: those that it may use; None: any.
      is_admin: may look at the live page, profile and reset.
    """

    name: str
    sha256: bytes = b""
    certificate: str = ""
    tenant: str
    request_classes: frozenset[str] | None = None
    is_admin: bool = False
    limits: QuotaLimits = field(default_factory=QuotaLimits)


def read_keys(path: str, known_classes: Collection[str] | None = None) -> list[KeyEntry]:
    """Reads a file of keys (docs/security.md). Its entries may name `known_classes`; None: any.

    Raises:
      ConfigError: it cannot be read, or has something else in it: names the line or the entry.
    """
    try:
        text = Path(path).read_text()
    except (OSError, ValueError) as error:  # ValueError: no UTF-8
        raise ConfigError(f"api_keys={path!r} cannot be read: {error}") from error
    return parse_keys(text, path, known_classes)


def parse_keys(
    text: str, path: str, known_classes: Collection[str] | None = None
) -> list[KeyEntry]:
    """The same, of the file's text."""
    try:
        content = tomllib.loads(text)
    except ValueError as error:  # which names the line
        raise ConfigError(f"{path} is not TOML: {error}") from error
    if other := sorted(content.keys() - {"keys"}):
        raise ConfigError(f"{path}: {other[0]!r} is not known; each key is a table [keys.NAME]")
    tables = content.get("keys", {})
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: keys is no table; each key is a table [keys.NAME]")
    entries = [_entry(f"{path}: [keys.{n}]", n, t, known_classes) for n, t in tables.items()]
    owners: dict[bytes | str, str] = {}
    for entry in entries:
        owner = owners.setdefault(entry.sha256 or entry.certificate, entry.name)
        if owner != entry.name:
            raise ConfigError(
                f"{path}: [keys.{owner}] and [keys.{entry.name}] have the same key or certificate; "
                "remove either"
            )
    return entries


def _entry(where: str, name: str, table: Any, known_classes: Collection[str] | None) -> KeyEntry:
    if not isinstance(table, dict) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where} is no table of 1 to 64 letters, digits, - and _")
    if unknown := sorted(table.keys() - _FIELDS.keys()):
        raise ConfigError(f"{where}: {unknown[0]!r} is not known; use {', '.join(_FIELDS)}")
    for setting, value in table.items():
        kind, expected = _FIELDS[setting]
        is_kind = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
        if not is_kind or (kind is int and value < 0):
            raise ConfigError(f"{where}: {setting}={value!r} is not {expected}")
    digest, certificate = table.get("sha256", ""), table.get("certificate", "")
    if bool(digest) == bool(certificate):
        raise ConfigError(f"{where} needs either sha256 or certificate")
    if digest and not _SHA256.fullmatch(digest):
        raise ConfigError(f"{where}: sha256 is not 64 digits from 0 to f; jserve-keys makes them")
    return KeyEntry(
        name=name,
        sha256=bytes.fromhex(digest),
        certificate=certificate,
        tenant=table.get("tenant", "") or name,
        request_classes=_classes(where, table.get("request_classes"), known_classes),
        is_admin=table.get("admin", False),
        limits=QuotaLimits(**{f: table[f] for f in QuotaLimits.__slots__ if f in table}),
    )


_FIELDS: Mapping[str, tuple[type, str]] = {
    "sha256": (str, "a text"),
    "certificate": (str, "a text"),
    "tenant": (str, "a text"),
    "request_classes": (list, "a list of texts"),
    "requests_per_minute": (int, "a whole number, 0 for no limit"),
    "tokens_per_minute": (int, "a whole number, 0 for no limit"),
    "max_concurrent_requests": (int, "a whole number, 0 for no limit"),
    "admin": (bool, "true or false"),
}


def _classes(
    where: str, names: Sequence[Any] | None, known_classes: Collection[str] | None
) -> frozenset[str] | None:
    if names is None:
        return None
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{where}: request_classes is not a list of at least one text")
    known = names if known_classes is None else ("", *known_classes)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(
            f"{where}: request_classes has {unknown[0]!r}, which is none of --request_classes; use "
            f'some of {sorted(known)} ("" is a request that names none)'
        )
    return frozenset(names)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="backslashreplace")).digest()


def find_key(key: str, entries: Sequence[KeyEntry]) -> KeyEntry | None:
    """Returns the entry whose key this is. Looks at all of them whatever it finds, so that how long
    it takes says nothing of any."""
    digest, found = digest_of(key), None
    for entry in entries:
        if hmac.compare_digest(digest, entry.sha256):
            found = entry
    return found


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def add_entry(path: Path, name: str, fields: Mapping[str, Any]) -> None:
    """Appends an entry to a file of keys, which may not be there yet, in one move: a server that
    reads it sees the old file or the new one. Nobody else may read it afterwards (mode 600).

    Raises:
      ConfigError: the file is no file of keys, has that name already, or cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name={name!r} is not 1 to 64 letters, digits, - and _")
    lines = [f"[keys.{name}]"]
    for setting, value in fields.items():
        lines.append(f"{setting} = {json.dumps(value, ensure_ascii=False)}")  # is TOML, too
    try:
        with _locked(path):
            old = path.read_text() if path.exists() else ""
            if name in {entry.name for entry in parse_keys(old, str(path))}:
                raise ConfigError(f"{path} has {name!r} already; use another name, or remove it")
            text = f"{old.rstrip()}\n\n".lstrip() + "\n".join(lines) + "\n"
            parse_keys(text, str(path))  # what a server would refuse must not get there
            _replace(path, text)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps two commands from each writing what it read before the other wrote."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # of mode 600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(handle)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
