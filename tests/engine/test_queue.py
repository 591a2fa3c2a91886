"""The queue as its callers meet it: bounds, deadlines, classes, targets and idle waits."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from jserve.engine.engine import MAX_IDLE_S, MIN_IDLE_S
from jserve.engine.request_log import RequestLog
from jserve.engine.step_log import StepLog
from jserve.errors import DeadlineExceeded, Overloaded
from jserve.llm import LLM
from jserve.sim.step_log import read_step_log
from scheduler.budget import REASONS
from scheduler.config import RequestClass
from tests.engine.tiny import MAX_MODEL_LEN, answer, asking, joined, run, tiny

CHAT = RequestClass(name="chat", ttft_slo_s=1.0, itl_slo_s=0.5)
BULK = RequestClass(name="bulk", priority=10, max_num_seqs=2)


def test_prompt_tokens_beyond_the_bound_are_overloaded_and_have_room_again_later():
    t = tiny(max_num_seqs=1, max_queued_tokens=10)
    t.engine.add(asking("runs", [1], 5))
    before = t.engine.step()
    t.engine.add(asking("a", [1] * 6, 2))
    with pytest.raises(Overloaded, match=r"6 prompt tokens are queued; 5 more exceed .* 10"):
        t.engine.add(asking("b", [2] * 5, 2))
    t.engine.add(asking("c", [3] * 4, 2))
    assert t.value("requests_refused_total", limit="tokens") == 1
    t.engine.abort("a")
    t.engine.add(asking("b", [2] * 5, 2))
    assert set(joined(before + run(t.engine))) == {"runs", "b", "c"}
    t.assert_idle()


def test_a_prompt_longer_than_the_bound_is_served_when_nothing_else_waits():
    t = tiny(max_queued_tokens=10)
    request = asking("long", [1] * (MAX_MODEL_LEN - 2), 2)
    t.engine.add(request)
    assert joined(run(t.engine))["long"].token_ids == answer(request)


def test_preempted_requests_return_to_a_queue_that_is_full_by_both_bounds():
    requests = [asking(f"r{i}", [i + 1, i + 2], 30) for i in range(4)]
    t = tiny(num_pages=1 + 14, max_queued=1, max_queued_tokens=2, enable_prefix_cache=False)
    before = []
    for request in requests:
        t.engine.add(request)
        before += t.engine.step()
    t.engine.add(asking("waits", [9, 9], 3))
    with pytest.raises(Overloaded):
        t.engine.add(asking("refused", [9], 3))
    outputs = joined(before + run(t.engine))
    assert t.value("preemptions_total") == t.value(
        "preemptions_by_cause_total", cause="no free page"
    )
    assert t.value("preemptions_total") > 0
    assert all(outputs[r.request_id].last.finish_reason == "length" for r in requests)
    t.assert_idle()


def test_O44_a_queue_deadline_ends_what_has_not_started_and_nothing_else():
    t = tiny(max_num_seqs=1, queue_timeout_s=1.0, classes=(CHAT,), enable_prefix_cache=False)
    for i in range(3):
        t.engine.add(asking(f"r{i}", [i + 1] * 3, 8))
    t.engine.add(asking("hasty", [9], 8, queue_timeout_s=0.5, request_class="chat", priority=9))
    before = t.engine.step()
    t.clock.now = 0.75
    before += t.engine.step()
    t.clock.now = 1.25
    outputs = joined(before + run(t.engine))
    assert outputs["r0"].last.finish_reason == "length"
    waits = {"hasty": "0.750 s", "r1": "1.250 s", "r2": "1.250 s"}
    for name, wait in waits.items():
        last = outputs[name].last
        assert last.finish_reason == "deadline"
        assert isinstance(last.error, DeadlineExceeded)
        assert f"waited {wait} in the queue without starting" in str(last.error)
    assert t.device.num_tokens == 3 + 7
    assert t.value("slo_missed_total", **{"class": "chat", "kind": "ttft"}) == 1
    t.assert_idle()


def test_classes_have_their_caps_and_an_attained_or_missed_target_is_counted():
    t = tiny(classes=(CHAT, BULK), overlap=False)
    for i in range(3):
        t.engine.add(asking(f"bulk{i}", [i + 1], 3, request_class="bulk"))
    t.engine.add(asking("chat", [7], 3, request_class="chat"))
    assert [r.priority for r in t.engine.scheduler.waiting] == [10, 10, 10, 0]
    updates = []
    for now in (0.0, 0.25, 2.0):  # gaps of 0.25 s and 1.75 s
        t.clock.now = now
        updates += t.engine.step()
        assert sum(r.request_class == "bulk" for r in t.engine.scheduler.running) <= 2
    run(t.engine)
    for kind, attained, missed in (("ttft", 1, 0), ("itl", 1, 1)):
        labels = {"class": "chat", "kind": kind}
        assert t.value("slo_attained_total", **labels) == attained
        assert t.value("slo_missed_total", **labels) == missed
    assert t.value("slo_missed_total", **{"class": "bulk", "kind": "itl"}) is None
    t.assert_idle()


def test_an_engine_that_can_do_nothing_says_for_how_long():
    t = tiny(batching="dynamic", batch_window_s=5.0)
    t.engine.add(asking("a", [1, 2], 2))
    assert t.engine.idle_s() == 0
    assert t.engine.step() == []
    assert t.engine.idle_s() == MAX_IDLE_S
    t.clock.now = 4.5
    assert t.engine.idle_s() == 0.5
    t.clock.now = 4.9999
    assert t.engine.idle_s() == MIN_IDLE_S
    t.engine.add(asking("b", [1, 2], 2))
    assert t.engine.idle_s() == 0, "it may fill the group"
    t.engine.step()
    t.clock.now = 5.0
    assert len(joined(run(t.engine))) == 2


def test_the_offline_driver_sleeps_while_a_group_fills(monkeypatch):
    t = tiny(batching="dynamic", batch_window_s=2.5)
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        t.clock.now += seconds

    monkeypatch.setattr("jserve.offline.time.sleep", sleep)
    [output] = LLM.from_engine(t.engine).generate([[1, 2]], asking("", [1], 3).sampling)
    assert len(output.outputs[0].token_ids) == 3
    assert slept == [MAX_IDLE_S, MAX_IDLE_S, 0.5]


def test_predictions_and_the_limits_that_they_set_are_shown():
    t = tiny(itl_slo_s=1e-9, overlap=False, max_queued=30)
    assert t.value("budget_reason", reason="fixed limits") == 1
    for i in range(30):
        t.engine.add(asking(f"r{i}", [i + 1] * 9, 10))
    reasons = set()
    while t.engine.has_work:
        t.engine.step()
        reasons |= {r for r in REASONS if t.value("budget_reason", reason=r)}
    assert {"no model yet", "floor"} <= reasons
    assert t.value("prefill_budget_tokens") > 0
    assert t.value("running_cap") >= 1
    assert t.value("step_actual_seconds") > 0
    assert t.value("step_predicted_seconds") > 0
    assert t.value("step_prediction_error") > 0
    t.assert_idle()


@pytest.mark.parametrize("overlap", [True, False])
def test_both_logs_say_what_the_engine_did(tmp_path, overlap):
    steps, requests = tmp_path / "steps.jsonl", tmp_path / "requests.jsonl"
    t = tiny(
        overlap=overlap,
        step_log=StepLog(str(steps)),
        request_log=RequestLog(str(requests), with_prompts=True),
    )
    t.engine.add(asking("a", list(range(20)), 4, tenant="x"))
    t.engine.add(asking("b", [1, 2], 9, request_class=""))
    for _ in range(5):
        t.engine.step()
    t.engine.abort("b")
    run(t.engine)
    t.engine.close()
    log = read_step_log(str(steps))
    assert (log.header["model"], log.header["num_pages"]) == ("tiny", 64)
    assert log.buckets == t.engine._packer.buckets
    read = list(log.steps())
    assert len(read) == t.device.num_steps
    assert sum(s["prefill_tokens"] + s["decode_rows"] for s in read) == t.device.num_tokens
    assert [s["bucket_tokens"] for s in read] == [b.bucket.num_tokens for b in t.device.inputs]
    assert read[0]["chunks"] == 2
    assert read[-1]["running"] == read[-1]["waiting"] == 0
    for before, after in itertools.pairwise(read):
        assert after["t_s"] >= before["t_s"] + before["step_s"] - 2e-6, "steps run one by one"
    ended = {r["finish_reason"]: r for r in map(json.loads, requests.read_text().splitlines())}
    assert ended["length"]["tenant"] == "x"
    assert (ended["length"]["prompt_tokens"], ended["length"]["output_tokens"]) == (20, 4)
    assert ended["abort"]["prompt_token_ids"] == [1, 2]
    assert 0 < ended["abort"]["output_tokens"] < 9


def test_the_pages_that_a_plan_moves_to_and_from_the_host_are_counted():
    t = tiny()
    plan = t.engine.scheduler.schedule(0.0)
    plan.copies_out, plan.copies_in = np.zeros((3, 2), np.int32), np.zeros((1, 2), np.int32)
    t.engine._recorder.on_planned(plan)
    assert t.value("swapped_pages_total", way="out") == 3
    assert t.value("swapped_pages_total", way="in") == 1
