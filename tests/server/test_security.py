"""Who may call what, over gRPC and HTTP: keys, administrators, quotas, floods of wrong keys."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jserve.access import Access
from jserve.client import GenerateClient
from jserve.errors import ConfigError, Forbidden, Overloaded, Unauthenticated
from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams
from jserve.server import security, watch
from jserve.server.api_keys import add_entry, digest_of, new_key
from jserve.server.cache_service import KV_SERVICE
from jserve.server.proto import generate_pb2 as pb
from jserve.server.rpc import stub_of
from jserve.server.security import KeyGate
from tests.server.conftest import TIMEOUT_S, Served, serving, until
from tests.server.fake_engine import FakeEngine

ASK = GenerateRequest(prompt="x", sampling=SamplingParams(max_tokens=2))
CALL = pb.GenerateRequest(prompt="x")


class Keys:
    """A file of keys, and a gate that looks at it each time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.root = self.add("root", admin=True)

    def add(self, name: str, **fields: object) -> str:
        key = new_key()
        add_entry(self.path, name, {"sha256": digest_of(key).hex(), **fields})
        return key

    def gate(self) -> KeyGate:
        return KeyGate(str(self.path), ["batch", "chat"])


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.0)
    return Keys(tmp_path / "keys.toml")


async def ask(served: Served, key: str, request: GenerateRequest = ASK) -> str:
    async with GenerateClient(served.target, Access(api_key=key)) as client:
        return (await client.generate(request)).text


async def status_of(call) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def get(
    served: Served, path: str, headers: Mapping[str, str] | None = None, method: str = "GET"
) -> tuple[int, dict, Mapping[str, str]]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, served.http + path, headers=headers) as response,
    ):
        text = await response.text()
        body = json.loads(text) if "json" in response.headers["content-type"] else {"text": text}
        return response.status, body, response.headers.copy()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def reflected(served: Served, key: str) -> list[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([question]), metadata=Access(api_key=key).metadata)
    return [s.name async for m in call for s in m.list_services_response.service]


async def test_a_known_key_is_served_in_the_name_and_tenant_of_its_entry(keys: Keys):
    alice = keys.add("alice", tenant="red")
    async with serving(gate=keys.gate()) as s:
        assert await ask(s, alice) == "t0 t1 "
        assert await ask(s, keys.root) == "t0 t1 "
        assert [request.identity for request in s.engine.requests] == ["red", "root"]


@pytest.mark.parametrize("key", ["", "jserve-wrong", "\x20", "x" * 5000])
async def test_over_grpc_all_but_health_needs_a_key(keys: Keys, key: str):
    async with serving(gate=keys.gate()) as s:
        metadata = Access(api_key=key).metadata
        code = grpc.StatusCode.UNAUTHENTICATED
        assert await status_of(s.stub.Generate(CALL, metadata=metadata)) is code
        stream = s.stub.GenerateStream(CALL, metadata=metadata)
        assert await stream.code() is code
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reflected(s, key)
        assert caught.value.code() is code
        assert (await s.health_stub.Check(health_pb2.HealthCheckRequest())).status
        assert s.engine.requests == []


async def test_with_a_key_reflection_answers(keys: Keys):
    async with serving(gate=keys.gate()) as s:
        assert "jserve.v1.GenerateService" in await reflected(s, keys.root)


async def test_an_unknown_callers_message_is_not_read(keys: Keys):
    """So that a flood of large messages costs no parsing: this one would be INVALID_ARGUMENT."""
    async with serving(gate=keys.gate()) as s:
        call = s.channel.unary_unary("/jserve.v1.GenerateService/Generate")
        junk = b"\xff" * 10**6
        assert await status_of(call(junk)) is grpc.StatusCode.UNAUTHENTICATED
        sent = call(junk, metadata=Access(api_key=keys.root).metadata)
        assert await status_of(sent) is grpc.StatusCode.INVALID_ARGUMENT


async def test_what_shows_all_callers_is_for_administrators_over_grpc(keys: Keys):
    alice = keys.add("alice")
    async with serving(gate=keys.gate(), enable_cache_service=True) as s:
        cache = stub_of(s.channel, KV_SERVICE)

        def reset(key: str) -> grpc.aio.UnaryUnaryCall:
            return cache.ResetPrefixCache(
                pb.ResetPrefixCacheRequest(), metadata=Access(api_key=key).metadata
            )

        assert await status_of(reset(alice)) is grpc.StatusCode.PERMISSION_DENIED
        assert await status_of(reset(keys.root)) is grpc.StatusCode.OK
        assert s.engine.num_resets == 1


