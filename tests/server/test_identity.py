"""Who a caller is: what its certificate proves over mutual TLS, whatever its message says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
import trustme

from jserve.engine.async_engine import AsyncEngine
from jserve.server.front import Front
from jserve.server.grpc_service import GENERATE_SERVICE, GenerateService
from jserve.server.proto import generate_pb2 as pb
from jserve.server.rpc import add_service, stub_of
from tests.e2e.real_engine import PAGE, arranged, prompt_of
from tests.server.conftest import Served
from tests.server.fake_engine import FakeEngine

CLAIM = [("identity", "bob"), ("x509_common_name", "bob"), ("authorization", "Bearer bob")]


@asynccontextmanager
async def over_tls(authority: trustme.CA, engine: FakeEngine | AsyncEngine) -> AsyncIterator[str]:
    """A server that takes the authority's certificates only; yields its target."""
    own = authority.issue_cert("localhost")
    credentials = grpc.ssl_server_credentials(
        [(own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes())],
        root_certificates=authority.cert_pem.bytes(),
        require_client_auth=True,
    )
    server, front = grpc.aio.server(), Front()
    add_service(server, GENERATE_SERVICE, GenerateService(front))
    front.open(engine)
    port = server.add_secure_port("localhost:0", credentials)
    await server.start()
    try:
        yield f"localhost:{port}"
    finally:
        await server.stop(0)


async def ask(
    target: str,
    authority: trustme.CA,
    certificate: trustme.LeafCert,
    message: pb.GenerateRequest | None = None,
) -> pb.GenerateResponse:
    """Sends a request that claims to be bob's in every way that a message can."""
    credentials = grpc.ssl_channel_credentials(
        authority.cert_pem.bytes(),
        certificate.private_key_pem.bytes(),
        certificate.cert_chain_pems[0].bytes(),
    )
    message = message or pb.GenerateRequest(prompt="x", tenant="bob")
    async with grpc.aio.secure_channel(target, credentials) as channel:
        stub = stub_of(channel, GENERATE_SERVICE)
        return await stub.Generate(message, metadata=CLAIM, timeout=20)


@pytest.mark.parametrize(
    ("names", "common_name", "expected"),
    [
        (["alice.example"], "alice", "alice"),
        (["alice.example", "other.example"], None, "alice.example"),
    ],
)
async def test_the_identity_is_the_certificates_whatever_the_message_says(
    names, common_name, expected
):
    authority, engine = trustme.CA(), FakeEngine()
    async with over_tls(authority, engine) as target:
        await ask(target, authority, authority.issue_cert(*names, common_name=common_name))
    [request] = engine.requests
    assert (request.identity, request.tenant) == (expected, "bob")


async def test_a_certificate_of_another_authority_proves_nothing():
    authority, engine = trustme.CA(), FakeEngine()
    async with over_tls(authority, engine) as target:
        forged = trustme.CA().issue_cert("bob.example", common_name="bob")
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(target, authority, forged)
    assert engine.requests == []


async def test_without_tls_nobody_is_authenticated(served: Served):
    await served.stub.Generate(pb.GenerateRequest(prompt="x"), metadata=CLAIM)
    assert served.engine.requests[0].identity == ""


async def test_no_caller_reaches_what_another_identity_has_cached_whatever_tenant_it_names():
    authority, engine = trustme.CA(), arranged()
    alice, bob = (authority.issue_cert(f"{n}.example", common_name=n) for n in ("alice", "bob"))
    prompt = pb.TokenIds(ids=prompt_of(3 * PAGE))
    short = pb.SamplingParams(max_tokens=1)

    async def cached(certificate: trustme.LeafCert, tenant: str) -> int:
        message = pb.GenerateRequest(token_ids=prompt, sampling=short, tenant=tenant)
        return (await ask(target, authority, certificate, message)).usage.cached_tokens

    front = AsyncEngine(engine)
    async with over_tls(authority, front) as target:
        assert await cached(bob, "") == 0
        assert await cached(bob, "") == 2 * PAGE
        for tenant in ("", "bob", "alice"):
            assert await cached(alice, tenant) == 0
        assert await cached(alice, "bob") == 2 * PAGE
        assert await cached(bob, "own part") == 0
    await front.drain(0)
