"""Random traffic through scheduler, packer and fake runner: every token right, nothing leaked."""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scheduler.bucket import make_buckets
from scheduler.config import SchedulerConfig
from scheduler.packer import Packer
from scheduler.request import FinishReason, Request, RequestStatus, SamplingView
from scheduler.scheduler import Scheduler
from tests.fakes import FakeRunner, expected_output


class Traffic(RuleBasedStateMachine):
    """One engine loop with up to one step in flight, driven by hypothesis."""

    @initialize(
        num_pages=st.integers(10, 22),
        slots=st.integers(2, 6),
        chunk=st.integers(1, 20),
        budget_extra=st.integers(0, 24),
        overlap=st.booleans(),
        cache=st.booleans(),
    )
    def start(self, num_pages, slots, chunk, budget_extra, overlap, cache):
        self.config = SchedulerConfig(
            max_num_seqs=slots,
            max_num_batched_tokens=slots + budget_extra,
            prefill_chunk=chunk,
            page_size=4,
            num_pages=num_pages,
            max_model_len=64,
            enable_prefix_cache=cache,
        )
        self.scheduler = Scheduler(self.config)
        buckets = make_buckets(slots, slots + budget_extra)
        self.packer = Packer(self.config, buckets)
        self.runner = FakeRunner(self.config)
        self.depth = 1 if overlap else 0
        self.in_flight: deque = deque()
        self.live: list[Request] = []
        self.seen: dict[Request, list[int]] = {}
        self.count = 0

    @rule(
        length=st.integers(1, 24),
        max_tokens=st.integers(1, 30),
        family=st.integers(0, 2),
        priority=st.integers(0, 1),
        stop=st.booleans(),
    )
    def add(self, length, max_tokens, family, priority, stop):
        # Prompts of one family share their beginning, so the prefix cache is hit.
        prompt = [(family * 31 + i * i) % 89 for i in range(length)]
        if self.scheduler.why_too_large(length + max_tokens):
            return
        self.count += 1
        request = Request(
            request_id=f"r{self.count}",
            prompt_token_ids=prompt,
            sampling=SamplingView(
                max_tokens=max_tokens, stop_token_ids=frozenset({5, 6} if stop else ())
            ),
            priority=priority,
            arrival_time=float(self.count),
        )
        self.scheduler.add(request)
        self.live.append(request)
        self.seen[request] = []

    @rule(count=st.integers(1, 12))
    def run(self, count):
        for _ in range(count):
            self.step()
            self.scheduler.check_integrity()

    def step(self):
        plan = self.scheduler.schedule(now=0.0)
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(plan.rows) <= self.config.max_num_seqs
        lengths = plan.counts.tolist()
        assert lengths == sorted(lengths, key=lambda n: n > 1), "decode rows come first"
        if plan.requests:
            self.in_flight.append((plan, self.runner.run(self.packer.pack(plan))))
        if len(self.in_flight) > self.depth or not plan.requests:
            self.collect()

    @rule(index=st.integers(0, 50))
    def abort(self, index):
        if self.live:
            request = self.live.pop(index % len(self.live))
            self.scheduler.finish(request, FinishReason.ABORT)

    def collect(self):
        if not self.in_flight:
            return
        plan, tokens = self.in_flight.popleft()
        for request, token, _ in self.scheduler.update(plan, tokens.tolist()):
            self.seen[request].append(token)
            if request.is_finished:
                self.live.remove(request)
                self.check_output(request)

    def check_output(self, request):
        stop = request.sampling.stop_token_ids
        want = expected_output(request.prompt_token_ids, request.sampling.max_tokens, stop)
        assert self.seen[request] == want, f"{request.request_id} got other tokens"
        assert request.output_token_ids == want
        stopped = want[-1] in stop
        assert request.finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert request.num_cached_tokens < request.num_prompt_tokens

    @invariant()
    def nothing_leaks(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if not (self.scheduler.has_unfinished or self.in_flight):
                break
            self.step()
        assert not self.live, f"never finished: {[r.request_id for r in self.live]}"
        self.scheduler.check_integrity()
        assert self.scheduler.cache.num_available == self.scheduler.pool.num_usable
        assert self.scheduler.cache.reset()
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_usable
        assert all(r.status == RequestStatus.FINISHED for r in self.seen)


Traffic.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestTraffic = Traffic.TestCase
