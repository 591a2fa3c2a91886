#!/usr/bin/env python
"""What the scheduler's settings do to latencies, on the real engine in this process.

    python scripts/bench_policies.py --cases=mixed,overload,flood

mixed: short interactive requests and prompts of 1,500 tokens; ITL without chunks, with them, and
with a target. overload: interactive and batch requests at twice what the engine can serve; how many
interactive ones keep their targets, how long batch ones wait. flood: one tenant sends everything at
once; what share of the tokens others get meanwhile. All loads are seeded and the same for each
setting; the settings take turns on one compiled engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import app, flags

from jserve.bench.direct import load_engine
from jserve.bench.load import RequestResult
from jserve.build import build_engine
from jserve.engine.engine import Engine
from jserve.engine.input_processor import InputProcessor
from jserve.engine.metrics import EngineMetrics
from jserve.llm import engine_config
from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams
from jserve.text.chat import chat_template_of
from scheduler.config import RequestClass
from scheduler.packer import Packer
from scheduler.scheduler import Scheduler

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "What the engine runs.")
_CASES = flags.DEFINE_list("cases", ["mixed", "overload", "flood"], "What to run.")
_SECONDS = flags.DEFINE_float("seconds", 40.0, "How long requests arrive.", lower_bound=5.0)
_CAPACITY = flags.DEFINE_float(
    "capacity", 2.5, "Requests of 128 + 64 tokens per second that the engine serves."
)
_ITL_SLO_MS = flags.DEFINE_float("itl_slo_ms", 150.0, "The target of case mixed.")

Load = list[tuple[float, str, str, GenerateRequest]]  # due seconds, kind, tenant
UNCHUNKED = 2048
INTERACTIVE_TTFT_S, INTERACTIVE_ITL_S = 1.5, 0.2  # the targets of case overload
STARVATION_S = 20.0
CLASSES = (RequestClass(name="interactive"), RequestClass(name="batch"))


class Bench:
    """One compiled engine, arranged anew for each setting."""

    def __init__(self) -> None:
        self._built = build_engine(
            engine_config(
                model=_MODEL.value,
                max_num_batched_tokens=UNCHUNKED + 32,
                max_num_seqs=16,
                enable_prefix_cache=False,
            )
        )

    def run(self, load: Load, **limits: Any) -> list[RequestResult]:
        built = self._built
        usual = {"max_num_batched_tokens": 512, "prefill_chunk": 256, "classes": CLASSES}
        config = dataclasses.replace(built.scheduler.config, **(usual | limits))
        scheduler = Scheduler(config, built.scheduler.step_time)  # what it has learnt stays
        engine = Engine(
            processor=InputProcessor(
                built.tokenizer,
                chat_template_of(built.tokenizer),
                built.processor.limits,
                scheduler.why_too_large,
                classes=config.classes,
            ),
            scheduler=scheduler,
            packer=Packer(config, built._packer.buckets),
            runner=built._runner,
            metrics=EngineMetrics(),
            overlap=True,
        )
        return load_engine(engine, [entry[3] for entry in load], [entry[0] for entry in load])

    def warm_up(self) -> None:
        """Lets the model of step times see every kind of step."""
        load: Load = []
        for kind, lengths, rate in (("short", (64, 64), 1.0), ("long", (1500, 16), 0.1)):
            load += poisson(kind, lengths, rate, 15.0, seed=99)
        self.run(sorted(load, key=lambda entry: entry[0]))


def poisson(
    kind: str, lengths: tuple[int, int], rate: float, seconds: float, seed: int, tenant: str = ""
) -> Load:
    """Requests of one kind: random prompts, Poisson arrivals."""
    rng, load, at = np.random.default_rng(seed), [], 0.0
    while (at := at + rng.exponential(1 / rate)) < seconds:
        load.append((at, kind, tenant, asking(rng, lengths, kind, tenant)))
    return load


def asking(
    rng: np.random.Generator, lengths: tuple[int, int], kind: str, tenant: str
) -> GenerateRequest:
    return GenerateRequest(
        prompt_token_ids=rng.integers(256, 49_152, lengths[0]).tolist(),
        sampling=SamplingParams(temperature=0, max_tokens=lengths[1], ignore_eos=True),
        request_class=kind if kind in ("interactive", "batch") else "",
        tenant=tenant,
    )


def pick(
    load: Load, results: Sequence[RequestResult], keep: Callable[[str, str], bool]
) -> list[RequestResult]:
    pairs = zip(load, results, strict=True)
    return [result for (_, kind, tenant, _), result in pairs if keep(kind, tenant)]


def ms(values: Sequence[float], *quantiles: float) -> str:
    return " / ".join(f"{np.quantile(values, q) * 1e3:.0f}" for q in quantiles)


def mixed(bench: Bench) -> None:
    seconds = _SECONDS.value
    load = poisson("short", (64, 64), 1.0, seconds, seed=1)
    load += poisson("long", (1500, 16), 0.15, seconds, seed=2)
    load.sort(key=lambda entry: entry[0])
    target_s = _ITL_SLO_MS.value / 1e3
    settings: dict[str, dict[str, Any]] = {
        "whole prompts": {"max_num_batched_tokens": UNCHUNKED + 16, "prefill_chunk": UNCHUNKED},
        "chunks of 256": {},
        f"ITL target {target_s * 1e3:.0f} ms": {"itl_slo_s": target_s},
        "the same, long prompts half": {
            "itl_slo_s": target_s,
            "long_prompt_tokens": 512,
            "long_prompt_share": 0.5,
        },
        "the same, TTFT target 3 s": {"itl_slo_s": target_s, "ttft_slo_s": 3.0},
    }
    print(
        "\nmixed load: ms, short requests' ITL p50 / p95 / p99 / max; TTFT p50 / p95 of each kind"
    )
    for name, limits in settings.items():
        results = bench.run(load, **limits)
        short = pick(load, results, lambda kind, _: kind == "short")
        long = pick(load, results, lambda kind, _: kind == "long")
        gaps = [gap for result in short for gap in result.gaps_s]
        print(
            f"  {name:<28} {ms(gaps, 0.5, 0.95, 0.99, 1):>24}   "
            f"short {ms([r.ttft_s or 0 for r in short], 0.5, 0.95):>12}   "
            f"long {ms([r.ttft_s or 0 for r in long], 0.5, 0.95):>14}"
        )


def overload(bench: Bench) -> None:
    seconds, capacity = _SECONDS.value, _CAPACITY.value
    load = poisson("interactive", (128, 64), 0.6 * capacity, seconds, seed=3)
    load += poisson("batch", (128, 64), 1.4 * capacity, seconds, seed=4)
    load.sort(key=lambda entry: entry[0])
    targets = {"ttft_slo_s": INTERACTIVE_TTFT_S, "itl_slo_s": INTERACTIVE_ITL_S}
    ranked = (RequestClass(name="interactive"), RequestClass(name="batch", priority=10))
    capped = (
        RequestClass(name="interactive", **targets),
        RequestClass(name="batch", priority=10, max_num_seqs=8),
    )
    settings: dict[str, dict[str, Any]] = {
        "fcfs": {"policy": "fcfs"},
        "priority": {"classes": ranked},
        f"priority, bound {STARVATION_S:.0f} s": {
            "classes": ranked,
            "max_starvation_s": STARVATION_S,
        },
        "priority, targets, batch <= 8": {"classes": capped},
    }
    print(
        f"\n2x overload for {seconds:.0f} s: interactive in TTFT {INTERACTIVE_TTFT_S} s, mean "
        f"ITL {INTERACTIVE_ITL_S * 1e3:.0f} ms; its TTFT p50 / p95 ms; batch queue p50 / max s; end"
    )
    for name, limits in settings.items():
        results = bench.run(load, **limits)
        interactive = pick(load, results, lambda kind, _: kind == "interactive")
        batch = pick(load, results, lambda kind, _: kind == "batch")
        good = [
            (r.ttft_s or 0) <= INTERACTIVE_TTFT_S and (r.mean_itl_s or 0) <= INTERACTIVE_ITL_S
            for r in interactive
        ]
        waits = [r.queue_s or 0.0 for r in batch]
        print(
            f"  {name:<30} {np.mean(good):>6.1%}   "
            f"{ms([r.ttft_s or 0 for r in interactive], 0.5, 0.95):>14}   "
            f"{np.median(waits):>5.1f} / {max(waits):>5.1f}   {max(r.end_s for r in results):>6.1f}"
        )


def flood(bench: Bench) -> None:
    seconds, capacity = _SECONDS.value, _CAPACITY.value
    rng = np.random.default_rng(5)
    count = int(1.5 * capacity * seconds)
    load: Load = [(0.0, "", "flood", asking(rng, (128, 64), "", "flood")) for _ in range(count)]
    others = ("b", "c", "d")
    for i, tenant in enumerate(others):
        load += poisson("", (128, 64), 0.2 * capacity, seconds, seed=6 + i, tenant=tenant)
    load.sort(key=lambda entry: entry[0])
    asked = sum(tenant != "flood" for _, _, tenant, _ in load)
    print(
        f"\nflood: one tenant sends {count} requests at once, three others {asked} over "
        f"{seconds:.0f} s, 0.6 of capacity; their TTFT p50 / p95 ms, done by then, share of done"
    )
    for name, limits in {"fcfs": {"policy": "fcfs"}, "fair": {"policy": "fair"}}.items():
        results = bench.run(load, **limits)
        theirs = pick(load, results, lambda _, tenant: tenant != "flood")
        done = sum(r.end_s <= seconds for r in theirs)
        of_all = sum(r.end_s <= seconds for r in results)
        print(
            f"  {name:<8} {ms([r.ttft_s or 0 for r in theirs], 0.5, 0.95):>16}   "
            f"{done} of {asked}   {done / of_all:.0%}"
        )


def main(argv: list[str]) -> None:
    del argv
    cases = {"mixed": mixed, "overload": overload, "flood": flood}
    bench = Bench()
    bench.warm_up()
    for name in _CASES.value:
        cases[name](bench)


if __name__ == "__main__":
    app.run(main)
