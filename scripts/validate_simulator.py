#!/usr/bin/env python
"""Compares the simulator with the real engine: the same requests at the same times through both.

    python scripts/validate_simulator.py --model=smollm2-135m --num_requests=96

Three loads: 16 requests kept in the engine, Poisson arrivals at --utilisation of what that served,
and the same rate in bursts. Each runs --repeats times in the engine, and each run is simulated
twice: with step times fitted to its own step log, which tests the simulator; and with those of a
calibration load that ran before all, which also tells how steady the machine is. Shown are medians
over the runs. The exit code is 1 when with its own step times throughput is off by more than 10 %
or a latency by more than 15 %.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

from jserve.bench.direct import load_engine
from jserve.bench.load import RequestResult
from jserve.bench.workload import Lengths, RequestDefaults, arrival_times, synthetic
from jserve.build import build_engine
from jserve.engine.engine import Engine
from jserve.engine.line_log import FLUSH_S
from jserve.llm import engine_config
from jserve.messages import GenerateRequest
from jserve.sim.histogram import Histogram
from jserve.sim.recorder import Recorder
from jserve.sim.step_log import read_step_log
from scheduler.request import Request, SamplingView
from scheduler.simulator import simulate
from scheduler.step_time import FittedStepTime

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "What the engine runs.")
_REQUESTS = flags.DEFINE_integer("num_requests", 96, "Requests per load.", lower_bound=8)
_INPUT = flags.DEFINE_string("input_len", "64:192", "Prompt lengths.")
_OUTPUT = flags.DEFINE_string("output_len", "32:96", "Output lengths.")
_CONCURRENCY = flags.DEFINE_integer("concurrency", 16, "Of the closed loop.", lower_bound=1)
_UTILISATION = flags.DEFINE_float("utilisation", 0.7, "Share of the capacity that open loops use.")
_BURSTINESS = flags.DEFINE_float("burstiness", 0.25, "Shape of the gaps' gamma distribution.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Runs of the engine per load.", lower_bound=1)
_VOCAB = flags.DEFINE_integer("vocab_size", 49152, "Prompts are drawn from so many token ids.")

THROUGHPUT_LIMIT, LATENCY_LIMIT = 0.10, 0.15

Figures = dict[str, float]


def figures(ttft: Histogram, itl: Histogram, num_tokens: int, end_s: float) -> Figures:
    times = {"TTFT": ttft, "ITL": itl}
    of_all = {f"{n} p{p}": 1e3 * h.percentile(p) for n, h in times.items() for p in (50, 95)}
    return {"throughput": num_tokens / end_s} | of_all


def drawn(num: int, seed: int) -> list[GenerateRequest]:
    return synthetic(
        num,
        Lengths(_INPUT.value),
        Lengths(_OUTPUT.value),
        vocab_size=_VOCAB.value,
        defaults=RequestDefaults(),
        seed=seed,
    )


def of_engine(results: Sequence[RequestResult]) -> Figures:
    ttft, itl = Histogram(), Histogram()
    for result in results:
        ttft.add(result.ttft_s or 0.0)
        for gap_s in result.gaps_s:
            itl.add(gap_s)
    num_tokens = sum(r.usage.completion_tokens for r in results)
    return figures(ttft, itl, num_tokens, max(r.end_s for r in results))


def of_simulator(
    engine: Engine,
    model: FittedStepTime,
    requests: Sequence[GenerateRequest],
    due_s: Sequence[float],
    closed_loop: int,
) -> Figures:
    record = Recorder()
    arriving = (
        Request(
            str(i),
            np.array(request.prompt_token_ids, np.int32),
            SamplingView(request.sampling.max_tokens or 1),
            arrival_time=due,
        )
        for i, (request, due) in enumerate(zip(requests, due_s, strict=True))
    )
    simulate(engine.scheduler.config, model, arriving, record, closed_loop=closed_loop)
    num_tokens = sum(request.sampling.max_tokens or 1 for request in requests)
    return figures(record.total.ttft, record.itl, num_tokens, record.last_end_s)


class Steps:
    """The step log of an engine, read piece by piece."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._num_read = 0

    def fit(self) -> FittedStepTime:
        """Returns a model of the steps since the last call."""
        time.sleep(2 * FLUSH_S)  # the log is written in the background
        log = read_step_log(self._path)
        samples = list(log.samples())
        new = samples[self._num_read :]
        self._num_read = len(samples)
        return FittedStepTime.fit(new, log.buckets)


