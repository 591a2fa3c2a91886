"""The device check itself: that it judges, stops and skips rightly, and runs as a whole."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pallas_kernels.dispatch import Backend
from pallas_kernels.ragged_paged_attention import workloads
from scripts.device_check import __main__ as check
from scripts.device_check.goals import judge
from scripts.device_check.numerics import cases
from scripts.device_check.record import Record, read
from scripts.device_check.sizes import FULL, SMOKE, decode_name, num_copies, prefill_name
from scripts.device_check.trace import _device_intervals, idle_figures

ROOT = Path(__file__).parent.parent
MEASURED = [
    {"part": "numerics", "name": "a", "ok": True},
    {"part": "kernels", "name": "d", "form": "kernel", "bytes": 2**30, "share": 0.9},
    {"part": "kernels", "name": "p", "form": "kernel", "chunk": 2048, "share": 0.7},
    {"part": "engine", "name": "decode 1 rows", "roofline_share": 0.8, "gap_us": 49.0},
    {"part": "engine", "name": "after warm-up", "compilations": 0},
    {"part": "engine", "name": "a step that fails", "recovers": True},
]


def verdicts(*more: dict) -> dict[str, bool | None]:
    return {goal.name: goal.is_met for goal in judge([*MEASURED, *more])}


def test_all_goals_are_met_by_what_meets_them():
    assert set(verdicts().values()) == {True}


WORSE = {
    "numerics": {"part": "numerics", "name": "b", "ok": False},
    "decode attention": MEASURED[1] | {"share": 0.84},
    "prefill attention": MEASURED[2] | {"share": 0.59},
    "engine decode": {"part": "engine", "name": "decode 256 rows", "roofline_share": 0.79},
    "idle gap between steps": {"part": "engine", "name": "decode 16 rows", "gap_us": 50.0},
    "compilations after warm-up": {"part": "engine", "name": "again", "compilations": 1},
    "after a step that fails": {"part": "engine", "name": "again", "recovers": False},
}


@pytest.mark.parametrize("goal", WORSE)
def test_one_measurement_that_misses_a_goal_counts_against_it_alone(goal):
    missed = [name for name, is_met in verdicts(WORSE[goal]).items() if not is_met]
    assert missed == [goal]


def test_a_case_that_broke_is_no_right_result():
    assert verdicts({"part": "numerics", "name": "b", "error": "boom"})["numerics"] is False


@pytest.mark.parametrize(
    "aside",
    [
        MEASURED[1] | {"form": "gather", "share": 0.1},
        MEASURED[1] | {"bytes": 2**20, "share": 0.1},
        MEASURED[2] | {"chunk": 512, "share": 0.1},
        {"part": "numerics", "name": "float32", "skipped": "computes in bfloat16"},
    ],
)
def test_alternatives_and_short_steps_are_not_judged(aside):
    assert set(verdicts(aside).values()) == {True}


def test_what_was_not_measured_is_neither_met_nor_missed():
    assert {goal.is_met for goal in judge([])} == {None}


def test_a_record_keeps_all_lines_but_one_that_was_cut_off(tmp_path):
    record = Record(tmp_path / "records", "kernels")
    record.add("copy", gb_per_s=4300.0)
    with (tmp_path / "records").open("a") as file:
        file.write('{"part": "ker')
    assert read(tmp_path / "records") == [{"part": "kernels", "name": "copy", "gb_per_s": 4300.0}]


@pytest.mark.parametrize(
    ("error", "field"), [(ImportError("no flax"), "skipped"), (ValueError("wrong"), "error")]
)
def test_a_guard_records_what_is_missing_and_what_is_wrong_and_goes_on(tmp_path, error, field):
    record = Record(tmp_path / "records", "engine")
    with record.guard("step"):
        raise error
    [line] = read(tmp_path / "records")
    assert str(error) in line[field]


def test_idle_time_is_what_no_stream_fills():
    us = 1000  # nanoseconds
    steps = [(n * 100 * us, n * 100 * us + 80 * us) for n in range(4)]
    beside = [(n * 100 * us + 10 * us, n * 100 * us + 95 * us) for n in range(3)]
    figures = idle_figures([*beside, *steps], num_steps=3)
    assert figures["gap_us"] == 5
    assert figures["idle_us_per_step"] == 5
    assert figures["busy_share"] == pytest.approx(365 / 380)


def test_many_short_gaps_inside_a_step_do_not_hide_the_one_after_it():
    kernels = [(n * 1000 + k * 10, n * 1000 + k * 10 + 9) for n in range(5) for k in range(50)]
    assert idle_figures(kernels, num_steps=4)["gap_us"] == pytest.approx(0.501)


def plane(name: str, **lines: tuple[int, int]) -> SimpleNamespace:
    """A plane of a profile with an event of (start, duration) in each line."""
    events = {n: [SimpleNamespace(start_ns=s, duration_ns=d)] for n, (s, d) in lines.items()}
    return SimpleNamespace(
        name=name, lines=[SimpleNamespace(name=n, events=e) for n, e in events.items()]
    )


def test_a_gpu_is_judged_by_its_streams_and_a_tpu_by_its_programs():
    programs = {"XLA Modules": (0, 100)}
    gpu = plane(
        "/device:GPU:0", **{"Stream #1(Compute)": (10, 20), "Stream #2": (5, 2)}, **programs
    )
    assert list(_device_intervals([gpu])) == [(10, 30), (5, 7)]
    tpu = plane("/device:TPU:0", **programs, **{"XLA Ops": (1, 2)})
    assert list(_device_intervals([plane("/host:CPU", python=(0, 9)), tpu])) == [(0, 100)]


def test_decode_cases_have_a_token_for_each_row_and_no_case_a_negative_padding():
    for name, case in cases(is_small=False):
        paddings = (case.padding_tokens, case.padding_rows, case.spare_pages, case.spare_columns)
        assert min(paddings) >= 0, name
        num_tokens = sum(q_len for _, q_len in case.rows) + case.padding_tokens
        if name.startswith("decode"):
            assert num_tokens == len(case.rows) + case.padding_rows, name


def test_names_of_steps_are_those_of_the_workloads():
    heads = workloads.HEADS["smollm2"]
    assert workloads.decode(heads, 4, 64, 16).name == decode_name(4, 64)
    assert workloads.prefill(heads, 32, 16, 16).name == prefill_name(32, 16)


@pytest.mark.parametrize("sizes", [FULL, SMOKE])
def test_heads_of_other_frameworks_are_those_of_the_kernels(sizes):
    heads = workloads.HEADS[sizes.heads]
    assert tuple(heads)[:3] == (sizes.num_heads, sizes.num_kv_heads, sizes.head_dim)


def test_dense_keys_and_values_are_rotated_among_more_than_a_cache_holds():
    for num_rows, kv_len in FULL.decode:
        one = workloads.decode(workloads.HEADS[FULL.heads], num_rows, kv_len, FULL.page_size)
        copies = num_copies(num_rows, kv_len, FULL)
        assert copies * one.work(Backend.XLA).hbm_bytes > 60e6  # an H200's second-level cache


def run_part(tmp_path, script: str, limit_s: float) -> list[dict]:
    """Runs the part in PyTorch's Python, for which `script` stands in."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    arguments = argparse.Namespace(torch_python=str(python), out=tmp_path, smoke=True)
    check._run_part("pytorch", tmp_path / "records", limit_s, arguments)
    return read(tmp_path / "records")


