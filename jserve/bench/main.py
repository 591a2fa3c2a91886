"""The command behind scripts/bench_serving.py: flags to a run to a report. Knows no wire format.

Exit codes: 0 some request succeeded, 1 none did or the settings are no good, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags
from tqdm import tqdm

from jserve.access import access_from_flags, define_access_flags
from jserve.bench import workload
from jserve.bench.backends import Backend, JserveBackend, OpenAIBackend
from jserve.bench.load import RequestResult, closed_loop, open_loop
from jserve.bench.report import parse_goodput, summarize, table
from jserve.errors import ConfigError, JserveError
from jserve.flags import list_in_help
from jserve.messages import GenerateRequest

_UNRECORDED = ("json", "progress")  # flags that tell nothing about a run


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    text, number = flags.DEFINE_string, flags.DEFINE_integer
    real, switch = flags.DEFINE_float, flags.DEFINE_boolean
    fv: Any = {"flag_values": values}
    flags.DEFINE_enum("backend", "jserve", ["jserve", "openai"], "What is driven.", **fv)
    text("target", "127.0.0.1:50051", "host:port of --backend=jserve.", **fv)
    text("base_url", "http://127.0.0.1:8000", "URL of --backend=openai.", **fv)
    text("model", "", "The model's name at --backend=openai.", **fv)
    define_access_flags(values)
    text("extra_body", "{}", "JSON merged into each request of --backend=openai.", **fv)
    kinds = ["synthetic", "sharegpt", "jsonl", "workload"]
    flags.DEFINE_enum("dataset", "synthetic", kinds, "Where requests come from.", **fv)
    text("dataset_path", "", "The file, for all but synthetic.", **fv)
    number("num_requests", 0, "0: the whole file; 32 synthetic ones.", lower_bound=0, **fv)
    text("input_len", "128", "Synthetic: 512, 100:400, or a mix 64:128,1024:2048.", **fv)
    text("output_len", "", "max_tokens likewise; empty: 128, or the file's own.", **fv)
    number("vocab_size", 32000, "Synthetic token ids are below it.", lower_bound=1, **fv)
    real("temperature", 0.0, "Where the file says none.", **fv)
    switch("ignore_eos", True, "Where the file does not say.", **fv)
    text("request_class", "", "Class of each request, with --backend=jserve.", **fv)
    number("concurrency", 0, "Closed loop of so many; a cap with --request_rate.", 0, **fv)
    real("request_rate", 0.0, "Open loop, per second; 0: closed, or all at once.", 0.0, **fv)
    real("burstiness", 1.0, "Gamma shape of the gaps: 1 Poisson, below 1 bursts.", **fv)
    number("seed", 0, "Of prompts, lengths, samples and arrivals.", **fv)
    number("num_warmup", 0, "Requests sent first and left out.", lower_bound=0, **fv)
    text("goodput", "", "Targets, such as ttft_ms:500,itl_ms:50,e2e_ms:9000.", **fv)
    text("json", "", "Also write the report there.", **fv)
    switch("progress", True, "Show a progress bar on stderr.", **fv)


def make_requests(values: Any) -> list[GenerateRequest]:
    """Builds the run's requests from the flags. Raises ConfigError."""
    output_len = workload.Lengths(values.output_len) if values.output_len else None
    defaults = workload.RequestDefaults(
        temperature=values.temperature, ignore_eos=values.ignore_eos
    )
    if values.dataset == "synthetic":
        requests = workload.synthetic(
            values.num_requests or 32,
            workload.Lengths(values.input_len),
            output_len or workload.Lengths("128"),
            vocab_size=values.vocab_size,
            defaults=defaults,
            seed=values.seed,
        )
    elif values.dataset_path:
        requests = workload.load(
            values.dataset, values.dataset_path, defaults, output_len=output_len, seed=values.seed
        )
        requests = workload.take(requests, values.num_requests, values.seed)
    else:
        raise ConfigError(f"--dataset={values.dataset} needs --dataset_path")
    return [dataclasses.replace(r, request_class=values.request_class) for r in requests]


def make_backend(values: Any) -> Backend:
    """Builds the client that the flags name; call it inside the event loop. Raises ConfigError."""
    access = access_from_flags(values)
    if values.backend == "jserve":
        return JserveBackend(values.target, access)
    if access.credentials is not None:
        raise ConfigError("--backend=openai takes no --tls flags; give an https --base_url")
    try:
        extra_body = json.loads(values.extra_body)
    except ValueError as error:
        raise ConfigError(f"--extra_body is not JSON: {error}") from error
    return OpenAIBackend(
        values.base_url, model=values.model, api_key=access.api_key, extra_body=extra_body
    )


async def run_load(values: Any, requests: list[GenerateRequest]) -> list[RequestResult]:
    """Warms up, then sends the load that the flags describe.

    Raises ConfigError for bad flags, and JserveError when a warm-up request fails: a server that
    is not there would fail all the others too.
    """
    backend = make_backend(values)
    results: list[RequestResult] = []
    try:
        if values.num_warmup:
            warm: list[RequestResult] = []
            sample = workload.warmup(requests, values.num_warmup, values.seed)
            await closed_loop(backend, sample, values.concurrency or 1, warm.append)
            if errors := [r.error for r in warm if r.error]:
                raise JserveError(f"a warm-up request failed: {errors[0]}")
        with tqdm(total=len(requests), unit="request", disable=not values.progress) as bar:

            def on_result(result: RequestResult) -> None:
                results.append(result)
                bar.update()

            if values.concurrency and not values.request_rate:
                await closed_loop(backend, requests, values.concurrency, on_result)
            else:
                rate = values.request_rate or math.inf
                arrivals = workload.arrival_times(
                    len(requests), rate, values.burstiness, values.seed
                )
                await open_loop(backend, requests, arrivals, values.concurrency, on_result)
    finally:
        await backend.close()
    return results


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; all settings are --flags")
    values = flags.FLAGS
    try:
        targets = parse_goodput(values.goodput)
        requests = make_requests(values)
        report = summarize(asyncio.run(run_load(values, requests)), targets)
    except JserveError as error:
        print(f"bench_serving: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench_serving: interrupted", file=sys.stderr)
        return 130
    print(table(report))
    if values.json:
        # All of this module's flags, so that the figures say how they came to be.
        own = flags.FLAGS.flags_by_module_dict()[define_flags.__module__]
        report["settings"] = {f.name: f.value for f in own if f.name not in _UNRECORDED}
        Path(values.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["num_ok"] else 1


def run() -> NoReturn:
    """Entry point of scripts/bench_serving.py."""
    define_flags()
    list_in_help()
    app.run(main)
