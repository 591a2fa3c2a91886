"""The simulator: the worked examples with their stated step costs, and its short cuts against the
plain loop."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict

import numpy as np
import pytest

from scheduler.config import RequestClass, SchedulerConfig
from scheduler.request import Request, SamplingView
from scheduler.scheduler import Scheduler
from scheduler.simulator import SimTotals, Simulation, simulate
from scheduler.step_shape import StepShape

MS = 1e-3
OUTPUTS = (20, 30, 40, 60, 100, 150, 400, 900)


class Cost:
    """A step costs a constant and so much per prompt token."""

    def __init__(self, step_s: float, prompt_token_s: float = 0.0, context_s: float = 0.0) -> None:
        self.step_s, self.prompt_token_s, self.context_s = step_s, prompt_token_s, context_s

    def predict(self, shape: StepShape) -> float:
        context_s = self.context_s * shape.context_tokens
        return self.step_s + self.prompt_token_s * shape.prefill_tokens + context_s

    def predict_decodes(self, num_rows: int, context_tokens: np.ndarray) -> np.ndarray:
        return self.step_s + self.context_s * np.asarray(context_tokens, float)


class Record:
    """Keeps all it hears, step by step."""

    def __init__(self) -> None:
        self.steps: list[tuple] = []  # start, duration, decode rows, prefill tokens, waiting
        self.gaps: dict[int, int] = defaultdict(int)  # microseconds -> how many
        self.ttft_s: dict[str, float] = {}
        self.finish_s: dict[str, float] = {}
        self.finished: dict[str, Request] = {}
        self.causes: list[str] = []

    def on_steps(self, start, durations, decodes, tokens, chunks, context, used, cached, wait, run):
        starts = start + np.concatenate([[0.0], np.cumsum(durations)[:-1]])
        for begin, duration in zip(starts, durations, strict=True):
            self.steps.append((float(begin), float(duration), decodes, tokens, wait, run))

    def on_gaps(self, gaps, count):
        for gap in gaps:
            self.gaps[round(gap * 1e6)] += count

    def on_first_token(self, request, ttft_s):
        assert request.request_id not in self.ttft_s, "a second first token"
        self.ttft_s[request.request_id] = ttft_s

    def on_preemption(self, request, cause):
        self.causes.append(cause)

    def on_finish(self, request, finish_s, ttft_s, last_token_s):
        assert request.request_id not in self.finish_s, "a second end"
        self.finish_s[request.request_id] = finish_s
        self.finished[request.request_id] = request


def config(**changes) -> SchedulerConfig:
    limits = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 4096,
        "prefill_chunk": 4096,
        "page_size": 16,
        "num_pages": 1 + 4096,
        "max_model_len": 8192,
        "enable_prefix_cache": False,
    }
    return SchedulerConfig(**(limits | changes))


def asking(name: str, num_prompt: int, num_output: int, at: float = 0.0, **fields) -> Request:
    prompt = np.arange(num_prompt, dtype=np.int32) + 1000 * sum(map(ord, name))
    return Request(name, prompt, SamplingView(num_output), arrival_time=at, **fields)


def run(limits: SchedulerConfig, cost: Cost, requests, **options) -> tuple[Record, SimTotals]:
    record = Record()
    return record, simulate(limits, cost, requests, record, **options)


def test_example_a_a_static_batch_wastes_three_quarters_of_its_slots():
    group = [asking(f"r{n}", 1, n) for n in OUTPUTS]
    record, totals = run(config(batching="static"), Cost(MS), group, overlap=False)
    assert totals.num_steps == 900
    assert totals.num_steps * 8 == 7200
    assert sum(OUTPUTS) / 7200 == pytest.approx(0.236, abs=5e-4)
    assert record.finish_s["r900"] == pytest.approx(0.9)


def test_example_a_continuous_batching_with_a_queue_keeps_its_slots_busy():
    requests = [asking(f"{turn}:{n}", 1, n) for turn, n in itertools.product(range(40), OUTPUTS)]
    record, _ = run(config(), Cost(MS), requests, overlap=False)
    assert record.finish_s["0:20"] == pytest.approx(20 * MS), "it returns after its 20 iterations"
    busy = [step for step in record.steps if step[4] > 0]  # others wait behind it
    assert sum(step[2] + step[3] for step in busy) / (8 * len(busy)) > 0.95


def test_example_b_newcomers_enter_right_after_the_short_ones():
    lengths = {"A": 4, "B": 4, "C": 40, "D": 40, "E": 4, "F": 4}
    requests = [asking(name, 1, n) for name, n in lengths.items()]
    record, _ = run(config(max_num_seqs=4), Cost(MS), requests, overlap=False)
    assert record.finish_s["A"] == record.finish_s["B"] == pytest.approx(4 * MS)
    for name in "EF":
        assert record.finished[name].first_scheduled_time == pytest.approx(4 * MS)
        assert record.finish_s[name] == pytest.approx(8 * MS)


@pytest.mark.parametrize(("chunk", "gap_ms", "prefill_ms"), [(2048, 88, 88), (256, 18, 144)])
def test_example_c_chunks_shorten_the_gaps_that_streams_see(chunk, gap_ms, prefill_ms):
    streams = [asking(f"s{i}", 1, 400) for i in range(4)]
    long = asking("long", 2048, 1, at=0.2)
    cost = Cost(8 * MS, prompt_token_s=80 * MS / 2048)
    record, _ = run(config(prefill_chunk=chunk), cost, [*streams, long], overlap=False)
    assert max(record.gaps) == gap_ms * 1000
    assert record.gaps[gap_ms * 1000] == 4 * (2048 // chunk)
    waited = record.finished["long"].first_scheduled_time - 0.2
    assert record.ttft_s["long"] - waited == pytest.approx(prefill_ms * MS)


def test_example_d_a_budget_of_256_with_four_decode_rows_leaves_252():
    streams = [asking(f"s{i}", 1, 400) for i in range(4)]
    long = asking("long", 2048, 1, at=0.2)
    record, _ = run(config(max_num_batched_tokens=256), Cost(MS), [*streams, long])
    mixed = [step for step in record.steps if step[2] and step[3]]
    assert mixed[0][2:4] == (4, 252)


@pytest.mark.parametrize("cache", [False, True])
def test_example_e_a_shared_beginning_is_computed_once(cache):
    """System 1,800 + tools 1,200 are shared; documents 3,000 and a question of 100 are not."""
    shared = np.arange(3000, dtype=np.int32)

    def prompt(number: int) -> np.ndarray:
        own = np.arange(3100, dtype=np.int32) + 10_000 * number
        return np.concatenate([shared, own])

    requests = [Request(f"r{i}", prompt(i), SamplingView(1), arrival_time=float(i)) for i in (1, 2)]
    cost = Cost(0.0, prompt_token_s=1e-5)
    record, _ = run(config(enable_prefix_cache=cache), cost, requests)
    computed = sum(step[3] for step in record.steps if step[0] >= 2)
    assert computed <= (3100 + 16 if cache else 6100)
    assert computed >= (3100 if cache else 6100)
    assert record.ttft_s["r2"] == pytest.approx(computed * 1e-5)


# ---- short cuts -------------------------------------------------------------------------------


class Plain(Simulation):
    """Every step on its own."""

    def _take_quiet_steps(self) -> bool:
        return False


def traffic(seed: int, rate: float, **fields) -> list[Request]:
    draw, at, requests = random.Random(seed), 0.0, []
    for i in range(150):
        at += draw.expovariate(rate)
        family = draw.randrange(4)
        prompt = np.arange(draw.randint(1, 200), dtype=np.int32) + 1000 * family
        requests.append(
            Request(
                f"r{i}",
                prompt,
                SamplingView(draw.randint(1, 120)),
                arrival_time=at,
                tenant=f"t{family}",
                request_class=draw.choice(["interactive", "batch"]),
                **{name: draw.choice(values) for name, values in fields.items()},
            )
        )
    return requests


def both_ways(policy: str, overlap: bool, num_pages: int, rate: float) -> tuple[Record, Record]:
    limits = config(
        policy=policy,
        num_pages=num_pages,
        max_num_batched_tokens=64,
        prefill_chunk=32,
        max_model_len=400,
        enable_prefix_cache=True,
        classes=(RequestClass(name="batch", priority=5, max_num_seqs=3),),
    )
    cost = Cost(5 * MS, prompt_token_s=1e-4, context_s=1e-6)
    records = Record(), Record()
    for kind, record in zip((Plain, Simulation), records, strict=True):
        scheduler = Scheduler(limits, cost)
        totals = kind(scheduler, cost, iter(traffic(7, rate)), record, overlap, 0).run()
        scheduler.check_integrity()
        assert totals.num_finished == 150
    return records


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "fair", "priority"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("num_pages", "rate"), [(400, 20.0), (400, 400.0), (60, 100.0)])
def test_taking_many_steps_in_one_go_changes_no_time(policy, overlap, num_pages, rate):
    plain, short = both_ways(policy, overlap, num_pages, rate)
    tokens = [sum(r.gaps.values()) + len(r.ttft_s) for r in (plain, short)]
    assert tokens[0] == tokens[1]
    if num_pages == 60 and policy in ("sjf", "fair"):  # their order changes while pages are short
        for of in (lambda r: r.finish_s, lambda r: r.ttft_s):
            means = [np.mean(list(of(record).values())) for record in (plain, short)]
            assert means[0] == pytest.approx(means[1], rel=0.1)
        return
    np.testing.assert_allclose(np.array(plain.steps), np.array(short.steps), atol=1e-9)
    assert plain.finish_s == pytest.approx(short.finish_s)
    assert plain.ttft_s == pytest.approx(short.ttft_s)
    for us in (*plain.gaps, *short.gaps):  # rounding may move a gap by a microsecond
        near = lambda gaps, us=us: sum(gaps.get(us + d, 0) for d in (-1, 0, 1))  # noqa: E731
        assert near(plain.gaps) > 0
        assert near(short.gaps) > 0
    assert plain.causes == short.causes


def test_every_output_token_is_a_first_one_or_has_a_gap():
    requests = traffic(3, 200.0)
    want = sum(r.sampling.max_tokens for r in requests)
    limits = config(num_pages=60, max_model_len=400, max_num_batched_tokens=64, prefill_chunk=32)
    record, totals = run(limits, Cost(MS), requests)
    assert record.causes, "the pool is tight enough to preempt"
    assert sum(record.gaps.values()) + len(record.ttft_s) == want
    assert totals.num_finished == 150


def test_a_closed_loop_keeps_its_number_of_requests_in_the_system():
    requests = traffic(3, 1.0)
    record, _ = run(config(num_pages=400, max_model_len=400), Cost(MS), requests, closed_loop=4)
    assert max(step[5] for step in record.steps) == 4
    assert len(record.finish_s) == 150


def test_what_can_never_run_or_finds_the_queue_full_is_refused():
    huge = asking("huge", 5000, 10)
    requests = [huge, *[asking(f"r{i}", 10, 100) for i in range(30)]]
    limits = config(num_pages=100, max_queued_requests=4)
    record, totals = run(limits, Cost(MS), requests)
    assert totals.num_refused + totals.num_finished == 31
    assert "huge" not in record.finish_s
    assert totals.num_refused > 1


def test_a_deadline_in_the_queue_ends_a_request_at_its_time():
    limits = config(max_num_seqs=1)
    late = asking("late", 10, 10, queue_deadline=0.05)
    record, _ = run(limits, Cost(MS), [asking("first", 10, 500), late])
    assert record.finish_s["late"] == pytest.approx(0.05, abs=2 * MS)
    assert "late" not in record.ttft_s
