"""The command jserve-keys: makes a key, shows it once and keeps its hash. Knows flags and the file.

Exit codes: 0 done, 1 the file or a setting is no good.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags

from jserve.errors import ConfigError
from jserve.flags import list_in_help
from jserve.server.api_keys import add_entry, digest_of, new_key

_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests")


def define_key_flags(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    to: dict[str, Any] = {"flag_values": flag_values}
    flags.DEFINE_string("file", "", "The server's --api_keys file; made if it is not there.", **to)
    flags.DEFINE_string("name", "", "Whose key it is, for logs.", **to)
    flags.DEFINE_string("certificate", "", "Instead of a key: the name in a certificate.", **to)
    flags.DEFINE_string("tenant", "", "Whose cached prefixes it shares; empty: its own.", **to)
    flags.DEFINE_list("request_classes", [], "Those that it may use; empty: any.", **to)
    flags.DEFINE_boolean("admin", False, "May look at the live page, profile and reset.", **to)
    for name in _LIMITS:
        flags.DEFINE_integer(name, 0, "0: no limit.", lower_bound=0, **to)


def make_key(flag_values: flags.FlagValues = flags.FLAGS) -> str:
    """Adds the entry that the flags describe; returns its key, "" for a certificate's. Raises
    ConfigError."""
    f = flag_values
    if not (f.file and f.name):
        raise ConfigError("say --file=FILE and --name=NAME; --help lists the rest")
    key = "" if f.certificate else new_key()
    fields: dict[str, Any] = {"certificate": f.certificate}
    if key:
        fields = {"sha256": digest_of(key).hex()}
    fields |= {name: f[name].value for name in ("tenant", "request_classes", *_LIMITS, "admin")}
    add_entry(Path(f.file), f.name, {name: value for name, value in fields.items() if value})
    return key


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1:]} are no flags; write --name=value")
    try:
        key = make_key()
    except ConfigError as error:
        sys.exit(f"jserve-keys: {error}")
    if key:
        print(key)
        print("This is the only time that the key is shown: its file has a hash.", file=sys.stderr)


def run() -> NoReturn:
    """Console command `jserve-keys`."""
    define_key_flags()
    list_in_help()
    app.run(main)
