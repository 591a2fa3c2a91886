"""GenerateService over a real channel: output, statuses, cancellation and deadlines."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from jserve.errors import (
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    JserveError,
    Overloaded,
)
from jserve.messages import GenerateRequest, joined
from jserve.sampling_params import SamplingParams
from jserve.server import grpc_service
from jserve.server.grpc_service import SERVICE
from jserve.server.proto import generate_pb2 as pb
from jserve.server.wire import request_to_proto
from tests.server.conftest import TIMEOUT_S, serving, until
from tests.server.fake_engine import FakeEngine, text_of


def asking(num_tokens: int, **fields) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=num_tokens)
    return GenerateRequest(**{"prompt": "abc", "sampling": sampling, **fields})


async def status_of(call) -> grpc.aio.AioRpcError:
    """Returns the error that ends `call`, unary or streaming."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            if hasattr(call, "__aiter__"):
                async for _ in call:
                    pass
            else:
                await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call ended well")


async def test_a_stream_brings_one_message_per_update_and_the_ending_last(served):
    updates = [u async for u in served.client.stream(asking(3), return_prompt_token_ids=True)]
    assert [u.token_ids for u in updates] == [(0,), (1,), (2,)]
    assert "".join(u.text for u in updates) == "t0 t1 t2 "
    assert [u.finish_reason for u in updates] == [None, None, "length"]
    assert updates[0].prompt_token_ids == (0, 1, 2)
    assert (updates[-1].usage.prompt_tokens, updates[-1].usage.completion_tokens) == (3, 3)
    assert updates[-1].timings is not None


async def test_the_unary_call_brings_the_same_output_at_once(served):
    sampling = SamplingParams(max_tokens=5, stop_token_ids=(3,), logprobs=1)
    whole = await served.client.generate(GenerateRequest(prompt="abc", sampling=sampling))
    assert whole.token_ids == (0, 1, 2, 3)
    assert whole.text == "".join(map(text_of, range(4)))
    assert (whole.finish_reason, whole.stop_reason) == ("stop", 3)
    assert [e.token_id for e in whole.logprobs] == [0, 1, 2, 3]


async def test_o31_each_choice_comes_once_with_its_own_ending_in_both_modes(served):
    sampling = SamplingParams(
        max_tokens=4, n=3, stop_token_ids=(102,), logprobs=0, prompt_logprobs=0
    )
    request = GenerateRequest(prompt="abc", sampling=sampling)
    updates = [u async for u in served.client.stream(request, return_prompt_token_ids=True)]
    assert [u.is_last for u in updates] == [False] * (len(updates) - 1) + [True]
    whole = await served.client.choices(request, return_prompt_token_ids=True)
    for choices in (joined(updates), whole):
        assert [c.index for c in choices] == [0, 1, 2]
        assert [c.token_ids for c in choices] == [
            (0, 1, 2, 3),
            (100, 101, 102),
            (200, 201, 202, 203),
        ]
        assert [c.finish_reason for c in choices] == ["length", "stop", "length"]
        assert [c.usage.completion_tokens for c in choices] == [4, 3, 4]
        assert [len(c.logprobs) for c in choices] == [4, 3, 4]
        assert [c.prompt_token_ids for c in choices] == [(0, 1, 2), (), ()]
        assert [e and e.token_id for e in choices[0].prompt_logprobs] == [None, 1, 2]
    message = await served.stub.Generate(request_to_proto(request))
    assert (message.usage.prompt_tokens, message.usage.completion_tokens) == (3, 11)


async def test_o31_a_request_of_several_choices_is_not_answered_with_one(served):
    request = GenerateRequest(prompt="abc", sampling=SamplingParams(n=2))
    with pytest.raises(InvalidRequest, match="n=2"):
        await served.client.generate(request)


async def test_a_call_left_after_its_first_choice_has_ended_aborts_the_others(stepped):
    sampling = SamplingParams(max_tokens=4, n=2, stop_token_ids=(0,))
    updates = stepped.client.stream(GenerateRequest(prompt="abc", sampling=sampling))
    first = asyncio.ensure_future(anext(updates))
    await until(lambda: stepped.engine.live)
    stepped.engine.step()
    assert (await first).finish_reason == "stop"
    await updates.aclose()
    await until(lambda: stepped.engine.abort_calls)


async def test_all_fields_reach_the_engine(served):
    request = asking(1, request_id="r1", model="fake", priority=4, tenant="t", timeout_s=50.0)
    assert (await served.client.generate(request)).request_id == "r1"
    assert served.engine.requests == [request]


async def test_o05_slow_readers_get_every_token_in_order_and_then_the_end(served):
    async def read_slowly():
        ids, reasons = [], []
        async for update in served.client.stream(asking(256)):
            ids += update.token_ids
            reasons.append(update.finish_reason)
            await asyncio.sleep(
                0.002
            )  # the reader is slower than the engine, which is done at once
        return ids, reasons

    for ids, reasons in await asyncio.gather(*(read_slowly() for _ in range(8))):
        assert ids == list(range(256))
        assert reasons == [None] * 255 + ["length"]


