"""The step log and the request log: what stands in them, when, at what cost, and what a full disk
does."""

from __future__ import annotations

import json
import logging
import time
import timeit
from pathlib import Path

import numpy as np
import pytest

from jserve.engine.line_log import LineLog
from jserve.engine.request_log import RequestLog
from jserve.engine.step_log import FIELDS, StepLog
from jserve.errors import ConfigError
from jserve.messages import Timings
from jserve.sim.step_log import read_step_log
from scheduler.request import Request, SamplingView

FULL_DISK = "/dev/full"
TIMEOUT_S = 20.0
STEP_LIMIT_S = 10e-6
STEP = (12.5, 0.0125, 3, 64, 2, 900, 4096, 128, 8, 70, 5, 4, 5, 1, 0.0115)
TIMINGS = Timings(queue_s=0.25, ttft_s=0.5, e2e_s=2.0, itl_s=None)


def request_of(prompt, **fields) -> Request:
    return Request("r", prompt, SamplingView(max_tokens=9), **fields)


def test_a_step_log_is_read_back_as_it_was_written(tmp_path):
    path = str(tmp_path / "steps.jsonl")
    Path(path).write_text("of the run before\n")
    log = StepLog(path)
    log.begin({"model": "m", "page_size": 16, "num_pages": 99, "buckets": [[16, 4, True]]})
    log.add(STEP)
    log.add(STEP)
    log.close()
    read = read_step_log(path)
    assert list(read.steps()) == [dict(zip(FIELDS, STEP, strict=True))] * 2
    assert read.header["model"] == "m"
    assert [tuple(bucket) for bucket in read.buckets] == [(16, 4, True)]


def test_a_step_costs_less_than_10_microseconds(tmp_path):
    log = StepLog(str(tmp_path / "steps.jsonl"))
    cost = min(timeit.repeat(lambda: log.add(STEP), number=100, repeat=200)) / 100
    log.close()
    assert cost < STEP_LIMIT_S


def test_a_request_is_one_record_with_its_time_of_arrival_on_the_wall(tmp_path):
    log = RequestLog(str(tmp_path / "r.jsonl"), with_prompts=False, wall_clock=lambda: 1e9)
    request = request_of([1, 2, 3], tenant="t", request_class="c", priority=-2)
    request.num_cached_tokens, request.num_preemptions = 2, 1
    log.add(request, 7, TIMINGS, "stop")
    log.close()
    assert json.loads((tmp_path / "r.jsonl").read_text()) == {
        "arrival_s": 1e9 - 2.0,
        "prompt_tokens": 3,
        "output_tokens": 7,
        "tenant": "t",
        "request_class": "c",
        "priority": -2,
        "cached_tokens": 2,
        "queue_s": 0.25,
        "ttft_s": 0.5,
        "e2e_s": 2.0,
        "itl_s": None,
        "finish_reason": "stop",
        "num_preemptions": 1,
    }


@pytest.mark.parametrize("prompt", [[5, 6], np.array([5, 6], np.int32)])
def test_prompts_are_written_only_when_asked_for_and_a_restart_adds_to_the_log(tmp_path, prompt):
    path = tmp_path / "r.jsonl"
    for with_prompts in (True, False):
        log = RequestLog(str(path), with_prompts=with_prompts)
        log.add(request_of(prompt), 1, TIMINGS, "stop")
        log.close()
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["prompt_token_ids"] == [5, 6]
    assert "prompt_token_ids" not in second


def wait_until(condition) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < give_up, "the line was never flushed"


def test_lines_reach_the_file_though_nothing_follows_them(tmp_path):
    path = tmp_path / "lines"
    log = LineLog("step_log", str(path), "w", flush_s=0.001)
    log.add("last")
    wait_until(lambda: path.read_text() == "last\n")
    log.close()
    log.close()


def test_a_renamed_file_keeps_its_lines_and_a_new_one_gets_those_that_follow(tmp_path):
    path, rotated = tmp_path / "log", tmp_path / "log.1"
    log = LineLog("access_log", str(path), "a", flush_s=0.001)
    log.add("before")
    wait_until(lambda: path.read_text() == "before\n")
    path.rename(rotated)
    log.add("after")
    wait_until(path.exists)
    log.close()
    assert (rotated.read_text(), path.read_text()) == ("before\n", "after\n")


def test_a_dash_is_standard_output_which_stays_open(capsys):
    log = LineLog("access_log", "-", "a")
    log.add("one")
    log.close()
    print("two")
    assert capsys.readouterr().out == "one\ntwo\n"


def test_a_full_disk_is_reported_once_and_serving_goes_on(caplog):
    log = LineLog("step_log", FULL_DISK, "w", flush_s=0.001)
    with caplog.at_level(logging.ERROR):
        log.add("x" * 100_000)
        log._thread.join(TIMEOUT_S)  # it ends by itself
        log.add("more")
        log.close()
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


def test_a_file_that_cannot_be_opened_is_a_config_error_with_its_flag(tmp_path):
    for log, flag in ((StepLog, "step_log"), (RequestLog, "request_log")):
        options = {"with_prompts": False} if log is RequestLog else {}
        with pytest.raises(ConfigError, match=f"--{flag}={tmp_path}"):
            log(str(tmp_path), **options)
