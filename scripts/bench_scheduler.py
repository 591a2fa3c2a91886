"""Times the host's work per step: schedule, pack and update, without a device.

For each number of running requests, prefix cache on: steady decoding, page boundaries included; and
churn, where requests of --output_len tokens end and others, of which --num_waiting wait, take their
place. Medians of steps in microseconds. The exit code is 1 when a goal is missed: 400 us for 64
requests, 3 us per request for 256 and more, in steady decoding; and with the longer queue not more
than 1.25 times what it is with a short one.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scheduler.bucket import make_buckets
from scheduler.config import SchedulerConfig
from scheduler.packer import Packer
from scheduler.request import Request, SamplingView
from scheduler.scheduler import Scheduler

_RUNNING = flags.DEFINE_list("running", ["16", "64", "256", "1024"], "Numbers of running requests.")
_STEPS = flags.DEFINE_integer("steps", 600, "Steps to time per row of the table.", lower_bound=64)
_WAITING = flags.DEFINE_list("num_waiting", ["100", "100000"], "Lengths of the queue under churn.")
_OUTPUT = flags.DEFINE_integer("output_len", 256, "Output tokens per request under churn.")
_POLICY = flags.DEFINE_string("policy", "priority", "Queue order.")

PROMPT_LEN = 200
MAX_MODEL_LEN = 4096
FLAT = 1.25  # how much a long queue may cost, relative to a short one
GOAL_US = {64: 400.0}
GOAL_US_PER_REQUEST, FROM_REQUESTS = 3.0, 256


class Bench:
    """One scheduler under load; `turn` is one step with one step in flight, as in the engine."""

    def __init__(self, running: int) -> None:
        self.config = SchedulerConfig(
            max_num_seqs=running,
            max_num_batched_tokens=running + 512,
            prefill_chunk=256,
            page_size=16,
            num_pages=1 + running * MAX_MODEL_LEN // 16,
            max_model_len=MAX_MODEL_LEN,
            policy=_POLICY.value,
        )
        buckets = make_buckets(running, self.config.max_num_batched_tokens)
        self.scheduler = Scheduler(self.config)
        self.packer = Packer(self.config, buckets)
        self.rng = np.random.default_rng(0)
        self.count = 0
        self.in_flight: list = []

    def add(self, max_tokens: int) -> None:
        self.count += 1
        prompt = self.rng.integers(0, 50_000, PROMPT_LEN, np.int32)
        sampling = SamplingView(max_tokens, frozenset({-2}))
        self.scheduler.add(
            Request(str(self.count), prompt, sampling, arrival_time=float(self.count))
        )

    def turn(self) -> tuple[float, float, float]:
        """Returns the seconds of schedule, pack and update."""
        times = [time.perf_counter()]
        plan = self.scheduler.schedule(float(self.count))
        times.append(time.perf_counter())
        self.packer.pack(plan)
        times.append(time.perf_counter())
        self.in_flight.append((plan, [7] * len(plan.requests)))
        if len(self.in_flight) > 1:
            self.scheduler.update(*self.in_flight.pop(0))
        times.append(time.perf_counter())
        return times[1] - times[0], times[2] - times[1], times[3] - times[2]

    def medians_us(self) -> np.ndarray:
        """Microseconds of schedule, pack, update and their sum; medians over steps."""
        times = np.array([self.turn() for _ in range(_STEPS.value)]) * 1e6
        return np.median(np.column_stack([times, times.sum(axis=1)]), axis=0)


def steady(running: int) -> np.ndarray:
    bench = Bench(running)
    for _ in range(running):
        bench.add(MAX_MODEL_LEN - PROMPT_LEN)
    while bench.scheduler.waiting or bench.scheduler.composer.prefilling:
        bench.turn()
    return bench.medians_us()


def churn(running: int, num_waiting: int) -> np.ndarray:
    bench = Bench(running)
    for _ in range(running):
        bench.add(int(bench.rng.integers(1, _OUTPUT.value)))
    while bench.scheduler.waiting:
        bench.turn()
    for _ in range(num_waiting + _STEPS.value * running // _OUTPUT.value):
        bench.add(_OUTPUT.value)
    return bench.medians_us()


def main(argv: list[str]) -> None:
    del argv
    missed = []
    print(
        f"{'running':>8} {'load':>16} {'schedule':>9} {'pack':>7} {'update':>7} {'all us':>8}"
        f" {'us/request':>11}"
    )
    for running in map(int, _RUNNING.value):
        rows = {"steady": steady(running)}
        queues = list(map(int, _WAITING.value))
        rows |= {f"{queue} waiting": churn(running, queue) for queue in queues}
        for name, us in rows.items():
            schedule, pack, update, total = us
            print(
                f"{running:>8} {name:>16} {schedule:>9.1f} {pack:>7.1f} {update:>7.1f}"
                f" {total:>8.1f} {total / running:>11.2f}"
            )
        goal = GOAL_US.get(running, np.inf)
        if running >= FROM_REQUESTS:
            goal = GOAL_US_PER_REQUEST * running
        if rows["steady"][-1] > goal:
            missed.append(f"{running} requests: {rows['steady'][-1]:.0f} us, goal {goal:.0f}")
        first, last = (rows[f"{queue} waiting"][-1] for queue in (queues[0], queues[-1]))
        if last > FLAT * first:
            missed.append(f"{running} requests: {last / first:.2f} x with {queues[-1]} waiting")
    print("goals missed: " + "; ".join(missed) if missed else "all goals met")
    sys.exit(bool(missed))


if __name__ == "__main__":
    app.run(main)