async def test_o05_a_reader_that_pauses_beyond_the_flow_control_window_loses_nothing(served):
    served.engine.padding = "." * 20_000  # 1,000 messages of 20 kB: far more than HTTP/2 lets wait
    updates = served.client.stream(asking(1000))
    ids = list((await anext(updates)).token_ids)
    await until(lambda: not served.engine.live)
    ids += [i async for update in updates for i in update.token_ids]
    assert ids == list(range(1000))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("temperature=-1 is out of range"), grpc.StatusCode.INVALID_ARGUMENT),
        (Overloaded("1024 requests wait already"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (DeadlineExceeded("too late"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (EngineDead("the engine has stopped"), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_o91_errors_of_submit_are_statuses_with_their_text(served, error, code):
    served.engine.submit_error = error
    for method in (served.stub.Generate, served.stub.GenerateStream):
        status = await status_of(method(pb.GenerateRequest(prompt="x")))
        assert (status.code(), status.details()) == (code, str(error))


async def test_o91_a_fault_is_internal_and_the_log_has_its_place_but_not_its_words(served, caplog):
    served.engine.submit_error = ZeroDivisionError("secret")
    status = await status_of(served.stub.Generate(pb.GenerateRequest(prompt="x")))
    assert status.code() == grpc.StatusCode.INTERNAL
    assert "ZeroDivisionError" in status.details()
    assert "secret" not in status.details()
    assert "ZeroDivisionError, raised at" in caplog.text
    assert "fake_engine.py" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("reason", "error", "code"),
    [
        ("error", EngineDead("the device failed"), grpc.StatusCode.UNAVAILABLE),
        ("error", RuntimeError("boom"), grpc.StatusCode.INTERNAL),
        ("deadline", DeadlineExceeded("late"), grpc.StatusCode.DEADLINE_EXCEEDED),
        ("abort", None, grpc.StatusCode.CANCELLED),
    ],
)
async def test_a_stream_that_the_engine_ends_early_ends_with_a_status(stepped, reason, error, code):
    messages = aiter(stepped.stub.GenerateStream(pb.GenerateRequest(prompt="x")))
    first = asyncio.ensure_future(anext(messages))
    await until(lambda: stepped.engine.live)
    stepped.engine.step()
    assert list((await first).token_ids) == [0]
    stepped.engine.live[0].end(reason, error)
    assert (await status_of(messages)).code() == code
    assert not stepped.engine.abort_calls


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x7fshort", b"\x0a\x02\xff\xfe"])
async def test_bytes_that_are_no_request_are_an_invalid_argument(served, data):
    call = served.channel.unary_unary(f"/{SERVICE}/Generate")(data)
    status = await status_of(call)
    assert status.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "request" in status.details()


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateRequest(),
        pb.GenerateRequest(prompt=""),
        pb.GenerateRequest(token_ids=pb.TokenIds()),
        pb.GenerateRequest(prompt="x", model="another"),
        pb.GenerateRequest(prompt="x", model="m" * 100_000),
        pb.GenerateRequest(prompt="x", timeout_s=float("nan")),
        pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(temperature=float("inf"))),
        pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(max_tokens=0)),
        pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(max_tokens=2**62)),
    ],
)
async def test_o28_bad_requests_are_refused_and_the_next_one_is_served(served, message):
    for method in (served.stub.Generate, served.stub.GenerateStream):
        status = await status_of(method(message))
        not_found = grpc.StatusCode.NOT_FOUND if message.model else None
        assert status.code() == (not_found or grpc.StatusCode.INVALID_ARGUMENT)
        assert 0 < len(status.details()) < 1100
    assert (await served.client.generate(asking(1))).token_ids == (0,)


async def test_a_message_of_50_mb_is_refused_and_the_next_one_is_served(served):
    status = await status_of(served.stub.Generate(pb.GenerateRequest(prompt="x" * 50_000_000)))
    assert status.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in status.details()
    assert (await served.client.generate(asking(1))).token_ids == (0,)


async def test_the_size_limit_is_a_setting():
    async with serving(max_message_bytes=1000) as s:
        assert (await s.client.generate(asking(1, prompt="x" * 900))).token_ids == (0,)
        with pytest.raises(Overloaded, match="larger than max"):
            await s.client.generate(asking(1, prompt="x" * 1100))


@pytest.mark.parametrize("streaming", [True, False])
async def test_o48_a_client_that_cancels_aborts_its_request(stepped, streaming):
    method = stepped.stub.GenerateStream if streaming else stepped.stub.Generate
    call = method(pb.GenerateRequest(prompt="x", request_id="mine"))
    await until(lambda: stepped.engine.live)
    for _ in range(3):
        stepped.engine.step()
    if streaming:
        await call.read()
    call.cancel()
    await until(lambda: stepped.engine.abort_calls == ["mine"])
    assert not stepped.engine.live


