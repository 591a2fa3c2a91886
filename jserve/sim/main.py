"""Predicts how a server would do under a load, without a device: the engine's own scheduler, driven
by a clock and a model of how long steps take.

What arrives: a recorded trace, or a drawn mix.
  scripts/simulate.py --trace=AzureLLMInferenceTrace_conv.csv --rate_scale=2
  scripts/simulate.py --trace=requests.jsonl                    # a server's --request_log
  scripts/simulate.py --requests=5000 --rate=20 --burstiness=0.5 --input_len=100:2000
  scripts/simulate.py --requests=5000 --rate=20 --tenants=flood:0.9,a:0.05,b:0.05 --policy=fair \\
    --mix='chat:share=0.8,input=64-256,output=16-64;batch:share=0.2,input=1500,output=200' \\
    --request_classes='chat:ttft_slo_ms=500,itl_slo_ms=50;batch:priority=10'
  scripts/simulate.py --requests=1000 --closed_loop=64          # so many at a time

How long a step takes: a roofline (the default), a fit of a server's --step_log, or plain costs.
  scripts/simulate.py --device='TPU v6 lite' --model_config=path/to/config.json
  scripts/simulate.py --fit_step_log=steps.jsonl
  scripts/simulate.py --step_time=constant_ms:5,per_prefill_token_us:40,per_decode_row_us:10

What comes out: a report; also as JSON, as a picture, as one HTML page.
  scripts/simulate.py --goodput=ttft_ms:500,itl_ms:50 --json=run.json --plot=run.png --html=run.html
  scripts/simulate.py --compare policy=fcfs,priority,sjf --plot=policies.png
  scripts/simulate.py --sweep max_num_seqs=8,16,32,64 --compare policy=fcfs,sjf --html=sweep.html
  scripts/simulate.py --recommend --tpot_slo_ms=50 --closed_loop=256
  scripts/simulate.py --step_log=steps.jsonl --html=steps.html  # draws a real engine's steps

Exit codes: 0 done, 1 the settings or files are no good, 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from absl import app, flags

from jserve.errors import ConfigError, JserveError
from jserve.flags import define_flags as define_engine_flags
from jserve.flags import list_in_help
from jserve.sim.model_size import PRESETS
from jserve.sim.output import check_outputs, show_recommendation, show_run, show_runs, show_step_log
from jserve.sim.runs import parse_variants, recommend, run_once, run_variants
from jserve.sim.setup import setup_from_flags
from jserve.sim.step_log import read_step_log
from jserve.sim.timing import DEFAULT_DEVICE, DEFAULT_MODEL, LINEAR, ROOFLINE
from jserve.sim.traces import FORMATS

MAX_CAP = 1024  # that --recommend tries on its own


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of the engine that matter here, and the simulator's own."""
    define_engine_flags(("cache", "scheduler"), values)
    _define_load_flags({"flag_values": values})
    _define_time_flags({"flag_values": values})
    _define_output_flags({"flag_values": values})


def _define_load_flags(fv: Any) -> None:
    text, number, real = flags.DEFINE_string, flags.DEFINE_integer, flags.DEFINE_float
    text("trace", "", "A recorded load; empty: --requests are drawn.", **fv)
    flags.DEFINE_enum("trace_format", "auto", ["auto", *FORMATS], "Of --trace.", **fv)
    real("rate_scale", 1.0, "Arrivals come so many times as fast.", 1e-9, **fv)
    number("limit", 0, "Only so many requests of the load; 0: all.", 0, **fv)
    number("requests", 1000, "How many are drawn without --trace.", 1, **fv)
    real("rate", 0.0, "Drawn arrivals per second; 0: all at once.", 0.0, **fv)
    real("burstiness", 1.0, "Gamma shape of their gaps: 1 Poisson, below 1 bursts.", 0.0, **fv)
    text("input_len", "512", "Prompt tokens: 512, 100:400, or a mix 64:128,1024:2048.", **fv)
    text("output_len", "128", "Output tokens likewise.", **fv)
    number("shared_prefix", 0, "Leading tokens that prompts have in common.", 0, **fv)
    mix = (
        "Classes of drawn requests, each with what differs from the flags above; see the examples."
    )
    text("mix", "", mix, **fv)
    text("tenants", "", "How many tenants, or their shares: flood:0.9,a:0.05,b:0.05.", **fv)
    number("closed_loop", 0, "So many requests at a time; 0: each when it arrives.", 0, **fv)
    number("seed", 0, "Of the drawn load.", **fv)