async def test_over_http_all_but_health_needs_a_key(keys: Keys):
    async with serving(gate=keys.gate(), http=True) as s:
        for path in ("/health", "/health/live", "/health/ready"):
            assert (await get(s, path))[0] == 200
        for path in ("/", "/v1/models", "/v1/nothing", "/metrics", "/debug/x", "/health/x"):
            for headers in ({}, bearer("jserve-wrong"), {"authorization": "Basic !!"}):
                status, body, answer = await get(s, path, headers)
                assert (status, body["error"]["code"]) == (401, "invalid_api_key")
                assert answer["www-authenticate"] == "Bearer"
        assert (await get(s, "/v1/models", bearer(keys.root)))[0] == 200
        assert (await get(s, "/v1/models", {"x-api-key": keys.root}))[0] == 200


async def test_what_shows_all_callers_is_for_administrators_over_http(keys: Keys):
    alice = keys.add("alice")
    async with serving(gate=keys.gate(), http=True) as s:
        for path in ("/", "/metrics", "/debug/state", "/page.js", "/docs"):
            status, body, _ = await get(s, path, bearer(alice))
            assert (status, body["error"]["type"]) == (403, "permission_error")
        assert (await get(s, "/v1/models", bearer(alice)))[0] == 200
        assert (await get(s, "/metrics", bearer(keys.root)))[0] == 200


def basic(text: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(text.encode()).decode()}


async def test_a_browser_is_asked_for_a_password_which_is_the_key(keys: Keys):
    async with serving(gate=keys.gate(), http=True) as s:
        challenges = (await get(s, "/metrics"))[2].getall("www-authenticate")
        assert challenges == ["Bearer", 'Basic realm="jserve"']
        assert (await get(s, "/metrics", basic(f"anyone:{keys.root}")))[0] == 200
        for wrong in (f"{keys.root}:x", keys.root, ":", ""):
            assert (await get(s, "/metrics", basic(wrong)))[0] == 401


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_another_sites_page_cannot_make_a_browser_act(keys: Keys, site: str):
    """A browser adds the password that it was told; it also tells whose page asked."""
    path, foreign = "/v1/completions", {"sec-fetch-site": site}
    told = basic(f"me:{keys.root}")
    async with serving(gate=keys.gate(), http=True) as s:
        status, body, _ = await get(s, path, told | foreign, "POST")
        assert (status, "another site" in body["error"]["message"]) == (403, True)
        for harmless in (
            told | {"sec-fetch-site": "same-origin"},
            told | {"sec-fetch-site": "none"},
            told,
            bearer(keys.root) | foreign,  # which no page can make it add
        ):
            assert (await get(s, path, harmless, "POST"))[0] == 415  # there is no body
        assert (await get(s, "/v1/models", told | foreign))[0] == 200
    async with serving(http=True) as s:  # nor use that it may connect where the page may not
        assert (await get(s, path, foreign, "POST"))[0] == 403


async def test_a_browser_that_tells_no_site_is_known_by_its_origin(keys: Keys):
    """Over HTTP without TLS, beyond its own machine, a browser tells the origin alone."""
    path, told = "/debug/profile", basic(f"me:{keys.root}")
    async with serving(gate=keys.gate(), http=True) as s:
        user = s.http.replace("http:", "http://x@", 1)
        for foreign in ("http://evil.example", "null", "http://[", user):
            assert (
                "another site"
                in (await get(s, path, told | {"origin": foreign}, "POST"))[1]["error"]["message"]
            )
        status, body, _ = await get(s, path, told | {"origin": s.http}, "POST")
        assert (status, "profiles are off" in body["error"]["message"]) == (403, True)


ORIGIN = "https://app.example"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


