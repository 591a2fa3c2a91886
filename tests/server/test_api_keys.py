"""The file of API keys: what may be in it, how keys get there, and that none can be read off it."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from jserve.errors import ConfigError
from jserve.server import api_keys
from jserve.server.api_keys import add_entry, digest_of, find_key, new_key, read_keys
from jserve.server.quota import QuotaLimits

ROOT = Path(__file__).parents[2]
HASH = "ab" * 32


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def command(*flags: str) -> subprocess.CompletedProcess[str]:
    code = "from jserve.server.keys_main import run; run()"
    return subprocess.run(
        [sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_every_field_of_an_entry_is_read(file: Path):
    file.write_text(
        f"""# ours
        [keys.alice]
        sha256 = "{HASH}"
        tenant = "red"
        request_classes = ["", "batch"]
        requests_per_minute = 60
        tokens_per_minute = 1000
        max_concurrent_requests = 4
        admin = true
        [keys.bob]
        certificate = "bob.example"
        """
    )
    alice, bob = read_keys(str(file), ["batch", "chat"])
    assert (alice.name, alice.tenant, alice.is_admin) == ("alice", "red", True)
    assert alice.request_classes == {"", "batch"}
    assert alice.limits == QuotaLimits(
        requests_per_minute=60, tokens_per_minute=1000, max_concurrent_requests=4
    )
    assert (bob.certificate, bob.tenant, bob.is_admin) == ("bob.example", "bob", False)
    assert bob.request_classes is None
    assert bob.limits == QuotaLimits()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[keys.a]\nsha256 = ab", "line 2"),
        ("\n\n[keys.a\n", "line 3"),
        ("[users.a]", "'users' is not known"),
        ("keys = 1", "each key is a table"),
        ("[keys]\na = 1", r"\[keys.a\]"),
        ("[keys.'a b']", r"\[keys.a b\]"),
        ("[keys.a]\ntenant = 'x'", "either sha256 or certificate"),
        (f"[keys.a]\nsha256 = '{HASH}'\ncertificate = 'x'", "either sha256 or certificate"),
        ("[keys.a]\nsha256 = 'jserve-secret'", "64 digits"),
        (f"[keys.a]\nsha256 = '{HASH}'\nkey = 'x'", "'key' is not known"),
        (f"[keys.a]\nsha256 = '{HASH}'\nadmin = 1", "admin=1 is not true or false"),
        (f"[keys.a]\nsha256 = '{HASH}'\nrequests_per_minute = -1", "requests_per_minute"),
        (f"[keys.a]\nsha256 = '{HASH}'\ntokens_per_minute = true", "tokens_per_minute"),
        (f"[keys.a]\nsha256 = '{HASH}'\nrequest_classes = []", "at least one"),
        (f"[keys.a]\nsha256 = '{HASH}'\nrequest_classes = ['slow']", "'slow'.*'chat'"),
        (f"[keys.a]\nsha256 = '{HASH}'\n[keys.b]\nsha256 = '{HASH}'", "a.*b.*the same"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(file: Path, text: str, complaint: str):
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_keys(str(file), ["chat"])


def test_a_file_that_is_not_there_or_no_text_is_a_config_error(file: Path):
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        read_keys(str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        read_keys(str(file))


def test_a_made_key_opens_its_entry_and_is_not_in_the_file(file: Path):
    file.write_text(f'# by hand\n[keys.old]\nsha256 = "{HASH}"')
    done = command(
        f"--file={file}", "--name=alice", "--tenant=red team ü", "--request_classes=a,b",
        "--requests_per_minute=60", "--max_concurrent_requests=2", "--admin",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    key = done.stdout.strip()
    assert key not in file.read_text()
    assert "# by hand" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    _, alice = read_keys(str(file))
    assert alice.sha256 == hashlib.sha256(key.encode()).digest()
    assert (alice.tenant, alice.request_classes) == ("red team ü", {"a", "b"})
    assert (alice.limits.requests_per_minute, alice.limits.max_concurrent_requests) == (60, 2)
    assert alice.is_admin


def test_a_certificates_entry_has_no_key(file: Path):
    done = command(f"--file={file}", "--name=bob", "--certificate=bob.example")
    assert (done.returncode, done.stdout) == (0, "")
    assert read_keys(str(file))[0].certificate == "bob.example"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ((), "--file"),
        (("--name=old",), "'old' already"),
        (("--name=a b",), "letters"),
        (("--name=a", "--file=/nowhere/keys.toml"), "/nowhere"),
    ],
)
def test_a_command_that_cannot_be_done_is_one_line_and_leaves_the_file(file, flags, complaint):
    before = f'[keys.old]\nsha256 = "{HASH}"\n'
    file.write_text(before)
    done = command(f"--file={file}", *flags)
    assert done.returncode == 1
    assert (len(done.stderr.splitlines()), done.stdout) == (1, "")
    assert complaint in done.stderr
    assert file.read_text() == before
    assert os.listdir(file.parent) == [file.name]


def test_keys_are_256_random_bits_and_told_apart():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) == len("jserve-") + 43 for key in keys)


def test_a_key_is_compared_with_every_hash_in_constant_time(file: Path, monkeypatch):
    """Whether it is the first, the last or none: as many comparisons, all by compare_digest."""
    keys = [new_key() for _ in range(5)]
    for index, key in enumerate(keys):
        add_entry(file, f"k{index}", {"sha256": digest_of(key).hex()})
    entries, compared = read_keys(str(file)), []
    compare = api_keys.hmac.compare_digest
    monkeypatch.setattr(
        api_keys.hmac, "compare_digest", lambda a, b: compared.append(b) or compare(a, b)
    )
    for key, expected in [(keys[0], "k0"), (keys[4], "k4"), ("jserve-wrong", None), ("", None)]:
        compared.clear()
        found = find_key(key, entries)
        assert (found.name if found else None) == expected
        assert compared == [entry.sha256 for entry in entries]


@pytest.mark.parametrize("key", ["", "\udcff", "ü" * 10_000, "\x00"])
def test_any_text_may_be_tried_as_a_key(file: Path, key: str):
    file.write_text('[keys.c]\ncertificate = "c"')
    assert find_key(key, read_keys(str(file))) is None
