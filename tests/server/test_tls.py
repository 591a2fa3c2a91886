"""TLS and mutual TLS on both fronts: who is taken, as whom, and files that change meanwhile."""

from __future__ import annotations

import asyncio
import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import grpc
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from jserve.access import Access
from jserve.client import GenerateClient
from jserve.config import SecuritySettings
from jserve.errors import ConfigError, JserveError, Unauthenticated
from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams
from jserve.server import http_connection, watch
from jserve.server.api_keys import add_entry, digest_of, new_key
from jserve.server.caller import Caller, OpenGate
from jserve.server.security import KeyGate
from jserve.server.tls import TlsFiles
from tests.server.conftest import Served, serving, until
from tests.server.fake_engine import FakeEngine

ASK = GenerateRequest(prompt="x", sampling=SamplingParams(max_tokens=3))


class Files:
    """A server's files in a folder, and the authorities that stand behind them."""

    def __init__(self, folder: Path) -> None:
        self.cert, self.key, self.ca = (folder / f"{n}.pem" for n in ("cert", "key", "ca"))
        self.authority = self.issue(trustme.CA())
        self.callers = trustme.CA()
        self.ca.write_bytes(self.callers.cert_pem.bytes())

    def issue(self, authority: trustme.CA, cert: bool = True, key: bool = True) -> trustme.CA:
        """Writes a new pair of the authority's, or half of one."""
        pair = authority.issue_cert("localhost", "127.0.0.1")
        if cert:
            self.cert.write_bytes(pair.cert_chain_pems[0].bytes())
        if key:
            self.key.write_bytes(pair.private_key_pem.bytes())
        return authority

    def settings(self, mutual: bool = False) -> SecuritySettings:
        ca = str(self.ca) if mutual else ""
        return SecuritySettings(tls_cert=str(self.cert), tls_key=str(self.key), tls_client_ca=ca)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.0)
    return Files(tmp_path)


def access_to(
    authority: trustme.CA, own: trustme.LeafCert | Leaf | None = None, key: str = ""
) -> Access:
    parts = (own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes()) if own else ()
    return Access(
        api_key=key, credentials=grpc.ssl_channel_credentials(authority.cert_pem.bytes(), *parts)
    )


async def over_grpc(served: Served, access: Access) -> None:
    async with GenerateClient(served.target, access) as client:
        await client.generate(ASK)


async def over_http(
    served: Served, authority: trustme.CA, own: trustme.LeafCert | Leaf | None = None, key: str = ""
) -> int:
    context = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    if own:
        own.configure_cert(context)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
        session.get(f"{served.http}/v1/models", headers=headers) as response,
    ):
        return response.status


async def served_by(served: Served, authority: trustme.CA) -> bool:
    """Whether both fronts show a certificate that this authority has signed."""
    outcomes = []
    for call in (over_grpc(served, access_to(authority)), over_http(served, authority)):
        try:
            await call
            outcomes.append(True)
        except (JserveError, aiohttp.ClientError):
            outcomes.append(False)
    assert outcomes[0] == outcomes[1]
    return outcomes[0]


async def test_both_fronts_speak_tls_and_nothing_else(files: Files):
    async with serving(tls=TlsFiles(files.settings()), http=True) as s:
        assert s.http.startswith("https://")
        assert await served_by(s, files.authority)
        assert not await served_by(s, trustme.CA())
        with pytest.raises(JserveError):
            await over_grpc(s, Access())
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(s.http.replace("https", "http") + "/health")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
async def test_old_versions_of_tls_are_refused(files: Files, version: ssl.TLSVersion):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=files.authority.cert_pem.bytes().decode())
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="deprecated"):
        context.minimum_version = context.maximum_version = version
    async with serving(tls=TlsFiles(files.settings()), http=True) as s:
        for target in (s.target, s.http.removeprefix("https://")):
            host, port = target.rsplit(":", 1)
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection(host, int(port), ssl=context)


async def test_a_new_certificate_serves_new_connections_and_open_ones_go_on(files: Files):
    old = files.authority
    engine = FakeEngine(interval_s=None)
    async with serving(
        engine, tls=TlsFiles(files.settings()), http=True, access=access_to(old)
    ) as s:
        stream = s.client.stream(ASK)
        first = asyncio.create_task(anext(stream))
        await until(lambda: engine.live)
        new = files.issue(trustme.CA())
        engine.interval_s = 0.0
        assert await served_by(s, new)
        assert not await served_by(s, old)
        for _ in range(3):
            engine.step()
        assert (await first).text == "t0 "
        assert [update.text async for update in stream] == ["t1 ", "t2 "]