async def test_pages_of_allowed_origins_may_call_and_read_with_a_key_of_their_own(keys: Keys):
    alice = keys.add("alice", requests_per_minute=9)
    path = "/v1/models"
    async with serving(gate=keys.gate(), http=True, allowed_origins=[ORIGIN]) as s:
        status, _, headers = await get(s, path, PREFLIGHT, "OPTIONS")  # which has no key
        assert (status, headers["access-control-allow-origin"]) == (200, ORIGIN)
        assert "x-stainless-os" in headers["access-control-allow-headers"]
        assert "POST" in headers["access-control-allow-methods"]
        assert "access-control-allow-credentials" not in headers
        asking = {"origin": ORIGIN, "sec-fetch-site": "cross-site"}
        status, _, headers = await get(s, path, asking | bearer(alice))
        assert (status, headers["access-control-allow-origin"]) == (200, ORIGIN)
        assert "x-ratelimit-remaining-requests" in headers["access-control-expose-headers"]
        status, _, headers = await get(s, path, asking)  # a page reads errors, too
        assert (status, headers["access-control-allow-origin"]) == (401, ORIGIN)
        other = {"origin": "https://evil.example"}
        assert (await get(s, path, PREFLIGHT | other, "OPTIONS"))[0] == 400
        _, _, headers = await get(s, path, other | bearer(alice))
        assert "access-control-allow-origin" not in headers
    async with serving(http=True, allowed_origins=[ORIGIN]) as s:  # nor without keys
        assert (await get(s, "/v1/completions", asking, "POST"))[0] == 415
        assert (await get(s, "/v1/completions", asking | other, "POST"))[0] == 403
    async with serving(http=True) as s:  # by default nobody may
        assert (await get(s, path, PREFLIGHT, "OPTIONS"))[0] == 403
        assert "access-control-allow-origin" not in (await get(s, path, asking))[2]


async def test_where_all_origins_may_call_none_may_use_the_password_that_a_browser_keeps(
    keys: Keys,
):
    foreign = {"origin": ORIGIN, "sec-fetch-site": "cross-site"}
    path, password = "/debug/profile", basic(f"me:{keys.root}")
    async with serving(gate=keys.gate(), http=True, allowed_origins=["*"]) as s:
        _, body, _ = await get(s, path, foreign | password, "POST")
        assert "another site" in body["error"]["message"]
        _, body, _ = await get(s, path, foreign | bearer(keys.root), "POST")
        assert "profiles are off" in body["error"]["message"]


async def test_tokenizing_counts_as_a_request_of_its_key(keys: Keys):
    alice = keys.add("alice", requests_per_minute=2)
    async with serving(gate=keys.gate(), http=True) as s, aiohttp.ClientSession(s.http) as session:
        answers = []
        for path, body in (
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [-1]}),  # a faulty one counts as everywhere
            ("/tokenize", {"prompt": "a"}),
        ):
            async with session.post(path, json=body, headers=bearer(alice)) as response:
                left = response.headers["x-ratelimit-remaining-requests"]
                answers.append((response.status, left))
                headers = response.headers
        assert answers == [(200, "1"), (400, "0"), (429, "0")]
        assert 25 < int(headers["retry-after"]) <= 30
        assert s.engine.metrics.registry.get_sample_value("jserve_quota_refusals_total") == 1


async def test_without_keys_anyone_is_served_and_may_look():
    async with serving(http=True) as s:
        assert (await get(s, "/metrics"))[0] == 200
        assert await ask(s, "whatever") == "t0 t1 "


async def test_a_class_that_a_key_may_not_use_is_refused_and_named(keys: Keys):
    alice = keys.add("alice", request_classes=["batch"])
    async with serving(gate=keys.gate()) as s:
        with pytest.raises(Forbidden, match=r"'chat'.*'batch'"):
            await ask(s, alice, GenerateRequest(prompt="x", request_class="chat"))
        await ask(s, alice, GenerateRequest(prompt="x", request_class="batch"))
        await ask(s, alice, GenerateRequest(prompt="x"))  # its only one, so it need not be named
        assert [request.request_class for request in s.engine.requests] == ["batch", "batch"]


async def test_keys_come_and_go_without_a_restart_and_a_broken_file_changes_nothing(
    keys: Keys, caplog: pytest.LogCaptureFixture
):
    alice = keys.add("alice")
    only_root = keys.path.read_text().split("[keys.alice]")[0]
    async with serving(gate=keys.gate()) as s:
        bob = keys.add("bob")
        assert await ask(s, bob) == "t0 t1 "
        keys.path.write_text(only_root + "[keys.alice\n")
        assert await ask(s, alice) == "t0 t1 "
        assert "the old keys stay" in caplog.text
        assert "at line" in caplog.text
        keys.path.unlink()
        assert await ask(s, alice) == "t0 t1 "
        keys.path.write_text(only_root)
        for gone in (alice, bob):
            with pytest.raises(Unauthenticated):
                await ask(s, gone)
        assert await ask(s, keys.root) == "t0 t1 "