def calibrate(engine: Engine, steps: Steps) -> tuple[FittedStepTime, float]:
    """Returns a model of step times and the requests per second that the engine serves."""
    num = _REQUESTS.value // 2
    burst = drawn(num, seed=101)
    load_engine(engine, burst, arrival_times(num, 1.5, _BURSTINESS.value, seed=101))
    closed = drawn(num, seed=102)
    results = load_engine(engine, closed, [0.0] * num, _CONCURRENCY.value)
    return steps.fit(), num / max(r.end_s for r in results)


def compare(
    name: str, real: Sequence[Figures], own: Sequence[Figures], before: Sequence[Figures]
) -> list[str]:
    """Prints one load's table; returns what is off by more than its limit."""
    missed = []
    print(
        f"\n{name:<24}{'engine':>9}{'(range)':>16}{'simulated':>11}{'error':>8}"
        f"{'  with the calibration':>22}"
    )
    for key in real[0]:
        values = [run[key] for run in real]
        errors = [
            statistics.median(
                simulated[key] / run[key] - 1 for simulated, run in zip(runs, real, strict=True)
            )
            for runs in (own, before)
        ]
        unit = "tokens/s" if key == "throughput" else "ms"
        print(
            f"  {f'{key}, {unit}':<22}{statistics.median(values):>9.1f}"
            f"{f'{min(values):.1f}-{max(values):.1f}':>16}"
            f"{statistics.median(run[key] for run in own):>11.1f}"
            f"{errors[0]:>+8.1%}{errors[1]:>+22.1%}"
        )
        if abs(errors[0]) > (THROUGHPUT_LIMIT if key == "throughput" else LATENCY_LIMIT):
            missed.append(f"{name}: {key} {errors[0]:+.1%}")
    return missed


def main(argv: list[str]) -> None:
    del argv
    with tempfile.TemporaryDirectory() as folder:
        step_log = str(Path(folder) / "steps.jsonl")
        engine = build_engine(
            engine_config(model=_MODEL.value, enable_prefix_cache=False, step_log=step_log)
        )
        steps = Steps(step_log)
        load_engine(engine, drawn(8, seed=100), [0.0] * 8)  # warms caches
        calibrated, capacity = calibrate(engine, steps)
        rate = _UTILISATION.value * capacity
        print(f"capacity {capacity:.2f} requests/s; open loops at {rate:.2f}")
        num = _REQUESTS.value
        loads = {
            f"closed loop of {_CONCURRENCY.value}": ([0.0] * num, _CONCURRENCY.value),
            "Poisson": (arrival_times(num, rate, 1.0, seed=1), 0),
            "bursts": (arrival_times(num, rate, _BURSTINESS.value, seed=2), 0),
        }
        missed = []
        requests = drawn(num, seed=7)
        for name, (due_s, closed) in loads.items():
            real, own, before = [], [], []
            for _ in range(_REPEATS.value):
                real.append(of_engine(load_engine(engine, requests, due_s, closed)))
                for model, runs in ((steps.fit(), own), (calibrated, before)):
                    runs.append(of_simulator(engine, model, requests, due_s, closed))
            missed += compare(name, real, own, before)
        engine.close()
    print("\nbeyond the limits: " + ("; ".join(missed) or "nothing"))
    sys.exit(bool(missed))


if __name__ == "__main__":
    app.run(main)