def _define_time_flags(fv: Any) -> None:
    text, number = flags.DEFINE_string, flags.DEFINE_integer
    number("num_pages", 0, "KV pages; 0: what --device's memory leaves.", 0, **fv)
    number("max_model_len", 0, "Most tokens of a request; 0: the model's limit.", 0, **fv)
    text("device", "", f"Whose roofline times the steps; by default {DEFAULT_DEVICE}.", **fv)
    models = f"Of which model: a folder, a config.json, or {', '.join(PRESETS)}; by default "
    text("model_config", "", models + f"{DEFAULT_MODEL}.", **fv)
    text(
        "roofline", "", f"Other figures than theirs, name:number,...: {', '.join(ROOFLINE)}.", **fv
    )
    text("fit_step_log", "", "Time steps as this --step_log of a real engine does.", **fv)
    text("step_time", "", f"Plain costs, name:number,...: {', '.join(LINEAR)}.", **fv)


def _define_output_flags(fv: Any) -> None:
    text = flags.DEFINE_string
    goodput = "Targets, as ttft_ms:500,itl_ms:50,e2e_ms:9000; empty: the engine's and its classes'."
    text("goodput", "", goodput, **fv)
    text("compare", "", "Runs for each value of a flag: policy=fcfs,sjf.", **fv)
    text("sweep", "", "The same, along the picture's axis: max_num_seqs=8,16,32.", **fv)
    search = "Find the largest --max_num_seqs whose p95 TPOT is within --tpot_slo_ms."
    flags.DEFINE_boolean("recommend", False, search, **fv)
    flags.DEFINE_float("tpot_slo_ms", 50.0, "Target of --recommend.", 0.0, **fv)
    flags.DEFINE_list("candidates", [], "Caps that --recommend may choose; empty: any.", **fv)
    text("step_log", "", "Draw this step log of a real engine; nothing is simulated.", **fv)
    text("json", "", "Also write the figures there.", **fv)
    text("plot", "", "Also draw a picture (PNG) there.", **fv)
    text("html", "", "Also write one self-contained page there.", **fv)


def simulate_from_flags(values: flags.FlagValues) -> None:
    """Does what the flags ask for. Raises ConfigError, and OSError for a file it cannot write."""
    check_outputs(values)
    if values.step_log:
        show_step_log(values, read_step_log(values.step_log))
        return
    variants = [
        parse_variants(flag, text)
        for flag, text in (("compare", values.compare), ("sweep", values.sweep))
        if text
    ]
    if values.recommend:
        if variants:
            raise ConfigError("--recommend varies --max_num_seqs itself; leave out the others")
        found = recommend(values, values.tpot_slo_ms, _candidates(values))
        show_recommendation(values, found)
    elif variants:
        show_runs(values, list(run_variants(values, variants)))
    else:
        show_run(values, run_once(setup_from_flags(values)))


def _candidates(values: flags.FlagValues) -> list[int]:
    try:
        caps = sorted({int(text) for text in values.candidates})
        if caps and caps[0] < 1:
            raise ValueError(caps[0])
    except ValueError as error:
        raise ConfigError(f"--candidates: {error}; give numbers as in 8,16,32") from error
    return caps or list(range(1, min(MAX_CAP, values.max_num_batched_tokens) + 1))


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; all settings are --flags")
    logging.getLogger("scheduler").setLevel(logging.WARNING)  # preemptions are in the report
    try:
        simulate_from_flags(flags.FLAGS)
    except (JserveError, OSError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("simulate: interrupted", file=sys.stderr)
        return 130
    return 0


def run() -> NoReturn:
    """Entry point of scripts/simulate.py and of `jserve-simulate`."""
    define_flags()
    list_in_help()
    sys.modules["__main__"].__doc__ = __doc__  # what absl's --help begins with
    app.run(main)
