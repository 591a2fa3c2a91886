"""Steps whose tokens nobody tells, as in a simulation, are the steps of the real thing."""

from __future__ import annotations

import random
from collections import deque

import pytest

from scheduler.config import RequestClass, SchedulerConfig
from scheduler.policy import POLICIES
from scheduler.request import FinishReason, Request, SamplingView
from scheduler.scheduler import Scheduler
from scheduler.step_time import LinearStepTime

PAGE = 4


class Loop:
    """A scheduler with up to `depth` steps in flight, told of its tokens or not."""

    def __init__(self, config: SchedulerConfig, depth: int, tells_tokens: bool) -> None:
        self.scheduler = Scheduler(config, LinearStepTime(per_prefill_token_s=1.0), 0.5)
        self.requests: list[Request] = []
        self._depth = depth
        self._tells_tokens = tells_tokens
        self._in_flight: deque = deque()

    def add(self, **fields) -> None:
        self.requests.append(Request(f"r{len(self.requests)}", **fields))
        self.scheduler.add(self.requests[-1])

    def step(self, now: float) -> tuple:
        self.scheduler.expire(now)
        plan = self.scheduler.schedule(now)
        if plan.requests:
            self._in_flight.append(plan)
        if self._in_flight and (len(self._in_flight) > self._depth or not plan.requests):
            done = self._in_flight.popleft()
            tokens = [self._token(row) for row in done.rows] if self._tells_tokens else None
            self.scheduler.update(done, tokens)
        self.scheduler.check_integrity()
        rows = [(row.request.request_id, *row[1:]) for row in plan.rows]
        return rows, plan.copies_out.tolist(), plan.copies_in.tolist()

    @staticmethod
    def _token(row) -> int:
        return (row.start + row.num_tokens) % 97

    def states(self) -> list[tuple]:
        return [
            (r.status, r.finish_reason, r.num_preemptions, r.num_tokens if r.slot < 0 else 0)
            for r in self.requests
        ]


def both(seed: int, policy: str, **changes) -> tuple[random.Random, Loop, Loop]:
    draw = random.Random(f"{seed} {policy}")
    config = SchedulerConfig(
        **{
            "max_num_seqs": draw.randint(2, 6),
            "max_num_batched_tokens": draw.randint(6, 30),
            "prefill_chunk": draw.randint(1, 20),
            "page_size": PAGE,
            "num_pages": draw.randint(12, 22),
            "max_model_len": 64,
            "policy": policy,
            "classes": (RequestClass(name="batch", priority=3, max_num_seqs=2),),
            "prefill_first": draw.random() < 0.3,
            "long_prompt_tokens": draw.choice([0, 8]),
            "num_host_pages": draw.choice([0, 4, 40]),
        }
        | changes
    )
    depth = draw.randint(0, 2)
    return draw, Loop(config, depth, True), Loop(config, depth, False)


def some_request(draw: random.Random, now: float) -> dict:
    return {
        "prompt_token_ids": [draw.randrange(3) * 31 + i for i in range(draw.randint(1, 24))],
        "sampling": SamplingView(draw.randint(1, 18)),
        "priority": draw.randint(0, 1),
        "request_class": draw.choice(["", "batch"]),
        "tenant": draw.choice("ab"),
        "arrival_time": now,
        "deadline": now + 0.3 if draw.random() < 0.1 else None,
    }


def drive(draw: random.Random, loops: tuple[Loop, Loop], num_steps: int):
    """Does the same to both, then steps both; yields what the steps were."""
    for number in range(num_steps):
        now = number * 0.01
        if number < num_steps // 8 and draw.random() < 0.4:
            fields = some_request(draw, now)
            for loop in loops:
                loop.add(**fields)
        if loops[0].requests and draw.random() < 0.03:
            index = draw.randrange(len(loops[0].requests))
            for loop in loops:
                loop.scheduler.finish(loop.requests[index], FinishReason.ABORT)
        yield [loop.step(now) for loop in loops]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("batching", ["continuous", "static", "dynamic"])
def test_each_step_is_the_same_whether_its_tokens_are_told_or_not(policy, batching):
    num_preemptions = 0
    for seed in range(8):
        draw, real, counted = both(seed, policy, batching=batching, enable_prefix_cache=False)
        for of_real, of_counted in drive(draw, (real, counted), 800):
            assert of_real == of_counted
            assert real.states() == counted.states()
        assert all(request.is_finished for request in counted.requests)
        num_preemptions += counted.scheduler.num_preemptions
    assert num_preemptions > 10


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_with_a_prefix_cache_all_end_alike_though_fewer_pages_are_known(policy):
    """Generated tokens cannot be found again where nobody knows them."""
    for seed in range(8):
        draw, real, counted = both(seed, policy)
        loops = (real, counted)
        for number in range(40):
            fields = some_request(draw, number * 0.01) | {"deadline": None}
            for loop in loops:
                loop.add(**fields)
                loop.step(number * 0.01)
        for loop in loops:
            for number in range(2000):
                if not loop.scheduler.has_unfinished:
                    break
                loop.step(1 + number * 0.01)
            lengths = [(r.finish_reason, r.num_output_tokens) for r in loop.requests]
            assert lengths == [(FinishReason.LENGTH, r.sampling.max_tokens) for r in loop.requests]
