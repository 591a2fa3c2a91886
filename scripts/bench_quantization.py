#!/usr/bin/env python
"""What int8 does to speed: engines of several settings in one process, in turns.

    nice -n -19 python scripts/bench_quantization.py --rounds=5

One stream: tokens per second between the first and the last of 64. work16: output tokens per
second over sixteen requests at once (tests/data/workloads/work16.json). Prompt: 512 tokens over the
time to the first token. Medians over the rounds; of a busy machine only the ratios mean something.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from absl import app, flags

from jserve.build import build_engine
from jserve.engine.engine import Engine
from jserve.llm import LLM, engine_config
from jserve.sampling_params import SamplingParams

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "What the engines run.")
_SETTINGS = flags.DEFINE_list(
    "settings", ["none/auto", "w8a8/auto", "w8a8/int8"], "Weights/KV of each engine."
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns of each.", lower_bound=1)
_WORK16 = flags.DEFINE_string("work16", "tests/data/workloads/work16.json", "The workload.")
PROMPT = [13 + 7 * i % 4000 for i in range(512)]
NUM_TOKENS = 64


def make_engine(setting: str) -> Engine:
    quantization, _, kv_cache_dtype = setting.partition("/")
    return build_engine(
        engine_config(
            model=_MODEL.value,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            max_num_seqs=16,
            max_model_len=2048,
            max_num_batched_tokens=512,
            prefill_chunk=512,
            enable_prefix_cache=False,
        )
    )


def seconds(llm: LLM, prompts: list[list[int]], num_tokens: list[int]) -> float:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in num_tokens]
    begin = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - begin


def measures() -> dict[str, Callable[[LLM], float]]:
    """Each returns tokens per second."""
    requests = json.loads(Path(_WORK16.value).read_text())["requests"]
    prompts = [request["prompt_token_ids"] for request in requests]
    counts = [request["max_tokens"] for request in requests]

    def one_stream(llm: LLM) -> float:
        first = seconds(llm, [PROMPT[:16]], [1])
        return (NUM_TOKENS - 1) / (seconds(llm, [PROMPT[:16]], [NUM_TOKENS]) - first)

    return {
        "one stream": one_stream,
        "work16": lambda llm: sum(counts) / seconds(llm, prompts, counts),
        "prompt of 512": lambda llm: len(PROMPT) / seconds(llm, [PROMPT], [1]),
    }


def main(_: list[str]) -> None:
    llms = {setting: LLM.from_engine(make_engine(setting)) for setting in _SETTINGS.value}
    for name, measure in measures().items():
        rates: dict[str, list[float]] = {setting: [] for setting in llms}
        for round_number in range(_ROUNDS.value + 1):
            for setting, llm in llms.items():
                rate = measure(llm)
                if round_number:  # the first is to warm up
                    rates[setting].append(rate)
        base = statistics.median(next(iter(rates.values())))
        for setting, found in rates.items():
            median = statistics.median(found)
            print(f"{name}: {setting}: {median:.1f} tok/s, x {median / base:.2f} "
                  f"({min(found):.1f} to {max(found):.1f})", flush=True)  # fmt: skip


if __name__ == "__main__":
    app.run(main)
