"""The simulator's command, from flags to text, JSON and pictures, with the real scheduler."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from absl import flags
from PIL import Image

from jserve.engine.step_log import FIELDS
from jserve.errors import ConfigError
from jserve.sim.main import define_flags, simulate_from_flags
from jserve.sim.model_size import model_size, read_model_config
from jserve.sim.plot import Pieces
from jserve.sim.setup import setup_from_flags
from scheduler.step_shape import StepShape
from tests.sim.test_step_log import a_log

ROOT = Path(__file__).parents[2]
COSTS = "--step_time=constant_ms:5,per_prefill_token_us:40,per_decode_row_us:100"
LOAD = ("--requests=40", "--closed_loop=30", "--input_len=20:60", "--output_len=10:30", COSTS)


def flag_values(*arguments):
    values = flags.FlagValues()
    define_flags(values)
    values(["simulate", *arguments])
    return values


def simulated(tmp_path, *arguments):
    """Returns the JSON of a run with these flags."""
    path = tmp_path / "run.json"
    simulate_from_flags(flag_values(*arguments, f"--json={path}"))
    return json.loads(path.read_text())


# ---- one run ----


def test_a_lone_request_takes_what_its_steps_cost(tmp_path):
    costs = "--step_time=constant_ms:5,per_prefill_token_us:40"
    report = simulated(tmp_path, "--requests=1", "--input_len=100", "--output_len=11", costs)
    assert report["ttft_ms"]["max"] == pytest.approx(5 + 4)
    assert report["itl_ms"]["max"] == pytest.approx(5)
    assert report["e2e_ms"]["max"] == pytest.approx(9 + 10 * 5)
    assert report["utilisation"]["steps"] == 11


def test_all_requests_are_accounted_for(tmp_path, capsys):
    report = simulated(tmp_path, *LOAD, "--max_num_seqs=8")
    assert report["num_complete"] == 40
    assert report["finish_reasons"] == {"length": 40}
    assert report["utilisation"]["decode_rows_per_step"] <= 8
    assert report["settings"]["closed_loop"] == 30
    shown = capsys.readouterr().out
    assert "requests     40 complete of 40" in shown
    assert re.search(r"^TPOT( +[\d.]+){6}$", shown, re.MULTILINE)


def test_shared_prefixes_are_found_in_the_cache(tmp_path):
    arguments = (
        "--requests=20",
        "--closed_loop=1",
        "--input_len=200",
        "--shared_prefix=128",
        COSTS,
    )
    cached = simulated(tmp_path, *arguments)["cached_prompt_tokens"]
    assert cached == 19 * 128
    assert simulated(tmp_path, *arguments, "--noenable_prefix_cache")["cached_prompt_tokens"] == 0


def test_rate_scale_and_limit_change_the_load(tmp_path):
    load = ("--requests=50", "--rate=5", "--input_len=20", "--output_len=2", COSTS)
    slow = simulated(tmp_path, *load)
    fast = simulated(tmp_path, *load, "--rate_scale=2")
    assert fast["requests_per_s"] == pytest.approx(2 * slow["requests_per_s"], rel=0.01)
    assert simulated(tmp_path, *load, "--limit=30")["num_requests"] == 30


def test_requests_beyond_the_bounds_are_counted(tmp_path, capsys):
    load = ("--requests=30", "--input_len=100,200", "--output_len=5", COSTS)
    report = simulated(
        tmp_path,
        *load,
        "--max_model_len=150",
        "--max_queued_requests=4",
        "--max_num_seqs=2",
        "--goodput=ttft_ms:9e9",
    )
    [(why, skipped)] = report["skipped"].items()
    assert "150 tokens" in why
    assert report["num_complete"] + report["num_refused"] + skipped == 30
    assert report["num_refused"] > 0
    share = report["num_complete"] / (30 - skipped)
    assert report["goodput"]["share_percent"] == pytest.approx(100 * share)
    assert "refused" in capsys.readouterr().out


def test_class_targets_are_what_goodput_means_without_the_flag(tmp_path):
    classes = "--request_classes=chat:ttft_slo_ms=1;batch:priority=5"
    report = simulated(tmp_path, *LOAD, "--mix=chat:share=1;batch:share=1", classes)
    shares = {name: g["goodput"]["share_percent"] for name, g in report["classes"].items()}
    assert shares == {"batch": 100, "chat": 0}


def test_a_logged_request_gets_the_priority_that_its_class_has_in_the_simulation(tmp_path):
    """Interactive ones come late; only with priorities do they start before the batch ones."""
    trace = tmp_path / "requests.jsonl"
    kinds = [("batch", 0.0)] * 20 + [("chat", 0.5)] * 4
    records = [
        {"arrival_s": at, "prompt_tokens": 50, "output_tokens": 60, "request_class": kind}
        for kind, at in kinds
    ]
    trace.write_text("\n".join(map(json.dumps, records)))
    queue_ms = {}
    for classes in ("chat;batch", "chat;batch:priority=10"):
        report = simulated(
            *(tmp_path, f"--trace={trace}", COSTS, "--max_num_seqs=2"),
            f"--request_classes={classes}",
        )
        queue_ms[classes] = report["classes"]["chat"]["queue_ms"]["mean"]
    assert queue_ms["chat;batch:priority=10"] < 0.5 * queue_ms["chat;batch"]


def test_a_recorded_trace_is_simulated(tmp_path, capsys):
    trace = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:17:0{i},{100 + i},{5 + i}" for i in range(4)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    report = simulated(tmp_path, f"--trace={trace}", COSTS)
    assert report["prompt_tokens"] == 406
    assert report["output_tokens"] == 26
    assert "timed by     --step_time=constant_ms:5" in capsys.readouterr().out


# ---- several runs ----


def test_compare_and_sweep_run_every_combination(tmp_path, capsys):
    picture = tmp_path / "sweep.png"
    report = simulated(
        *(tmp_path, *LOAD, "--compare=policy=fcfs,sjf", "--sweep=max_num_seqs=2,4,8"),
        f"--plot={picture}",
    )
    settings = [(r["settings"]["policy"], r["settings"]["max_num_seqs"]) for r in report["runs"]]
    assert settings == [(p, n) for p in ("fcfs", "sjf") for n in ("2", "4", "8")]
    throughput = [r["report"]["output_tokens_per_s"] for r in report["runs"][:3]]
    assert throughput == sorted(throughput)
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["policy", "max_num_seqs"]
    assert len(rows) == 6
    assert Image.open(picture).size[0] > 1000


def test_the_recommended_cap_is_the_last_one_within_the_target(tmp_path, capsys):
    load = ("--requests=60", "--closed_loop=40", "--input_len=20", "--output_len=20", COSTS)
    found = simulated(
        tmp_path, *load, "--recommend", "--tpot_slo_ms=7", "--candidates=2,4,8,16,32"
    )["recommendation"]
    assert found["largest_within"]["tpot_p95_ms"] <= 7 < found["smallest_beyond"]["tpot_p95_ms"]
    caps = [found[end]["max_num_seqs"] for end in ("largest_within", "smallest_beyond")]
    assert caps[1] == 2 * caps[0]
    shown = capsys.readouterr().out
    assert f"it crosses the target by {caps[1]}" in shown
    every = simulated(tmp_path, *load, f"--sweep=max_num_seqs={caps[0]},{caps[1]}")
    tpots = [run["report"]["tpot_ms"]["p95"] for run in every["runs"]]
    assert tpots[0] <= 7 < tpots[1]


def test_targets_that_every_cap_or_none_keeps_are_said_to_be_so(tmp_path, capsys):
    search = (*LOAD, "--recommend", "--candidates=2,4")
    found = simulated(tmp_path, *search, "--tpot_slo_ms=1000")["recommendation"]
    assert found["largest_within"]["max_num_seqs"] == 4
    assert found["smallest_beyond"] is None
    found = simulated(tmp_path, *search, "--tpot_slo_ms=1")["recommendation"]
    assert found["largest_within"] is None
    assert "even --max_num_seqs=2 has p95 TPOT" in capsys.readouterr().out


# ---- what steps are timed by ----


def test_llama_3_8b_has_the_size_it_is_known_for():
    size = model_size(read_model_config("llama-3-8b"))
    assert size.memory_bytes == pytest.approx(2 * 8.03e9, rel=0.001)
    assert size.kv_bytes_per_token == 131_072
    assert size.flops_per_token == pytest.approx(2 * 6.98e9, rel=0.001)


def test_a_tied_embedding_is_counted_once():
    size = model_size(read_model_config("smollm2-135m"))
    assert size.memory_bytes == size.weight_bytes == pytest.approx(2 * 134.5e6, rel=0.001)


def test_a_config_json_or_its_folder_names_a_model():
    folder = ROOT / "tests/data/models/qwen3"
    assert read_model_config(str(folder)) == read_model_config(str(folder / "config.json"))


def test_the_device_decides_how_many_pages_there_are():
    pages = {
        device: setup_from_flags(flag_values(f"--device={device}")).config.num_pages
        for device in ("NVIDIA H200", "TPU v6 lite")
    }
    page_bytes = 64 * 131_072
    assert pages["NVIDIA H200"] == pytest.approx((0.9 * 141e9 - 16.06e9) / page_bytes, rel=0.001)
    assert pages["TPU v6 lite"] < pages["NVIDIA H200"] / 5
    with pytest.raises(ConfigError, match=r"leave no room for KV pages"):
        setup_from_flags(flag_values("--device=TPU v5 lite"))


def test_a_decode_step_of_the_roofline_takes_its_bytes_over_bandwidth():
    setup = setup_from_flags(flag_values("--roofline=efficiency:1,overhead_us:0"))
    shape = StepShape(1, 1, 0, 1000, 0)
    expected = (2 * 7.504e9 + 1000 * 131_072) / 4800e9
    assert setup.step_time.predict(shape) == pytest.approx(expected, rel=0.001)


def test_a_run_can_be_timed_by_a_real_engines_step_log(tmp_path, capsys):
    steps = [
        {"t_s": i * 0.02, "step_s": 0.004 + 0.001 * rows, "decode_rows": rows, "running": rows}
        | {"context_tokens": 50 * rows}
        for i, rows in enumerate([1, 2, 3, 4, 5, 6, 7, 8] * 30)
    ]
    steps += [
        {"t_s": 5 + i * 0.02, "step_s": 0.02, "prefill_tokens": 30, "chunks": 1} for i in range(40)
    ]
    buckets = [[1, 1, True], [4, 4, True], [8, 8, True], [32, 4, False], [64, 8, False]]
    path = a_log(tmp_path, steps, buckets=buckets, page_size=16, num_pages=500)
    report = simulated(
        *(tmp_path, f"--fit_step_log={path}", "--requests=20", "--closed_loop=8"),
        *("--max_num_seqs=8", "--max_num_batched_tokens=64", "--input_len=30", "--output_len=40"),
    )
    assert re.search(r"fit of 280 steps of .*off by \d+\.\d %", report["timed_by"])
    assert 3 < report["itl_ms"]["p50"] < 20
    assert setup_from_flags(flag_values(f"--fit_step_log={path}")).config.num_pages == 500


# ---- pictures ----


def parsed_page(path):
    """Returns a page's text and its SVG elements, parsed."""
    page = Path(path).read_text()
    svgs = re.findall(r"<figure>(<svg.*?</svg>)</figure>", page, re.DOTALL)
    return page, [ElementTree.fromstring(svg) for svg in svgs]