async def test_a_removed_keys_running_request_goes_on(keys: Keys):
    alice = keys.add("alice")
    only_root = keys.path.read_text().split("[keys.alice]")[0]
    async with serving(FakeEngine(interval_s=None), gate=keys.gate()) as s:
        stream = s.stub.GenerateStream(CALL, metadata=Access(api_key=alice).metadata)
        await until(lambda: s.engine.live)
        keys.path.write_text(only_root)
        with pytest.raises(Unauthenticated):
            await ask(s, alice)
        for _ in range(8):
            s.engine.step()
        assert len([message async for message in stream]) == 8


def test_a_file_of_keys_that_is_not_there_at_the_start_is_a_config_error(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        KeyGate(str(tmp_path / "keys.toml"))


async def test_a_quota_is_told_with_the_time_to_wait_over_grpc(keys: Keys):
    alice = keys.add("alice", requests_per_minute=2)
    async with serving(gate=keys.gate()) as s:
        for _ in range(2):
            await ask(s, alice)
        with pytest.raises(Overloaded) as caught:
            await ask(s, alice)
        assert 25 < caught.value.retry_after_s <= 30
        call = s.stub.Generate(CALL, metadata=Access(api_key=alice).metadata)
        assert await status_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
        advice = dict(await call.trailing_metadata())
        assert advice["retry-after-ms"] == advice["grpc-retry-pushback-ms"]
        await ask(s, keys.root)


async def test_tokens_are_charged_as_they_come_and_reloading_forgives_none(keys: Keys):
    alice = keys.add("alice", tokens_per_minute=10)
    async with serving(gate=keys.gate()) as s:
        await ask(s, alice, GenerateRequest(prompt="12345", sampling=SamplingParams(max_tokens=7)))
        keys.add("bob")
        with pytest.raises(Overloaded, match="tokens"):
            await ask(s, alice)


async def test_requests_at_once_are_counted_over_all_calls_of_a_key(keys: Keys):
    alice = keys.add("alice", max_concurrent_requests=2)
    async with serving(FakeEngine(interval_s=None), gate=keys.gate()) as s:
        metadata = Access(api_key=alice).metadata
        streams = [s.stub.GenerateStream(CALL, metadata=metadata) for _ in range(2)]
        await until(lambda: len(s.engine.live) == 2)
        with pytest.raises(Overloaded, match="2 requests"):
            await ask(s, alice)
        streams[0].cancel()
        await until(lambda: len(s.engine.live) == 1)
        again = s.stub.GenerateStream(CALL, metadata=metadata)
        await until(lambda: len(s.engine.live) == 2)
        again.cancel()
        streams[1].cancel()


async def test_a_call_that_is_not_read_counts_for_its_key_as_long_as_it_is_open(keys: Keys):
    alice = keys.add("alice", max_concurrent_requests=1)
    engine = FakeEngine()
    engine.padding = "x" * 2000  # all of it is far more than a connection's buffers hold
    long = pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(max_tokens=5000))
    async with serving(engine, gate=keys.gate()) as s:
        stream = s.stub.GenerateStream(long, metadata=Access(api_key=alice).metadata)
        await stream.initial_metadata()
        await until(lambda: engine.requests and not engine.live)  # it has ended, unread
        with pytest.raises(Overloaded, match="1 requests of this key"):
            await ask(s, alice)
        await ask(s, keys.root)
        stream.cancel()
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    await ask(s, alice)
                    break
                except Overloaded:
                    await asyncio.sleep(0.01)


async def test_over_http_what_is_left_is_in_the_headers(keys: Keys):
    alice = keys.add("alice", requests_per_minute=60)
    async with serving(gate=keys.gate(), http=True) as s:
        _, _, headers = await get(s, "/v1/models", bearer(alice))
        assert headers["x-ratelimit-limit-requests"] == "60"
        assert headers["x-ratelimit-remaining-requests"] == "60"


