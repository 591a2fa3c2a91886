"""The benchmark against real servers on loopback ports, and its arithmetic on known numbers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from absl import flags
from aiohttp import web

from jserve.bench import main as bench
from jserve.bench import workload
from jserve.bench.backends import JserveBackend, OpenAIBackend, StreamEvent
from jserve.bench.load import RequestResult, closed_loop, open_loop, token_gaps
from jserve.bench.report import parse_goodput, summarize, table
from jserve.bench.workload import Lengths, RequestDefaults
from jserve.errors import ConfigError, EngineDead, InvalidRequest, JserveError
from jserve.messages import GenerateRequest, Usage
from jserve.sampling_params import SamplingParams
from tests.server.conftest import serving

WORK16 = Path(__file__).parent / "data" / "workloads" / "work16.json"
DEFAULTS = RequestDefaults()


def a_request(max_tokens=4, **fields):
    fields = fields or {"prompt": "hello"}
    return GenerateRequest(**fields, sampling=SamplingParams(max_tokens=max_tokens, temperature=0))


# ---- workloads and arrivals ----


def test_work16_has_the_prompts_and_lengths_it_is_known_for():
    requests = workload.load("workload", str(WORK16), DEFAULTS)
    assert len(requests) == 16
    assert sum(len(r.prompt_token_ids) for r in requests) == 2080
    assert sum(r.sampling.max_tokens for r in requests) == 1076
    assert all(r.sampling.ignore_eos and r.sampling.temperature == 0 for r in requests)


def test_a_jsonl_entry_overrides_the_defaults_and_output_len_overrides_its_length(tmp_path):
    path = tmp_path / "w.jsonl"
    entry = {"prompt": "a", "max_tokens": 3, "temperature": 0.5, "ignore_eos": False}
    path.write_text(json.dumps(entry) + "\n\n" + json.dumps({"messages": [], "max_tokens": 2}))
    first, second = workload.load("jsonl", str(path), DEFAULTS)
    assert (first.sampling.temperature, first.sampling.ignore_eos) == (0.5, False)
    assert (second.sampling.temperature, second.sampling.ignore_eos) == (0, True)
    fixed = workload.load("jsonl", str(path), DEFAULTS, output_len=Lengths("9"))
    assert [r.sampling.max_tokens for r in fixed] == [9, 9]


def test_sharegpt_asks_the_first_human_turn_for_an_answer_of_its_length(tmp_path):
    talk = [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "x" * 40}]
    path = tmp_path / "s.json"
    path.write_text(json.dumps([{"conversations": talk[1:]}, {"conversations": talk}, {}]))
    (request,) = workload.load("sharegpt", str(path), DEFAULTS)
    assert (request.prompt, request.sampling.max_tokens) == ("why?", 10)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("jsonl", "{"),
        ("jsonl", "7"),
        ("jsonl", '{"prompt": "a"}'),
        ("jsonl", '{"prompt": "a", "max_tokens": 0}'),
        ("jsonl", '{"prompt": "a", "max_tokens": 1, "best_of": 2}'),
        ("jsonl", ""),
        ("workload", "{}"),
        ("sharegpt", '{"a": 1}'),
        ("sharegpt", '[{"conversations": []}]'),
    ],
)
def test_a_bad_workload_file_is_a_config_error_naming_it(tmp_path, kind, text):
    path = tmp_path / "bad"
    path.write_text(text)
    with pytest.raises(ConfigError, match="bad"):
        workload.load(kind, str(path), DEFAULTS)


def test_synthetic_requests_follow_their_lengths_and_seed():
    def draw(seed):
        return workload.synthetic(
            200,
            Lengths("10:12,100"),
            Lengths("5"),
            vocab_size=1000,
            defaults=DEFAULTS,
            seed=seed,
        )

    requests = draw(1)
    assert requests == draw(1)
    assert requests != draw(2)
    assert {len(r.prompt_token_ids) for r in requests} == {10, 11, 12, 100}
    ids = {i for r in requests for i in r.prompt_token_ids}
    assert min(ids) >= workload.LOWEST_RANDOM_ID
    assert max(ids) < 1000
    num_long = sum(len(r.prompt_token_ids) == 100 for r in requests)
    assert 70 < num_long < 130


@pytest.mark.parametrize("text", ["", "0", "5:3", "a", "1:2:3", "-1"])
def test_lengths_that_make_no_sense_are_refused(text):
    with pytest.raises(ConfigError, match="length"):
        Lengths(text)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (100.0, 0.1)])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(burstiness, variation):
    times = np.array(workload.arrival_times(20_000, 5.0, burstiness, seed=0))
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)
    assert workload.arrival_times(3, float("inf"), 1.0, seed=0) == [0, 0, 0]


def test_a_sample_is_seeded_and_a_larger_number_repeats_the_file():
    requests = [a_request(prompt=str(i)) for i in range(10)]
    assert workload.take(requests, 0, seed=0) == requests
    assert workload.take(requests, 4, seed=0) == workload.take(requests, 4, seed=0)
    assert workload.take(requests, 12, seed=0) == requests + requests[:2]


# ---- arithmetic ----


def test_a_message_of_several_tokens_spreads_its_gap_over_them():
    assert token_gaps([(1.0, 1), (1.5, 1), (2.5, 4)]) == [0.5, 0.25, 0.25, 0.25, 0.25]
    assert token_gaps([(1.0, 3)]) == []
    assert token_gaps([(1.0, 1), (2.0, 1)], scale=2.0) == [0.5, 0.5]


def a_result(due, first, end, gaps, num_output, error=None):
    return RequestResult(
        due, due, first, end, gaps, Usage(10, num_output, 4), queue_s=0.001, error=error
    )


def test_the_report_counts_only_what_succeeded_and_goodput_only_what_met_its_targets():
    results = [
        a_result(0.0, 0.1, 1.0, [0.1] * 9, 10),
        a_result(0.0, 0.5, 2.0, [0.2] * 9, 10),
        a_result(1.0, None, 4.0, [], 0, error="HTTP 500"),
    ]
    report = summarize(results, parse_goodput("ttft_ms:600,itl_ms:150"))
    assert (report["num_ok"], report["num_failed"], report["duration_s"]) == (2, 1, 4.0)
    assert report["failures"] == {"HTTP 500": 1}
    assert report["output_tokens_per_s"] == 5.0
    assert report["total_tokens_per_s"] == 10.0
    assert report["ttft_ms"]["p50"] == pytest.approx(300)
    assert report["itl_ms"]["p50"] == pytest.approx(150)
    assert report["queue_ms"]["p99"] == pytest.approx(1)
    assert report["goodput"]["requests_per_s"] == 0.25
    assert report["goodput"]["share"] == pytest.approx(1 / 3)
    text = table(report)
    assert "goodput" in text
    assert "failed 1 times: HTTP 500" in text
    json.dumps(report)


def test_a_report_without_any_success_is_still_a_report():
    report = summarize([a_result(0.0, None, 0.0, [], 0, error="refused")])
    assert report["ttft_ms"] is None
    assert "TTFT" in table(report)


@pytest.mark.parametrize("text", ["ttft", "ttft_ms:x", "tpot_ms:5", "ttft_ms:0"])
def test_goodput_targets_that_make_no_sense_are_refused(text):
    with pytest.raises(ConfigError, match="goodput"):
        parse_goodput(text)


# ---- loops ----


class GatedBackend:
    """Holds each request until the test lets it go."""

    def __init__(self):
        self.gates: list[asyncio.Event] = []
        self.num_running = self.max_running = 0
        self.started = asyncio.Semaphore(0)

    async def stream(self, request):
        gate = asyncio.Event()
        self.gates.append(gate)
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        self.started.release()
        await gate.wait()
        self.num_running -= 1
        yield StreamEvent(1, Usage(1, 1, 0), finished=True)


async def release_one_by_one(backend, num_requests, at_once):
    for _ in range(at_once):
        await backend.started.acquire()
    for i in range(num_requests):
        assert len(backend.gates) == min(i + at_once, num_requests)
        backend.gates[i].set()
        if i + at_once < num_requests:
            await backend.started.acquire()


async def test_a_closed_loop_keeps_exactly_its_concurrency_running():
    backend, results = GatedBackend(), []
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(closed_loop(backend, [a_request()] * 10, 3, results.append))
        group.create_task(release_one_by_one(backend, 10, 3))
    assert len(results) == 10
    assert backend.max_running == 3


async def test_an_open_loop_waits_for_no_answer_unless_it_is_capped():
    backend, results = GatedBackend(), []
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(open_loop(backend, [a_request()] * 10, [0.0] * 10, None, results.append))
        group.create_task(release_one_by_one(backend, 10, 10))
    assert backend.max_running == 10
    capped, results = GatedBackend(), []
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(open_loop(capped, [a_request()] * 10, [0.0] * 10, 2, results.append))
        group.create_task(release_one_by_one(capped, 10, 2))
    assert capped.max_running == 2
    assert all(r.ttft_s >= r.first_token_s - r.sent_s for r in results)  # counts from due time


async def test_requests_are_sent_no_earlier_than_they_are_due():
    class Instant:
        async def stream(self, request):
            yield StreamEvent(1, finished=True)

    results, due = [], [0.0, 0.02, 0.05]
    await open_loop(Instant(), [a_request()] * 3, due, None, results.append)
    assert [r.due_s for r in results] == due
    assert all(r.sent_s >= r.due_s for r in results)


# ---- ours, over gRPC ----


async def test_our_server_is_driven_over_grpc_and_tells_its_queue_time():
    async with serving() as served:
        backend, results = JserveBackend(served.target), []
        requests = [a_request(5), a_request(3, prompt_token_ids=[1, 2])]
        await closed_loop(backend, requests, 2, results.append)
        await backend.close()
    by_output = sorted(results, key=lambda r: r.usage.completion_tokens)
    assert [r.usage for r in by_output] == [Usage(2, 3, 0), Usage(5, 5, 0)]
    assert [len(r.gaps_s) for r in by_output] == [2, 4]
    assert all(r.error is None and r.queue_s is not None and r.ttft_s > 0 for r in results)


async def test_a_refused_request_and_an_absent_server_are_failures_not_crashes():
    async with serving() as served:
        backend, results = JserveBackend(served.target), []
        served.engine.submit_error = InvalidRequest("no such thing")
        await closed_loop(backend, [a_request()], 1, results.append)
        target = served.target
        await backend.close()
    assert results[0].error.startswith("InvalidRequest")
    gone = JserveBackend(target)
    await closed_loop(gone, [a_request()], 1, results.append)
    await gone.close()
    assert results[1].error.startswith(EngineDead.__name__)


# ---- others, over HTTP ----


class SseServer:
    """Speaks the OpenAI streaming protocol; `style` sets how messages tell their tokens."""

    def __init__(self, style="plain"):
        self.style = style
        self.bodies: list[dict] = []
        self.headers: list = []

    async def handle(self, http_request):
        body = await http_request.json()
        self.bodies.append(body)
        self.headers.append(http_request.headers)
        if self.style == "refuse":
            return web.Response(status=429, text="too\nmany")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http_request)
        for piece in self.pieces(body, chat="chat" in http_request.path):
            await response.write(piece)
        return response

    def pieces(self, body, chat):
        total = body["max_tokens"]
        usage = lambda n: {"prompt_tokens": 7, "completion_tokens": n, "total_tokens": 7 + n}  # noqa: E731
        step = 2 if self.style in ("token_ids", "running_usage", "chunks") else 1
        yield b": a comment\n\n"
        for n in range(step, total + 1, step):
            choice = {"index": 0, "finish_reason": "length" if n == total else None}
            choice |= {"delta": {"content": "x"}} if chat else {"text": "x" * step}
            if self.style == "token_ids":
                choice["token_ids"] = [1] * step
            event = {"choices": [choice]}
            if self.style == "running_usage":
                event["usage"] = usage(n)
            if self.style == "broken":
                yield b"data: {broken\n\n"
                return
            if self.style == "error":
                event = {"error": {"message": "out of memory"}}
            data = f"data: {json.dumps(event)}\r\n\r\n".encode()
            yield data[:9]  # a network may cut anywhere
            yield data[9:]
            if self.style == "cut":
                return
        yield b"data: " + json.dumps({"choices": [], "usage": usage(total)}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    @asynccontextmanager
    async def url(self):
        app = web.Application()
        app.router.add_post("/v1/completions", self.handle)
        app.router.add_post("/v1/chat/completions", self.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        finally:
            await runner.cleanup()


async def run_openai(server, requests, **options):
    results = []
    async with server.url() as url:
        backend = OpenAIBackend(url, **options)
        await closed_loop(backend, requests, 2, results.append)
        await backend.close()
    return results


@pytest.mark.parametrize("style", ["plain", "token_ids", "running_usage", "chunks"])
async def test_an_openai_server_s_tokens_are_counted_however_it_tells_them(style):
    server = SseServer(style)
    (result,) = await run_openai(server, [a_request(6)])
    assert result.error is None
    assert result.usage == Usage(7, 6, 0)
    # two tokens a message: the first message's second token has no gap of its own
    assert len(result.gaps_s) == (5 if style == "plain" else 4)
    assert result.queue_s is None


async def test_the_request_body_is_the_openai_one_and_extensions_are_sent_only_when_asked():
    server = SseServer()
    ids, talk = [5, 6], [{"role": "user", "content": "hi"}]
    requests = [
        a_request(1, prompt="text"),
        a_request(1, prompt_token_ids=ids),
        a_request(1, messages=talk),
        GenerateRequest(prompt="e", sampling=SamplingParams(max_tokens=1, ignore_eos=True)),
    ]
    results = await run_openai(
        server, requests, model="m", api_key="secret", extra_body={"min_tokens": 1}
    )
    assert all(r.error is None for r in results)
    bodies = sorted(server.bodies, key=lambda b: str(b.get("prompt", b.get("messages"))))
    assert [b.get("prompt") for b in bodies] == [ids, None, "e", "text"]
    assert bodies[1]["messages"] == talk
    assert [b.get("ignore_eos") for b in bodies] == [None, None, True, None]
    assert all(b["stream"] and b["model"] == "m" and b["min_tokens"] == 1 for b in bodies)
    assert all(h["Authorization"] == "Bearer secret" for h in server.headers)


@pytest.mark.parametrize(
    ("style", "message"),
    [
        ("refuse", "HTTP 429: too many"),
        ("error", "out of memory"),
        ("broken", "broken JSON"),
        ("cut", "without a finish reason"),
    ],
)
async def test_each_way_an_openai_server_can_fail_is_named(style, message):
    (result,) = await run_openai(SseServer(style), [a_request(4)])
    assert message in result.error


# ---- the command ----


def parsed(*arguments):
    values = flags.FlagValues()
    bench.define_flags(values)
    values(["bench_serving", "--noprogress", *arguments])
    return values


async def test_the_command_s_flags_make_a_run_of_work16_with_everything_at_once():
    async with serving() as served:
        values = parsed(
            f"--target={served.target}", "--dataset=workload", f"--dataset_path={WORK16}"
        )
        results = await bench.run_load(values, bench.make_requests(values))
    report = summarize(results)
    assert (report["num_ok"], report["output_tokens"]) == (16, 1076)
    assert {r.due_s for r in results} == {0.0}


async def test_warm_up_requests_are_left_out_of_the_results():
    async with serving() as served:
        values = parsed(
            f"--target={served.target}",
            "--num_requests=3",
            "--output_len=2",
            "--num_warmup=2",
            "--request_rate=500",
            "--request_class=bulk",
        )
        results = await bench.run_load(values, bench.make_requests(values))
        assert [r.request_class for r in served.engine.requests] == ["bulk"] * 5
        sent = [r.prompt_token_ids for r in served.engine.requests]
    assert len(sent) == 5
    assert not set(map(tuple, sent[:2])) & set(map(tuple, sent[2:]))  # no help from a prefix cache
    assert len(results) == 3


async def test_a_server_that_is_not_there_fails_the_warm_up_with_one_line():
    values = parsed("--target=127.0.0.1:1", "--num_requests=2", "--num_warmup=1")
    with pytest.raises(JserveError, match="warm-up") as caught:
        await bench.run_load(values, bench.make_requests(values))
    assert "\n" not in str(caught.value)


async def test_the_script_prints_a_table_and_writes_json_with_its_settings(tmp_path):
    root = Path(__file__).parent.parent
    script = root / "scripts" / "bench_serving.py"
    out = tmp_path / "report.json"
    async with serving() as served:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(script), f"--target={served.target}", f"--json={out}"),
            *("--concurrency=2", "--num_requests=4", "--input_len=8", "--output_len=3"),
            *("--seed=5", "--goodput=ttft_ms:60000"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(root)},  # the project need not be installed
        )
        async with asyncio.timeout(60):
            stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()
    assert "TTFT" in stdout.decode()
    report = json.loads(out.read_text())
    assert (report["num_ok"], report["output_tokens"]) == (4, 12)
    assert report["goodput"]["share"] == 1.0
    assert report["settings"]["seed"] == 5
    assert report["settings"]["concurrency"] == 2


def test_settings_of_tls_that_a_backend_does_not_take_are_refused():
    with pytest.raises(ConfigError, match="https --base_url"):
        bench.make_backend(parsed("--backend=openai", "--tls"))