def texts(svg):
    return {"".join(e.itertext()) for e in svg.iter("{http://www.w3.org/2000/svg}text")}


def test_a_page_loads_nothing_and_shows_distributions_and_the_timeline(tmp_path):
    path, picture = tmp_path / "run.html", tmp_path / "run.png"
    arguments = (*LOAD, "--rate=20", "--tenants=<b>:1,c:1", "--num_pages=60")
    simulate_from_flags(flag_values(*arguments, f"--html={path}", f"--plot={picture}"))
    page, (distributions, timeline) = parsed_page(path)
    assert {"TTFT, ms", "ITL, ms", "E2E, ms"} <= texts(distributions)
    assert {"decode rows", "prefill tokens", "KV pages (of 59 in the pool)"} <= texts(timeline)
    loads = re.findall(r'(?:src|href)="(?!#)[^"]*"|url\((?!#)[^)]*\)|@import|<script', page)
    assert loads == []
    assert "prefers-color-scheme: dark" in page
    assert "currentColor" in page
    assert "&lt;b&gt;" in page
    assert "<td><b>" not in page
    assert Image.open(picture).size[1] > 1000


def test_the_page_of_a_step_log_draws_it_without_simulating(tmp_path, capsys):
    steps = [
        {"t_s": i * 0.03, "step_s": 0.02, "decode_rows": i % 5, "predicted_s": 0.019}
        for i in range(50)
    ]
    path = a_log(tmp_path, steps, num_pages=100, model="tiny")
    page_path = tmp_path / "steps.html"
    report = simulated(tmp_path, f"--step_log={path}", f"--html={page_path}")
    assert report["steps"] == 50
    assert report["busy_percent"] == pytest.approx(100 * 1.0 / (49 * 0.03 + 0.02))
    page, (_, timeline) = parsed_page(page_path)
    assert "model tiny" in page
    assert {"predicted", "decode rows"} <= texts(timeline)
    assert "without prompts" in capsys.readouterr().out


