"""The reader of step logs, against files that the engine's own writer wrote."""

from __future__ import annotations

import json

import pytest

from jserve.engine.step_log import FIELDS, StepLog
from jserve.errors import ConfigError
from jserve.sim.step_log import read_step_log
from scheduler.bucket import Bucket

STEP = dict.fromkeys(FIELDS, 0) | {"t_s": 100.0, "step_s": 0.02}


def a_log(tmp_path, steps, **header):
    path = str(tmp_path / "steps.jsonl")
    writer = StepLog(path)
    writer.begin(header)
    for step in steps:
        writer.add(tuple((STEP | step)[name] for name in FIELDS))
    writer.close()
    return path


def test_steps_are_drawn_and_fitted_as_they_were_logged(tmp_path):
    steps = [
        {"prefill_tokens": 64, "chunks": 2, "context_tokens": 300, "attended_pairs": 9000},
        {"t_s": 100.5, "step_s": 0.01, "decode_rows": 3, "preemptions": 1, "predicted_s": 0.011},
    ]
    log = read_step_log(a_log(tmp_path, steps, buckets=[[4, 4, True], [32, 4, False]]))
    assert log.buckets == [Bucket(4, 4, True), Bucket(32, 4, False)]
    (shape, seconds), (other, _) = log.samples()
    assert (shape.num_rows, shape.num_tokens, shape.context_tokens) == (2, 64, 300)
    assert (shape.attended_pairs, seconds) == (9000, 0.02)
    assert (other.num_rows, other.decode_rows, other.prefill_tokens) == (3, 3, 0)
    columns = log.timeline().columns()
    assert columns["start_s"].tolist() == [0.0, 0.5]
    assert columns["busy_s"].tolist() == [0.02, 0.01]
    assert columns["preemptions"].tolist() == [0.0, 1.0]
    assert columns["predicted_s"].tolist() == [0.0, 0.011]


def test_a_last_line_that_a_crash_cut_off_is_left_out(tmp_path):
    path = a_log(tmp_path, [{}, {}])
    with open(path, "a") as file:
        file.write("[100.7,0.0")
    assert len(list(read_step_log(path).steps())) == 2


def test_a_bad_line_is_named(tmp_path):
    path = a_log(tmp_path, [{}])
    with open(path, "a") as file:
        file.write("[1,2]\n")
    with pytest.raises(ConfigError, match=r"steps.jsonl, line 3: not a step"):
        list(read_step_log(path).steps())


@pytest.mark.parametrize(
    "first",
    ["", "[]", '{"arrival_s": 1}', json.dumps({"step_log": 2, "fields": FIELDS}), "\x00"],
)
def test_a_file_of_another_kind_is_refused(tmp_path, first):
    path = tmp_path / "other"
    path.write_text(first + "\n")
    with pytest.raises(ConfigError, match="is no step log"):
        read_step_log(str(path))