async def test_o48_a_connection_that_breaks_aborts_its_requests(stepped):
    async with grpc.aio.insecure_channel(stepped.target) as channel:
        stream = channel.unary_stream(f"/{SERVICE}/GenerateStream")
        calls = [stream(pb.GenerateRequest(prompt="x").SerializeToString()) for _ in range(3)]
        await until(lambda: len(stepped.engine.live) == len(calls))
    await until(lambda: len(stepped.engine.abort_calls) == len(calls))


async def test_o48_closing_the_clients_iterator_aborts_the_request(stepped):
    updates = stepped.client.stream(asking(100))
    first = asyncio.create_task(anext(updates))
    await until(lambda: stepped.engine.live)
    stepped.engine.step()
    await first
    await updates.aclose()
    await until(lambda: stepped.engine.abort_calls)


async def test_o48_a_client_that_leaves_while_a_write_is_blocked_aborts_its_request(stepped):
    stepped.engine.padding = "." * 20_000
    updates = stepped.client.stream(asking(10**6))
    first = asyncio.create_task(anext(updates))
    await until(lambda: stepped.engine.live)
    for _ in range(1000):
        stepped.engine.step()
    await first
    await updates.aclose()
    await until(lambda: stepped.engine.abort_calls)


async def test_o49_queued_requests_whose_clients_have_gone_are_aborted_and_never_run():
    async with serving(FakeEngine(interval_s=None, max_running=1)) as s:
        busy = s.stub.GenerateStream(pb.GenerateRequest(prompt="x", request_id="busy"))
        await until(lambda: s.engine.live)
        queued = [s.stub.GenerateStream(pb.GenerateRequest(prompt="x")) for _ in range(5)]
        await until(lambda: len(s.engine.live) == 6)
        for call in queued:
            call.cancel()
        await until(lambda: len(s.engine.abort_calls) == 5)
        while s.engine.live:
            s.engine.step()
        assert [i async for message in busy for i in message.token_ids] == list(range(8))
        assert s.engine.num_emitted == 8


async def test_finished_requests_are_never_aborted(served):
    await served.client.generate(asking(4))
    async for _ in served.client.stream(asking(4)):
        pass
    assert not served.engine.abort_calls


async def test_the_requests_own_time_limit_ends_it_with_the_engines_words(stepped):
    with pytest.raises(DeadlineExceeded, match="took longer than"):
        await stepped.client.generate(asking(4, timeout_s=0.05))


async def test_the_calls_deadline_reaches_the_engine_and_aborts(stepped):
    call = stepped.stub.GenerateStream(
        pb.GenerateRequest(prompt="x", timeout_s=1000.0), timeout=1.0
    )
    assert (await status_of(call)).code() == grpc.StatusCode.DEADLINE_EXCEEDED
    # gRPC's header holds a time of two digits or three, rounded up
    assert 0 < stepped.engine.requests[0].timeout_s < 1.02
    await until(lambda: not stepped.engine.live)


async def test_the_earlier_one_of_the_two_limits_holds(stepped):
    call = stepped.stub.Generate(pb.GenerateRequest(prompt="x", timeout_s=0.05), timeout=100)
    status = await status_of(call)
    assert status.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert stepped.engine.requests[0].timeout_s == 0.05


async def test_calls_before_the_engine_is_there_and_after_closing_are_unavailable():
    async with serving(loaded=False) as s:
        with pytest.raises(EngineDead, match="loading"):
            await s.client.generate(asking(1))
        s.front.open(s.engine)
        await s.client.generate(asking(1))
        s.front.close("draining")
        with pytest.raises(EngineDead, match="draining"):
            await s.client.generate(asking(1))


async def test_an_engine_stream_that_just_stops_is_an_internal_error(served):
    class Cut:
        request_id = "cut"

        async def __aiter__(self):
            return
            yield

        def abort(self):
            served.engine.abort_calls.append("cut")

    async def submit(request):
        return Cut()

    served.engine.submit = submit
    with pytest.raises(JserveError, match="INTERNAL"):
        await served.client.generate(asking(1))
    assert served.engine.abort_calls == ["cut"]


async def test_a_connection_that_answers_no_pings_is_closed_with_its_calls(monkeypatch):
    monkeypatch.setattr(grpc_service, "PING_EVERY_S", 0.2)
    monkeypatch.setattr(grpc_service, "PONG_WITHIN_S", 0.2)
    async with serving() as s:
        reader, writer = await asyncio.open_connection(*s.target.split(":"))
        # HTTP/2's preface and an empty SETTINGS frame (RFC 9113, 3.4 and 6.5), then nothing.
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        async with asyncio.timeout(TIMEOUT_S):
            await reader.read()  # to its end
        writer.close()
        assert (await s.client.generate(asking(2))).text == "t0 t1 "
