"""Random traffic through scheduler, packer and fake runner, under every policy and setting: every
token right, nothing leaked, nobody forgotten. `scripts/test.sh --nightly` runs a million steps."""

from __future__ import annotations

import math
from collections import Counter, deque

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scheduler.bucket import make_buckets
from scheduler.config import SchedulerConfig
from scheduler.packer import Packer
from scheduler.request import BAD_TOKEN, FinishReason, Request, RequestStatus, SamplingView
from scheduler.scheduler import Scheduler
from tests.fakes import FakeRunner, expected_output
from tests.scheduler.settings import CLASSES, LIMITS, PAGE, STOP, PerToken

STEP_S = 0.01
SEEN: Counter[str] = Counter()  # what all examples together met
EXPECTED = ["finished", "hits", "preemptions", "urgent preemptions", "swapped out", "swapped in"]
EXPECTED += ["expired", "expired while running", "resets", "aborts while preempted"]
EXPECTED += ["aborts while swapped out", "starved steps", "prompts looked at"]
EXPECTED += ["failures", "failures while preempted", "extended", "extended over tokens in flight"]
EXPECTED += ["ended by extending", "not extended for want of pages", "restarts"]


class Traffic(RuleBasedStateMachine):
    """One engine loop with up to two steps in flight, driven by hypothesis."""

    @initialize(limits=LIMITS, depth=st.integers(0, 2), swap_page_s=st.sampled_from([0, 0, 2, 1e9]))
    def start(self, limits, depth, swap_page_s):
        slots = limits["max_num_seqs"]
        most = slots + limits.pop("budget_extra")
        self.config = SchedulerConfig(
            max_num_batched_tokens=most,
            page_size=PAGE,
            max_model_len=64,
            classes=CLASSES,
            batch_window_s=0.1,
            min_prefill_tokens=1,
            **limits,
        )
        self.scheduler = Scheduler(self.config, PerToken(), swap_page_s)
        self.packer = Packer(self.config, make_buckets(slots, most))
        self.runner = FakeRunner(self.config)
        self.depth = depth
        self.in_flight: deque = deque()
        self.live: list[Request] = []
        self.seen: dict[Request, list[int]] = {}
        self.fails_at: dict[Request, float] = {}  # length of output from which on logits are bad
        self.looked_at: dict[Request, set[int]] = {}  # positions whose log-probabilities are known
        self.now = 0.0
        self.num_fruitless = 0  # steps since a request got a token, came or ended

    @rule(
        copies=st.integers(1, 3),
        length=st.integers(1, 24),
        sampling=st.builds(
            SamplingView,
            st.integers(1, 30),
            st.sampled_from([STOP, frozenset()]),
            num_prompt_logprobs=st.sampled_from([-1] * 6 + [0]),
        ),
        fails_at=st.sampled_from([math.inf] * 12 + [0, 4, 20]),
        family=st.integers(0, 2),
        request_class=st.sampled_from(["", "interactive", "batch"]),
        priority=st.integers(0, 1),
        patience=st.sampled_from([None] * 6 + [0.1, 1.0]),
        time_limit=st.sampled_from([None] * 6 + [0.2, 2.0]),
    )
    def add(
        self,
        copies,
        length,
        sampling,
        fails_at,
        family,
        request_class,
        priority,
        patience,
        time_limit,
    ):
        # Prompts of one family share their beginning, so the prefix cache is hit.
        prompt = [(family * 31 + i * i) % 89 for i in range(length)]
        if self.scheduler.why_too_large(length + sampling.max_tokens):
            return
        for _ in range(copies):
            request = Request(
                f"r{len(self.seen)}",
                prompt,
                sampling,
                priority=priority + 3 * (request_class == "batch"),
                request_class=request_class,
                tenant=f"t{family}",
                arrival_time=self.now,
                queue_deadline=None if patience is None else self.now + patience,
                deadline=None if time_limit is None else self.now + time_limit,
                cache_keys=(("tenant", f"t{family % 2}"),),
            )
            self.scheduler.add(request)
            self.live.append(request)
            self.seen[request] = []
            self.fails_at[request] = fails_at
            if sampling.num_prompt_logprobs >= 0:
                self.looked_at[request] = set()
        self.num_fruitless = 0

    @rule(
        count=st.integers(1, 12),
        num_certain=st.sampled_from([0, 0, 0, 0, 1, 8]),
        are_hasty=st.sampled_from([False] * 3 + [True]),
    )
    def run(self, count, num_certain, are_hasty):
        for _ in range(count):
            preempted = [r for r in self.live if r.status == RequestStatus.PREEMPTED]
            for request in preempted if are_hasty else ():
                self.leave(request)
            at_work = self.scheduler.composer.prefilling
            decoding = [r for r in self.scheduler.running if r not in at_work]
            if num_certain and decoding:
                self.extend(decoding[count % len(decoding)], num_certain)
            self.step()

    def extend(self, request, count):
        """The next tokens are certain; there may be more than the request has room for."""
        slots, seen = self.scheduler.slots, self.seen[request]
        ids = expected_output(request.prompt_token_ids, len(seen) + count)[len(seen) :]
        num_void = int(slots.num_tokens[request.slot]) - request.num_known_tokens
        most = slots.num_pages[request.slot] + self.scheduler.cache.num_available
        num = self.scheduler.extend(request, ids)
        if num:
            seen += ids[:num]
            self.fails_at[request] = max(self.fails_at[request], len(seen))
            self.num_fruitless = 0
            SEEN["extended over tokens in flight"] += num_void > 0
            SEEN["extended"] += 1
        else:
            assert request.num_known_tokens + count > most * PAGE, "there are enough pages"
            SEEN["not extended for want of pages"] += 1
        if request.is_finished:
            self.live.remove(request)
            self.check_output(request)
            SEEN["ended by extending"] += 1

    @rule(index=st.integers(0, 50))
    def abort(self, index):
        if self.live:
            self.leave(self.live[index % len(self.live)])

    def leave(self, request):
        self.live.remove(request)
        SEEN["aborts while swapped out"] += request.host_pages is not None
        SEEN["aborts while preempted"] += request.status == RequestStatus.PREEMPTED
        self.scheduler.finish(request, FinishReason.ABORT)
        self.num_fruitless = 0

    @rule(luck=st.integers(0, 9))
    def reset(self, luck):
        if luck == 6:
            self.lose_the_device()
        if luck != 7:  # else there would be little to find
            return
        cache = self.scheduler.cache
        in_use = cache.num_evictable < cache.num_cached
        assert cache.reset() != in_use
        SEEN["resets"] += not in_use

    def lose_the_device(self):
        in_flight = [request for plan, _ in self.in_flight for request in plan.requests]
        assert set(self.scheduler.restart()) == set(in_flight)
        self.scheduler.check_integrity()
        assert not self.scheduler.running
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_usable
        self.runner.forget()
        self.in_flight.clear()
        self.num_fruitless = 0
        SEEN["restarts"] += bool(in_flight)

    def step(self):
        self.now += STEP_S
        SEEN["steps"] += 1
        for request in self.scheduler.expire(self.now):
            is_late = request.deadline is not None and request.deadline <= self.now
            assert is_late or request.first_scheduled_time is None, "it had started in time"
            self.live.remove(request)
            self.num_fruitless = 0
            SEEN["expired while running" if is_late else "expired"] += 1
        slots = self.scheduler.slots
        decoding = [(r, r.num_preemptions) for r in slots.owners[slots.decoding()].tolist()]
        running = dict(self.scheduler.running)
        starved = self.longest_starved()
        plan = self.scheduler.schedule(self.now)
        self.check_plan(plan, decoding)
        self.check_who_started([r for r in self.scheduler.running if r not in running], starved)
        self.scheduler.check_integrity()
        if plan.requests:
            self.in_flight.append((plan, self.runner.run(self.packer.pack(plan))))
        if len(self.in_flight) > self.depth or not plan.requests:
            self.collect()
        self.check_progress()

    def longest_starved(self) -> Request | None:
        limit = self.config.max_starvation_s
        starved = [r for r in self.scheduler.waiting if self.now - r.arrival_time >= limit]
        return min(starved, key=lambda r: r.arrival_time, default=None)

    def check_who_started(self, newcomers, starved):
        """Nobody passes who has waited as long as any may, unless what he waits for is his own
        class, gate or prefix."""
        waiting = self.scheduler.waiting
        if starved is None or starved not in set(waiting) or starved in waiting._lane_of:
            return
        SEEN["starved steps"] += 1
        for request in newcomers:
            assert request.arrival_time <= starved.arrival_time, "a starving request was passed"

    def check_progress(self):
        """Tokens are delivered again and again until all are: a livelock computes for ever."""
        self.num_fruitless += bool(self.live)
        left = sum(r.num_prompt_tokens + r.sampling.max_tokens for r in self.live)
        assert self.num_fruitless <= 2 * left + 20, "nothing comes of all the steps"
        live = {*self.scheduler.running, *self.scheduler.waiting}
        assert live == set(self.live), "a request is lost, or is kept though it has ended"

    def check_plan(self, plan, decoding):
        assert plan.num_tokens == int(plan.counts.sum()) <= self.config.max_num_batched_tokens
        assert len(plan.requests) == len(set(plan.requests)) <= self.config.max_num_seqs
        lengths = plan.counts.tolist()
        assert lengths == sorted(lengths, key=lambda n: n > 1), "rows of one token come first"
        served = set(plan.requests[: plan.num_decodes])
        for request, num_preemptions in decoding:
            gave_way = request.num_preemptions > num_preemptions
            paused = self.config.prefill_first and plan.num_chunks and not served
            assert request in served or gave_way or paused, "a decode row was left out"
        if not plan.requests and self.scheduler.waiting and not self.in_flight:
            assert self.config.batching == "dynamic", "nobody runs though somebody waits"
            assert self.scheduler.next_wake_s(self.now) is not None
        for request, start, count, _, _ in plan.rows if self.looked_at else ():
            if request in self.looked_at:
                self.looked_at[request].update(range(start, start + count))
        SEEN["swapped out"] += len(plan.copies_out)
        SEEN["swapped in"] += len(plan.copies_in)

    def collect(self):
        if not self.in_flight:
            return
        plan, tokens = self.in_flight.popleft()
        waiting = set(self.scheduler.waiting)
        for row, request in enumerate(plan.requests):
            fails_at = self.fails_at[request]
            if fails_at < math.inf and request in waiting:  # rare, so rather now
                fails_at = self.fails_at[request] = min(fails_at, request.num_output_tokens)
            if request.num_output_tokens >= fails_at:
                tokens[row] = BAD_TOKEN
        ended = []
        for request, token, _ in self.scheduler.update(plan, tokens.tolist()):
            self.num_fruitless = 0
            if token != BAD_TOKEN:
                self.seen[request].append(token)
            if request.is_finished:
                self.live.remove(request)
                self.check_output(request)
                ended.append(request)
                SEEN["failures while preempted"] += token == BAD_TOKEN and request in waiting
        if len(ended) == 1:  # another one may have left pages of the same tokens
            self.check_nothing_spoiled_stays(*ended)

    def check_output(self, request):
        stop = request.sampling.stop_token_ids
        want = expected_output(request.prompt_token_ids, request.sampling.max_tokens, stop)
        reason = FinishReason.STOP if want[-1] in stop else FinishReason.LENGTH
        if len(want) > self.fails_at[request]:
            want, reason = want[: self.fails_at[request]], FinishReason.ERROR
        assert self.seen[request] == want, f"{request.request_id} got other tokens"
        assert request.output_token_ids == want
        assert request.num_output_tokens == len(want)
        assert request.finish_reason == reason
        assert request.num_cached_tokens < request.num_prompt_tokens
        if request in self.looked_at:
            assert request.num_cached_tokens == 0
            assert self.looked_at[request] >= set(range(request.num_prompt_tokens))
            SEEN["prompts looked at"] += 1
        SEEN["finished"] += 1
        SEEN["hits"] += request.num_cached_tokens > 0
        SEEN["preemptions"] += request.num_preemptions

    def check_nothing_spoiled_stays(self, request):
        if request.finish_reason != FinishReason.ERROR:
            return
        cache, tokens = self.scheduler.cache, request.known_bytes()
        _, num_idle = cache.match(request.cache_keys, tokens, len(request.token_ids) // PAGE)
        assert not num_idle, "what a failed request computed can still be found"
        SEEN["failures"] += 1

    @invariant()
    def nothing_leaks(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        work = sum(r.num_prompt_tokens + r.sampling.max_tokens for r in self.live)
        for _ in range(20 * work + 100):  # else it is a livelock
            if not (self.scheduler.has_unfinished or self.in_flight):
                break
            self.step()
        SEEN["urgent preemptions"] += self.scheduler.preemption.counts["a more urgent request"]
        assert not self.live, f"never finished: {[r.request_id for r in self.live]}"
        self.scheduler.check_integrity()
        assert self.scheduler.slots.num_free == self.config.max_num_seqs
        assert self.scheduler.preemption.num_host_pages_used == 0
        assert self.scheduler.cache.num_available == self.scheduler.pool.num_usable
        assert self.scheduler.cache.reset()
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_usable
        assert all(r.status == RequestStatus.FINISHED for r in self.seen)


Traffic.TestCase.settings = settings(
    max_examples=3 * settings.default.max_examples,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class TestTraffic(Traffic.TestCase):
    def test_random_traffic_meets_everything_there_is(self):
        """Without what is counted here the search would prove little."""
        self.runTest()
        print(dict(SEEN))
        for what in EXPECTED:
            assert SEEN[what] > 0, what
        assert SEEN["steps"] >= 10_000
