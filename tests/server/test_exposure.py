"""What a server may be reached from: this machine alone, unless TLS and keys guard it."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

import grpc
import pytest
import trustme

from jserve.access import Access
from jserve.client import GenerateClient
from jserve.config import EngineConfig, SecuritySettings, ServerSettings, is_loopback, parse_origins
from jserve.errors import ConfigError, EngineDead, Unauthenticated
from jserve.messages import GenerateRequest
from jserve.server.api_keys import add_entry, digest_of, new_key
from tests.server.conftest import TIMEOUT_S
from tests.server.test_main import started

PUBLIC = ("0.0.0.0", "::", "192.0.2.1", "2001:db8::1", "", "::ffff:192.0.2.1", "no.such.invalid")
GUARDED = SecuritySettings(tls_cert="c", tls_key="k", api_keys="f")


def config(host: str, security: SecuritySettings, **server: int) -> EngineConfig:
    return EngineConfig(server=ServerSettings(host=host, **server), security=security)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_this_machine_needs_neither_tls_nor_keys(host: str):
    assert is_loopback(host)
    config(host, SecuritySettings(), metrics_port=9)


def test_by_default_only_this_machine_is_listened_to():
    assert is_loopback(EngineConfig().server.host)


@pytest.mark.parametrize("host", PUBLIC)
@pytest.mark.parametrize("missing", [("tls_cert", "tls_key"), ("api_keys",), None])
def test_other_machines_need_tls_and_keys_or_insecure(host: str, missing: tuple | None):
    security = SecuritySettings()
    if missing:
        security = dataclasses.replace(GUARDED, **dict.fromkeys(missing, ""))
    with pytest.raises(ConfigError, match=r"other machines: give tls_cert.*api_keys.*insecure"):
        config(host, security)
    config(host, dataclasses.replace(security, insecure=True))
    config(host, GUARDED)


def test_a_name_counts_as_where_all_of_its_addresses_are(monkeypatch: pytest.MonkeyPatch):
    addresses = ["127.0.0.1", "192.0.2.1"]
    found = [(0, 0, 0, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert not is_loopback("both.example")
    del found[1]
    assert is_loopback("both.example")


def test_metrics_without_keys_stay_on_this_machine():
    with pytest.raises(ConfigError, match="metrics_port=9090 has neither TLS nor keys"):
        config("0.0.0.0", GUARDED, metrics_port=9090)
    config("0.0.0.0", dataclasses.replace(GUARDED, insecure=True), metrics_port=9090)


@pytest.mark.parametrize("half", [{"tls_cert": "c"}, {"tls_key": "k"}])
def test_half_a_pair_is_refused(half: dict[str, str]):
    with pytest.raises(ConfigError, match="tls_cert and tls_key belong together"):
        EngineConfig(security=SecuritySettings(**half))


def test_authorities_of_callers_need_tls():
    with pytest.raises(ConfigError, match="tls_client_ca"):
        EngineConfig(security=SecuritySettings(tls_client_ca="a"))


@pytest.mark.parametrize(
    "origins",
    ["app.example", "https://app.example/", "https://App.example", "https://a b", "https://"],
)
def test_what_no_browser_would_name_its_origin_is_refused(origins):
    with pytest.raises(ConfigError, match=r"allowed_origins: .* as in https"):
        EngineConfig(security=SecuritySettings(allowed_origins=origins))


def test_all_origins_may_be_allowed_with_keys_only():
    with pytest.raises(ConfigError, match=r"allowed_origins=\* opens .* give api_keys"):
        EngineConfig(security=SecuritySettings(allowed_origins="*"))
    EngineConfig(security=SecuritySettings(allowed_origins="*", api_keys="keys.toml"))
    assert parse_origins("https://a.org, http://[::1]:80") == ("https://a.org", "http://[::1]:80")


async def test_a_server_for_all_addresses_serves_who_has_a_key_over_tls(tmp_path: Path):
    authority, key = trustme.CA(), new_key()
    pair = authority.issue_cert("localhost", "127.0.0.1")
    names = cert, private, keys = [str(tmp_path / n) for n in ("cert.pem", "key.pem", "keys.toml")]
    pair.cert_chain_pems[0].write_to_path(cert)
    pair.private_key_pem.write_to_path(private)
    add_entry(Path(keys), "alice", {"sha256": digest_of(key).hex()})
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    flags = [f"--{n}={v}" for n, v in zip(("tls_cert", "tls_key", "api_keys"), names, strict=True)]
    async with started("--host=0.0.0.0", *flags) as server:
        async with GenerateClient(server.target, Access(credentials=credentials)) as nobody:
            await server.load()
            await nobody.wait_ready(TIMEOUT_S)
            with pytest.raises(Unauthenticated):
                await nobody.generate(GenerateRequest(prompt="x"))
        access = Access(api_key=key, credentials=credentials)
        async with GenerateClient(server.target, access) as alice:
            assert (await alice.generate(GenerateRequest(prompt="x"))).text.startswith("t0 ")
        async with GenerateClient(server.target) as plain:
            with pytest.raises(EngineDead):
                await plain.generate(GenerateRequest(prompt="x"))
        server.terminate()
        assert await server.exit_code() == 0
    assert "HTTP answers on https://0.0.0.0:" in server.log
    assert key not in server.log