@pytest.mark.parametrize("broken", ["half", "mismatch", "missing", "empty", "junk"])
async def test_files_that_are_no_good_leave_the_old_certificate(
    files: Files, broken: str, caplog: pytest.LogCaptureFixture
):
    old, whole = files.authority, files.cert.read_bytes()
    async with serving(tls=TlsFiles(files.settings()), http=True) as s:
        assert await served_by(s, old)
        if broken == "half":
            files.cert.write_bytes(whole[: len(whole) // 2])
        elif broken == "mismatch":
            files.issue(trustme.CA(), key=False)
        elif broken == "missing":
            files.key.unlink()
        else:
            files.key.write_bytes(b"" if broken == "empty" else b"\xff" * 100)
        assert await served_by(s, old)
        assert "the old certificate stays" in caplog.text
        new = files.issue(trustme.CA())
        assert await served_by(s, new)


async def test_a_pair_that_comes_by_a_swapped_link_is_read(files: Files, tmp_path: Path):
    """As Kubernetes mounts secrets."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    one, two = Files(tmp_path / "one"), Files(tmp_path / "two")
    link = tmp_path / "live"
    link.symlink_to("one")
    settings = SecuritySettings(tls_cert=str(link / "cert.pem"), tls_key=str(link / "key.pem"))
    async with serving(tls=TlsFiles(settings), http=True) as s:
        assert await served_by(s, one.authority)
        (tmp_path / "next").symlink_to("two")
        os.replace(tmp_path / "next", link)
        assert await served_by(s, two.authority)


class Seen(OpenGate):
    """Keeps the names that the fronts found in certificates."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def admit(self, key: str | None, certificate: str) -> Caller:
        self.names.append(certificate)
        return super().admit(key, certificate)


async def test_mutual_tls_names_the_caller_alike_on_both_fronts(files: Files, tmp_path: Path):
    nameless = issue_nameless(files.ca)
    for own, name in [
        (files.callers.issue_cert("a.example", common_name="alice"), "alice"),
        (files.callers.issue_cert("b.example", "other.example"), "b.example"),
        (files.callers.issue_cert("bob@c.example"), "bob@c.example"),
        (files.callers.issue_cert("192.0.2.7"), "192.0.2.7"),
        (nameless, "OU=serving,O=Example\\, Inc.,C=NL"),
    ]:
        gate = Seen()
        async with serving(gate=gate, tls=TlsFiles(files.settings(mutual=True)), http=True) as s:
            await over_grpc(s, access_to(files.authority, own))
            assert set(gate.names) == {name}
            gate.names.clear()
            assert await over_http(s, files.authority, own) == 200
            assert set(gate.names) == {name}


class Leaf:
    """A certificate as trustme gives them."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, cert: x509.Certificate) -> None:
        pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        form = serialization.PrivateFormat.PKCS8
        self.private_key_pem = trustme.Blob(key.private_bytes(pem, form, plain))
        self.cert_chain_pems = [trustme.Blob(cert.public_bytes(pem))]

    def configure_cert(self, context: ssl.SSLContext) -> None:
        both = self.private_key_pem.bytes() + self.cert_chain_pems[0].bytes()
        with trustme.Blob(both).tempfile() as path:
            context.load_cert_chain(path)


def issue_nameless(authorities: Path) -> Leaf:
    """A certificate of a new authority, added to the file, that has a subject but no name."""

    def signed(
        subject: list[tuple[x509.ObjectIdentifier, str]],
        own: ec.EllipticCurvePrivateKey,
        issuer: x509.Name | None = None,
        by: ec.EllipticCurvePrivateKey | None = None,
    ) -> x509.Certificate:
        name = x509.Name([x509.NameAttribute(oid, value) for oid, value in subject])
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer or name)
            .public_key(own.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=by is None, path_length=None), True)
        )
        return builder.sign(by or own, hashes.SHA256())

    theirs, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca = signed([(NameOID.ORGANIZATION_NAME, "Nameless CA")], theirs)
    subject = [
        (NameOID.COUNTRY_NAME, "NL"),
        (NameOID.ORGANIZATION_NAME, "Example, Inc."),
        (NameOID.ORGANIZATIONAL_UNIT_NAME, "serving"),
    ]
    with authorities.open("ab") as file:
        file.write(ca.public_bytes(serialization.Encoding.PEM))
    return Leaf(own, signed(subject, own, ca.subject, theirs))


async def test_without_a_certificate_of_its_authorities_nobody_is_heard(files: Files):
    forged = trustme.CA().issue_cert("a.example", common_name="alice")
    async with serving(tls=TlsFiles(files.settings(mutual=True)), http=True) as s:
        for own in (None, forged):
            with pytest.raises(JserveError):
                await over_grpc(s, access_to(files.authority, own))
            with pytest.raises(aiohttp.ClientError):
                await over_http(s, files.authority, own)
        assert s.engine.requests == []


async def test_an_authority_that_is_removed_is_no_longer_believed_and_a_new_one_is(files: Files):
    old, new = files.callers, trustme.CA()
    async with serving(tls=TlsFiles(files.settings(mutual=True)), http=True) as s:

        async def is_heard(authority: trustme.CA) -> bool:
            own = authority.issue_cert("a.example", common_name="alice")
            try:
                await over_grpc(s, access_to(files.authority, own))
                assert await over_http(s, files.authority, own) == 200
            except JserveError:
                with pytest.raises(aiohttp.ClientError):
                    await over_http(s, files.authority, own)
                return False
            return True

        assert await is_heard(old)
        assert not await is_heard(new)
        files.ca.write_bytes(new.cert_pem.bytes())
        assert not await is_heard(old)
        assert await is_heard(new)


async def test_with_keys_a_certificate_opens_only_what_the_file_says_of_it(files, tmp_path):
    keys = tmp_path / "keys.toml"
    key = new_key()
    add_entry(keys, "alice", {"certificate": "alice", "tenant": "red"})
    add_entry(keys, "carol", {"sha256": digest_of(key).hex()})
    alice, bob = (
        files.callers.issue_cert(f"{name}.example", common_name=name) for name in ("alice", "bob")
    )
    gate, tls = KeyGate(str(keys)), TlsFiles(files.settings(mutual=True))
    async with serving(gate=gate, tls=tls, http=True) as s:
        await over_grpc(s, access_to(files.authority, alice))
        assert s.engine.requests[-1].identity == "red"
        assert await over_http(s, files.authority, alice) == 200
        with pytest.raises(Unauthenticated, match="'bob' is not known"):
            await over_grpc(s, access_to(files.authority, bob))
        assert await over_http(s, files.authority, bob) == 401
        await over_grpc(s, access_to(files.authority, bob, key))
        assert s.engine.requests[-1].identity == "carol"
        assert await over_http(s, files.authority, bob, key) == 200
        with pytest.raises(Unauthenticated):  # a wrong key is not made good by a certificate
            await over_grpc(s, access_to(files.authority, alice, "jserve-wrong"))


@pytest.mark.parametrize("broken", ["missing", "mismatch", "junk", "encrypted", "no authority"])
def test_files_that_are_no_good_at_the_start_are_a_config_error(files: Files, broken: str):
    if broken == "missing":
        files.key.unlink()
    elif broken == "mismatch":
        files.issue(trustme.CA(), key=False)
    elif broken == "junk":
        files.cert.write_bytes(b"\xff")
    elif broken == "no authority":
        files.ca.write_bytes(b"none")
    else:
        key = serialization.load_pem_private_key(files.key.read_bytes(), None)
        form = serialization.PrivateFormat.PKCS8
        secret = serialization.BestAvailableEncryption(b"secret")
        files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, secret))
    with pytest.raises(ConfigError, match=r"key\.pem.*PEM"):
        TlsFiles(files.settings(mutual=True))


async def test_whoever_sends_its_request_too_slowly_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_connection, "ARRIVAL_LIMIT_S", 0.1)
    async with serving(http=True) as s:
        host, port = s.http.removeprefix("http://").rsplit(":", 1)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        whole = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        for sent in (b"", b"GET / HT", head + b"content-length: 9\r\n\r\n{"):
            reader, writer = await asyncio.open_connection(host, int(port))
            if sent:  # a first request in time does not help a second that is late
                writer.write(whole)
                await reader.readuntil(b'"ready"}')
            writer.write(sent)
            async with asyncio.timeout(5):
                await reader.read()
            writer.close()
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(2):  # there may be any time between two requests
            writer.write(whole)
            await reader.readuntil(b'"ready"}')
            await asyncio.sleep(0.2)
        writer.close()
