"""VllmEngine over a real channel: how a router finds, feeds and watches an engine."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile

import grpc
import pytest
import tokenizers
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from jserve.messages import GenerateRequest
from jserve.server.caller import Caller
from jserve.server.vllm_info import LoadMeter
from tests.e2e.real_engine import (
    PAGE,
    arranged,
    generate,
    greedy,
    prompt_of,
    serving_real,
    tokens_of,
)
from tests.server.conftest import TIMEOUT_S, Served, serving, until
from tests.server.fake_engine import FakeEngine
from tests.server.test_grpc_service import status_of


def tiny():
    """All engines here are of one model, which is compiled once."""
    return arranged("sixteen")


def stub_of(served: Served) -> vllm_engine_pb2_grpc.VllmEngineStub:
    return vllm_engine_pb2_grpc.VllmEngineStub(served.channel)


def asking(prompt=(1, 2), *, stream=True, request_id="", **sampling) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(**{"temperature": 0} | sampling),
        stream=stream,
    )


async def answers_to(served: Served, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [m async for m in stub_of(served).Generate(message, timeout=TIMEOUT_S)]


async def test_a_stream_is_chunks_and_then_complete_with_all_tokens():
    async with serving_real(tiny()) as s:
        prompt = prompt_of(20)
        *chunks, last = await answers_to(s, asking(prompt, max_tokens=8))
    assert {m.WhichOneof("response") for m in chunks} == {"chunk"}
    tokens = [token for m in chunks for token in m.chunk.token_ids]
    assert tokens == list(last.complete.output_ids) == tokens_of(generate(tiny(), [prompt]))[0]
    assert sum(m.chunk.completion_tokens for m in chunks) == last.complete.completion_tokens == 8
    assert {m.chunk.prompt_tokens for m in chunks} == {last.complete.prompt_tokens} == {20}
    assert last.complete.finish_reason == "length"


async def test_without_stream_each_choice_is_one_message_in_order(served):
    answers = await answers_to(served, asking(stream=False, n=3, max_tokens=2))
    whole = [(m.complete.index, list(m.complete.output_ids)) for m in answers]
    assert whole == [(0, [0, 1]), (1, [100, 101]), (2, [200, 201])]
    assert {m.complete.finish_reason for m in answers} == {"length"}


async def test_choices_of_a_stream_end_one_by_one(served):
    answers = await answers_to(served, asking(n=2, max_tokens=3, stop_token_ids=[101]))
    ends = {m.complete.index: m.complete for m in answers if m.HasField("complete")}
    assert list(ends[0].output_ids) == [0, 1, 2]
    assert (list(ends[1].output_ids), ends[1].matched_token_id) == ([100, 101], 101)
    for index, end in ends.items():
        chunks = [m.chunk for m in answers if m.HasField("chunk") and m.chunk.index == index]
        assert [t for c in chunks for t in c.token_ids] == list(end.output_ids)


async def test_cached_tokens_and_log_probabilities_reach_the_router():
    async with serving_real(tiny()) as s:
        prompt = prompt_of(3 * PAGE)
        await answers_to(s, asking(prompt, max_tokens=1))
        asked = asking(prompt, stream=False, max_tokens=2, logprobs=2)
        (answer,) = await answers_to(s, asked)
        (scored,) = await answers_to(
            s, asking(prompt, stream=False, max_tokens=1, prompt_logprobs=1)
        )
    assert answer.complete.cached_tokens == 2 * PAGE
    assert [len(top.values) for top in answer.complete.output_logprobs.top_logprobs] == [2, 2]
    assert len(scored.complete.input_logprobs.token_logprobs) == 3 * PAGE


async def test_an_embedding_is_that_of_the_last_token():
    engine, prompt = tiny(), prompt_of(20)
    async with serving_real(engine) as s:
        asked = pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=prompt))
        got = await stub_of(s).Embed(asked, timeout=TIMEOUT_S)
        own = GenerateRequest(prompt_token_ids=prompt, pooling="last")
        (update,) = [u async for u in await s.engine.submit(own)]
        empty = await status_of(stub_of(s).Embed(pb.EmbedRequest(), timeout=TIMEOUT_S))
    assert list(got.embedding) == pytest.approx(list(update.embedding), abs=1e-6)
    assert (got.embedding_dim, got.prompt_tokens) == (engine.processor.limits.hidden_size, 20)
    assert empty.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_abort_ends_the_stream_with_that_reason_and_frees_the_engine(stepped):
    reading = asyncio.create_task(answers_to(stepped, asking(request_id="mine", n=2, max_tokens=9)))
    await until(lambda: stepped.engine.live)
    stepped.engine.step()
    await stub_of(stepped).Abort(pb.AbortRequest(request_ids=["other", "mine"]), timeout=TIMEOUT_S)
    ends = [m.complete for m in await reading if m.HasField("complete")]
    assert [(c.index, c.finish_reason) for c in ends] == [(0, "abort"), (1, "abort")]
    assert not stepped.engine.live


class ByKey:
    """Every key is a caller of that name."""

    def admit(self, key: str | None, certificate: str) -> Caller:
        return Caller(name=key or "")


async def test_abort_reaches_only_the_callers_own_requests():
    async with serving(FakeEngine(interval_s=None), gate=ByKey()) as s:
        ours, others = ([("x-api-key", name)] for name in ("ours", "others"))
        call = stub_of(s).Generate(asking(request_id="mine"), metadata=ours)
        await until(lambda: s.engine.live)
        abort, asked = stub_of(s).Abort, pb.AbortRequest(request_ids=["mine"])
        await abort(asked, metadata=others, timeout=TIMEOUT_S)
        assert s.engine.live
        await abort(asked, metadata=ours, timeout=TIMEOUT_S)
        assert not s.engine.live
        assert (await call.read()).complete.finish_reason == "abort"


async def test_abort_of_a_running_request_on_the_real_engine():
    async with serving_real(tiny()) as s:
        call = stub_of(s).Generate(asking(prompt_of(5), request_id="mine", max_tokens=400))
        answers = aiter(call)
        assert (await anext(answers)).HasField("chunk")
        await stub_of(s).Abort(pb.AbortRequest(request_ids=["mine"]), timeout=TIMEOUT_S)
        rest = [m async for m in answers]
        assert rest[-1].complete.finish_reason == "abort"
        await stub_of(s).Abort(pb.AbortRequest(request_ids=["mine"]), timeout=TIMEOUT_S)


async def test_o91_errors_are_statuses():
    async with serving_real(tiny()) as s:
        status = await status_of(stub_of(s).Generate(asking([999]), timeout=TIMEOUT_S).read())
        assert status.code() == grpc.StatusCode.INVALID_ARGUMENT
        call = s.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")(b"\xff\xff")
        assert (await status_of(call.read())).code() == grpc.StatusCode.INVALID_ARGUMENT
        profile = stub_of(s).StartProfile(common.StartProfileRequest())
        assert (await status_of(profile)).code() == grpc.StatusCode.UNIMPLEMENTED


async def test_while_loading_nothing_is_known_and_health_says_so():
    async with serving(loaded=False) as s:
        stub = stub_of(s)
        assert not (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        for call in (
            stub.GetModelInfo(pb.GetModelInfoRequest()),
            stub.GetLoads(pb.GetLoadsRequest()),
        ):
            assert (await status_of(call)).code() == grpc.StatusCode.UNAVAILABLE
        s.front.open(s.engine)
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy


async def test_model_and_server_are_described():
    engine = tiny()
    async with serving_real(engine) as s:
        info = await stub_of(s).GetModelInfo(pb.GetModelInfoRequest())
        server = await stub_of(s).GetServerInfo(pb.GetServerInfoRequest())
    limits = engine.processor.limits
    assert (info.served_model_name, info.model_type) == (limits.name, "llama")
    assert list(info.architectures) == ["LlamaForCausalLM"]
    assert (info.vocab_size, info.max_context_length) == (limits.vocab_size, limits.max_model_len)
    assert tuple(info.eos_token_ids) == limits.eos_token_ids
    assert info.is_generation
    assert not info.supports_vision
    assert (server.block_size, server.max_num_seqs, server.data_parallel_size) == (PAGE, 16, 1)
    assert server.uptime_seconds > 0


def test_loads_show_who_runs_and_who_waits():
    engine = tiny()
    for start in range(18):
        engine.add(GenerateRequest(prompt_token_ids=prompt_of(5, start), sampling=greedy(9)))
    for _ in range(3):  # the gauges follow a step once it is collected
        engine.step()
    (load,) = LoadMeter().read(engine).loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (16, 2, 18)
    assert (load.max_running_requests, load.utilization) == (16, 1.0)
    assert load.num_waiting_uncached_tokens == 10
    assert load.max_total_num_tokens == engine.scheduler.pool.num_usable * PAGE
    assert load.token_usage == pytest.approx(16 * PAGE / load.max_total_num_tokens)
    engine.close()


async def test_the_tokenizer_of_the_archive_is_the_engines():
    async with serving_real(tiny()) as s:
        chunks = [c async for c in stub_of(s).GetTokenizer(common.GetTokenizerRequest())]
        own = s.engine.processor.tokenizer
    data = b"".join(chunk.data for chunk in chunks)
    assert [c.sha256 for c in chunks[:-1]] == [""] * (len(chunks) - 1)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    other = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    text = "ABC one two <eos a> é"
    assert other.encode(text, add_special_tokens=False).ids == own.encode(text)
    assert json.loads(files["config.json"])["model_type"] == "llama"
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == own.eos_token


async def test_calls_about_the_cache_are_closed_without_their_flag(served):
    stub = stub_of(served)
    events = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest()).read()
    for call in (events, stub.FlushCache(common.FlushCacheRequest())):
        status = await status_of(call)
        assert status.code() == grpc.StatusCode.UNIMPLEMENTED
        assert "--enable_cache_service" in status.details()
    assert served.engine.num_resets == 0


async def test_events_of_the_cache_begin_with_all_there_is_above_the_number_known():
    async with serving_real(tiny(), enable_cache_service=True) as s:
        prompt = prompt_of(2 * PAGE + 1)
        await answers_to(s, asking(prompt, max_tokens=1))
        call = stub_of(s).SubscribeKvEvents(
            common.SubscribeKvEventsRequest(start_sequence_number=7)
        )
        first = await call.read()
        assert first.sequence_number == 8
        assert [event.WhichOneof("data") for event in first.events] == ["cleared", "stored"]
        stored = first.events[1].stored
        assert not stored.HasField("parent_block_hash")
        assert [list(b.token_ids) for b in stored.blocks] == [
            prompt[:PAGE],
            prompt[PAGE : 2 * PAGE],
        ]
        assert (await stub_of(s).FlushCache(common.FlushCacheRequest())).success
        second = await call.read()
        assert (second.sequence_number, second.events[0].WhichOneof("data")) == (9, "cleared")
        call.cancel()


async def test_a_flush_waits_for_requests_as_long_as_it_may():
    async with serving(FakeEngine(interval_s=None), enable_cache_service=True) as s:
        call = stub_of(s).Generate(asking(request_id="mine"))
        await until(lambda: s.engine.live)
        flush = stub_of(s).FlushCache
        assert not (await flush(common.FlushCacheRequest(), timeout=TIMEOUT_S)).success
        waiting = flush(common.FlushCacheRequest(timeout_s=TIMEOUT_S), timeout=TIMEOUT_S)
        await until(lambda: s.engine.num_resets > 2)
        call.cancel()
        assert (await waiting).success
        for seconds in (-1.0, float("nan"), 1e9):
            status = await status_of(flush(common.FlushCacheRequest(timeout_s=seconds)))
            assert status.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_page_names_the_page_before_it():
    async with serving_real(tiny(), enable_cache_service=True) as s:
        call = stub_of(s).SubscribeKvEvents(common.SubscribeKvEventsRequest())
        assert (await call.read()).events[0].HasField("cleared")
        prompt = prompt_of(PAGE)
        (one,) = await answers_to(s, asking(prompt, stream=False, max_tokens=PAGE + 1))
        names, stored = {}, []
        while len(stored) < 2:
            batch = await call.read()
            for event in batch.events:
                for block in event.stored.blocks:
                    names[tuple(block.token_ids)] = block.block_hash
                    stored.append(event.stored)
        assert stored[1].parent_block_hash == names[tuple(prompt)]
        assert tuple(one.complete.output_ids[:PAGE]) in names
        call.cancel()


async def test_a_router_that_leaves_frees_the_engine():
    async with serving(FakeEngine(interval_s=None)) as s:
        call = stub_of(s).Generate(asking(max_tokens=9))
        await until(lambda: s.engine.live)
        call.cancel()
        await until(lambda: not s.engine.live)