def test_a_part_that_hangs_is_stopped_at_its_limit(tmp_path):
    [line, _] = run_part(tmp_path, '[ "$1" = -c ] || exec sleep 60', limit_s=1)
    assert line["error"] == "stopped after 1 s"


def test_a_part_that_crashes_is_recorded(tmp_path):
    [line, _] = run_part(tmp_path, '[ "$1" = -c ] || exit 3', limit_s=1)
    assert line["error"] == "the process ended with 3"


def test_a_part_whose_packages_are_missing_is_skipped_by_their_names(tmp_path):
    [line] = run_part(tmp_path, "echo torch", limit_s=1)
    assert line["skipped"].endswith("has no torch")


def test_a_part_for_which_no_time_is_left_is_skipped(tmp_path):
    [line] = run_part(tmp_path, "exit 3", limit_s=0.5)
    assert line["skipped"] == "no time left"


@pytest.mark.slow
def test_the_whole_check_runs_on_a_cpu_in_small(tmp_path):
    command = ["scripts/device_check.sh", f"--out={tmp_path}", "--smoke",
               f"--python={sys.executable}"]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads((tmp_path / "device_check.json").read_text())
    whole = {r["name"] for r in result["records"] if r["name"].endswith("as a whole")}
    assert whole >= {f"{part} as a whole" for part in ("numerics", "kernels", "engine", "tune")}
    goals = {goal["name"]: goal for goal in result["goals"]}
    assert goals["numerics"]["is_met"] is True
    assert goals["compilations after warm-up"]["got"] == 0
    assert goals["after a step that fails"]["is_met"] is True
    assert goals["engine decode"]["got"] > 0


def test_a_part_that_does_not_exist_is_refused_by_name(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["device_check", f"--out={tmp_path}", "--parts=engine,typo"])
    with pytest.raises(SystemExit):
        check.main()
    assert "'typo' is unknown; use some of numerics," in capsys.readouterr().err
