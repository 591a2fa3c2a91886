"""Latency targets through the whole Scheduler, which learns step times while it serves."""

from __future__ import annotations

import numpy as np

from scheduler.config import SchedulerConfig
from scheduler.request import Request, SamplingView
from scheduler.scheduler import Scheduler
from scheduler.step_time import FittedStepTime
from tests.scheduler.synthetic_device import BUCKETS, SyntheticDevice
from tests.scheduler.test_budget import LINE, MS, config


class Serving:
    """A Scheduler on a synthetic device, step after step."""

    def __init__(self, limits: SchedulerConfig, device: SyntheticDevice) -> None:
        self.scheduler = Scheduler(limits, FittedStepTime(BUCKETS))
        self.device = device
        self.now = 0.0
        self.gaps_s: list[float] = []  # one per token of a decode row
        self.gaps_at: list[float] = []
        self.ttft_s: dict[str, float] = {}

    def run(self, requests: list[Request]) -> None:
        waiting = sorted(requests, key=lambda r: r.arrival_time)[::-1]
        while waiting or self.scheduler.has_unfinished:
            while waiting and waiting[-1].arrival_time <= self.now:
                self.scheduler.add(waiting.pop())
            plan = self.scheduler.schedule(self.now)
            if not plan.requests:
                self.now = waiting[-1].arrival_time
                continue
            seconds = self.device.run(plan.shape)
            self.now += seconds
            self.gaps_s += [seconds] * plan.num_decodes
            self.gaps_at += [self.now] * plan.num_decodes
            for row in range(plan.num_decodes, len(plan.requests)):
                if plan.samples[row]:
                    request = plan.requests[row]
                    self.ttft_s.setdefault(request.request_id, self.now - request.arrival_time)
            self.scheduler.on_step_time(plan, seconds)
            self.scheduler.update(plan, None)

    def p95_gap_s(self, after: float) -> float:
        gaps = [g for g, at in zip(self.gaps_s, self.gaps_at, strict=True) if at > after]
        return float(np.quantile(gaps, 0.95))


def request(n: int, num_prompt: int, num_output: int, at: float = 0.0) -> Request:
    prompt = np.arange(num_prompt, dtype=np.int32) + 10_000 * n
    return Request(f"r{n}", prompt, SamplingView(num_output), arrival_time=at)


def mixed_load(num: int, rate: float, seed: int = 3) -> list[Request]:
    """Chats of 60 tokens, and one long prompt of 1,500 in every five."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, num))
    return [
        request(n, 1500 if n % 5 == 4 else 60, 100, at) for n, at in enumerate(arrivals.tolist())
    ]


def test_under_a_mixed_load_the_target_holds_and_no_prompt_starves():
    p95, slowest = {}, {}
    for slo_ms in (0, 15):
        serving = Serving(config(itl_slo_s=slo_ms * MS), SyntheticDevice(noise=0.05))
        serving.run(mixed_load(500, rate=50))
        assert len(serving.ttft_s) == 500
        p95[slo_ms] = serving.p95_gap_s(after=4.0) / MS
        slowest[slo_ms] = max(serving.ttft_s.values())
    assert p95[15] <= 15 < p95[0]
    assert slowest[15] < 0.5, "without the target it is less than 0.1 s"
    assert slowest[0] < 0.1


def test_a_burst_on_an_idle_engine_starts_no_more_than_the_target_allows():
    serving = Serving(config(itl_slo_s=5 * MS), SyntheticDevice())
    scheduler = serving.scheduler = Scheduler(config(itl_slo_s=5 * MS), LINE)
    serving.run([request(n, 20, 30) for n in range(5)])
    for n in range(60):
        scheduler.add(request(100 + n, 10, 30))
    plan = scheduler.schedule(serving.now)
    assert len(plan.requests) == len(scheduler.running) == 40


def test_an_impossible_target_starves_none_and_one_for_first_tokens_bounds_the_wait():
    """The floor alone computes fewer prompt tokens than come."""
    slowest = {}
    for ttft_slo_s in (0.0, 0.3):
        limits = config(itl_slo_s=1 * MS, ttft_slo_s=ttft_slo_s)
        serving = Serving(limits, SyntheticDevice())
        serving.run(mixed_load(400, rate=20))
        assert len(serving.ttft_s) == 400
        slowest[ttft_slo_s] = max(serving.ttft_s.values())
    assert slowest[0.3] < 0.7 * slowest[0.0]