async def test_a_flood_of_wrong_keys_does_not_slow_the_others(keys: Keys):
    """With a thousand keys in the file, a check costs well under a millisecond."""
    digests = [digest_of(new_key()).hex() for _ in range(1000)]
    lines = [f'[keys.k{i}]\nsha256 = "{digest}"' for i, digest in enumerate(digests)]
    keys.path.write_text(keys.path.read_text() + "\n".join(lines))
    gate = keys.gate()
    began = time.perf_counter()
    for _ in range(200):
        with pytest.raises(Unauthenticated):
            gate.admit("jserve-wrong", "")
    assert (time.perf_counter() - began) / 200 < 2e-3  # 0.08 ms, where nothing else runs
    async with serving(gate=gate, http=True) as s:
        wrong = [get(s, "/v1/models", bearer("jserve-wrong")) for _ in range(100)]
        flood = asyncio.gather(*wrong)
        assert await ask(s, keys.root) == "t0 t1 "
        assert {status for status, _, _ in await flood} == {401}


async def test_one_call_too_many_is_refused_over_grpc_and_health_never_is():
    async with serving(FakeEngine(interval_s=None), max_open_streams=2) as s:
        streams = [s.stub.GenerateStream(CALL) for _ in range(2)]
        await until(lambda: len(s.engine.live) == 2)
        call = s.stub.Generate(CALL)
        assert await status_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 calls are open" in await call.details()
        assert (await s.health_stub.Check(health_pb2.HealthCheckRequest())).status
        streams[0].cancel()
        await until(lambda: len(s.engine.live) == 1)
        again = s.stub.GenerateStream(CALL)
        await until(lambda: len(s.engine.live) == 2)
        for stream in (streams[1], again):
            stream.cancel()


async def test_strangers_who_watch_health_are_bounded_and_take_no_place_of_others(keys: Keys):
    question = health_pb2.HealthCheckRequest()
    async with serving(gate=keys.gate(), max_open_streams=2) as s:
        watches = [s.health_stub.Watch(question) for _ in range(2)]
        for watch_ in watches:
            assert (await watch_.read()).status
        third = s.health_stub.Watch(question)
        assert await third.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await ask(s, keys.root) == "t0 t1 "
        assert (await s.health_stub.Check(question)).status
        watches[0].cancel()
        async with asyncio.timeout(TIMEOUT_S):
            while not await s.health_stub.Watch(question).read():
                pass


async def test_what_shows_all_callers_is_for_administrators_among_routers_methods(keys: Keys):
    alice = keys.add("alice")
    async with serving(gate=keys.gate(), enable_cache_service=True) as s:
        for name in ("FlushCache", "SubscribeKvEvents", "StartProfile", "StopProfile"):
            call = s.channel.unary_unary(f"/vllm.grpc.engine.VllmEngine/{name}")
            denied = call(b"", metadata=Access(api_key=alice).metadata)
            assert await status_of(denied) is grpc.StatusCode.PERMISSION_DENIED
        call = s.channel.unary_unary("/vllm.grpc.engine.VllmEngine/FlushCache")
        allowed = call(b"", metadata=Access(api_key=keys.root).metadata)
        assert await status_of(allowed) is grpc.StatusCode.OK


def test_the_file_is_looked_at_once_a_second_at_most(tmp_path: Path, monkeypatch):
    now, looks = [0.0], []
    stat = os.stat
    monkeypatch.setattr(watch.os, "stat", lambda path: looks.append(path) or stat(path))
    watched = watch.Watch([str(tmp_path)], lambda: now[0])
    for _ in range(1000):
        now[0] += 0.01
        assert not watched.has_changed()
    assert 9 <= len(looks) <= 12


async def test_a_call_whose_message_does_not_come_makes_room_for_others(monkeypatch):
    monkeypatch.setattr(security, "ARRIVAL_LIMIT_S", 0.1)
    method = "/jserve.v1.GenerateService/Generate"
    async with serving(max_open_streams=2) as s:
        calls = [s.channel.stream_unary(method)() for _ in range(2)]  # which begin, and no more
        for call in calls:
            await call.wait_for_connection()
        for call in calls:
            async with asyncio.timeout(TIMEOUT_S):
                await call.code()
            assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert "did not come within 0.1 s" in await call.details()
        assert (await s.client.generate(ASK)).text