def test_a_pause_between_steps_is_drawn_as_one():
    start_s, end_s = np.array([0.0, 1.0, 5.0]), np.array([1.0, 2.0, 6.0])
    pages = np.array([3.0, 7.0, 2.0])
    pieces = Pieces({"start_s": start_s, "end_s": end_s, "pages_cached": pages})
    assert pieces.of("pages_cached").tolist() == [3, 7, 0, 2]
    assert pieces.of("pages_cached", held=True).tolist() == [3, 7, 7, 2]
    assert pieces.edges.tolist() == [0, 1, 2, 5, 6]


def test_an_empty_step_log_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no step"):
        simulate_from_flags(flag_values(f"--step_log={a_log(tmp_path, [])}"))


# ---- settings ----


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--policy=lifo"], "use one of fcfs"),
        (["--device=Abacus"], "is none of TPU v4"),
        (["--step_time=price:3"], "'price:3' is not understood; use constant_ms"),
        (["--step_time=constant_ms:-1"], "0 or more"),
        (["--roofline=efficiency:0"], "above 0"),
        ([COSTS, "--roofline=efficiency:1"], "exclude each other"),
        (["--model_config=/nowhere"], "one of llama-3-8b"),
        (["--compare=policy=fcfs"], "two values at least"),
        (["--sweep=nothing=1,2"], "there is no --nothing to vary"),
        (["--sweep=max_num_seqs=1,x"], "--max_num_seqs=x"),
        (["--recommend", "--candidates=0,4"], "--candidates"),
        (["--recommend", "--sweep=policy=fcfs,sjf"], "leave out the others"),
        (["--requests=2", "--input_len=9000"], "no request was simulated.*8192 tokens"),
        (["--html=/nowhere/at/all.html"], "no such folder"),
        ([COSTS, "--swap_space_bytes=1000000"], "give --model_config"),
        (["--goodput=joy:3"], "--goodput=joy:3 is not understood"),
        (["--rate=2", "--burstiness=0"], "--burstiness must be above 0"),
    ],
)
def test_settings_that_cannot_work_are_named_with_the_remedy(arguments, why):
    with pytest.raises(ConfigError, match=why):
        simulate_from_flags(flag_values(*arguments))


def test_the_command_says_what_is_wrong_in_one_line_and_shows_its_examples():
    def command(argument):
        return subprocess.run(
            [sys.executable, ROOT / "scripts/simulate.py", argument],
            capture_output=True,
            text=True,
            check=False,
        )

    failed = command("--trace=/nowhere")
    assert failed.returncode == 1
    assert re.fullmatch(r"simulate: /nowhere cannot be read.*\n", failed.stderr)
    shown = command("--help").stdout
    assert "scripts/simulate.py --recommend" in shown
    for name in re.findall(r"scripts/simulate.py.*?--(\w+)", shown):
        assert name in flag_values() or name == "help"


def test_the_fields_of_a_step_log_hold_all_that_the_timeline_shows():
    from jserve.sim.timeline import COUNTS

    assert set(COUNTS) <= set(FIELDS)
