"""How the request is found that the device cannot compute, and who has to wait meanwhile."""

from __future__ import annotations

import pytest

from jserve.errors import RequestFailed
from tests.engine.tiny import (
    answer,
    asking,
    fail_once,
    fail_with,
    joined,
    outputs_of,
    requests,
    run,
    tiny,
)

BOTH = pytest.mark.parametrize("overlap", [True, False])


@BOTH
@pytest.mark.parametrize("after", [0, 4])
@pytest.mark.parametrize("culprits", [("r0",), ("r3",), ("r1", "r4")])
def test_a_request_that_the_device_cannot_compute_is_found_and_ended_alone(
    overlap, after, culprits
):
    t = tiny(overlap=overlap, max_num_seqs=8)
    fail_with(t, *culprits, after=after)
    outputs = outputs_of(t, requests())
    for request in requests():
        output = outputs[request.request_id]
        if request.request_id in culprits:
            assert isinstance(output.last.error, RequestFailed)
            assert output.token_ids == answer(request)[: len(output.token_ids)]
        else:
            assert output.token_ids == answer(request)


def test_requests_that_come_during_a_trial_do_not_wait_for_it():
    t = tiny(max_num_seqs=8)
    fail_with(t, "r0")
    for request in requests():
        t.engine.add(request)
    updates = []
    while not t.engine.scheduler.waiting.held:
        updates += t.engine.step()
    held = [r.request_id for group in t.engine.scheduler.waiting.held for r in group]
    t.engine.add(asking("new", [42], 1))
    updates += run(t.engine)
    order = [u.request_id for u in updates if u.token_ids]
    assert order.index("new") < max(order.index(name) for name in held)


@BOTH
@pytest.mark.parametrize("leaves", [True, False])
def test_who_is_on_trial_does_not_answer_for_a_request_that_has_come_since(overlap, leaves):
    t = tiny(overlap=overlap, max_num_seqs=8)
    fail_with(t, "bad", "worse")
    good = asking("good", [1, 2, 3], 9)
    for request in (good, asking("bad", [4, 5], 9)):
        t.engine.add(request)
    updates = []
    while not t.engine.scheduler.waiting.held:
        updates += t.engine.step()
    t.engine.add(asking("worse", [42], 3))
    if leaves:
        t.engine.step()
        t.engine.abort("worse")
    outputs = joined(updates + run(t.engine))
    assert outputs["good"].token_ids == answer(good)
    assert isinstance(outputs["bad"].last.error, RequestFailed)
    assert leaves or isinstance(outputs["worse"].last.error, RequestFailed)
    t.assert_idle()


@BOTH
def test_who_is_to_be_tried_alone_and_leaves_holds_up_nobody(overlap):
    t = tiny(overlap=overlap, max_num_seqs=8)
    fail_with(t, "bad")
    t.engine.add(asking("bad", [4, 5], 9))
    t.engine.step()
    others = requests()
    for request in others:
        t.engine.add(request)
    while t.engine.scheduler.waiting.alone is None:
        t.engine.step()
    t.engine.abort("bad")
    outputs = joined(run(t.engine))
    for request in others:
        assert outputs[request.request_id].token_ids == answer(request)
    t.assert_idle()


def test_suspects_that_leave_during_their_trial_hold_up_nobody():
    t = tiny(max_num_seqs=8)
    fail_with(t, "r0", "r1")
    for request in requests():
        t.engine.add(request)
    while not t.engine.scheduler.waiting.held:
        t.engine.step()
    for name in ("r0", "r1", "r2"):
        t.engine.abort(name)
    outputs = joined(run(t.engine))
    for request in requests()[3:]:
        assert outputs[request.request_id].token_ids == answer(request)
    t.assert_idle()


def test_the_turn_after_a_failed_step_comes_at_once_also_where_the_one_before_it_did_nothing():
    t = tiny(batching="dynamic", batch_window_s=0.5, max_num_seqs=4)
    t.engine.add(asking("r0", [1, 2, 3]))
    t.engine.step()
    assert t.engine.idle_s() > 0, "it waits for a group"
    t.clock.now = 1.0
    fail_once(t, "on_dispatch", 1)
    t.engine.step()
    assert t.value("step_failures_total") == 1
    assert t.engine.idle_s() == 0


def test_a_trial_is_not_held_up_by_the_many_that_wait_for_theirs():
    limits = {"max_num_seqs": 300, "max_num_batched_tokens": 304, "num_pages": 400}
    t = tiny(max_queued=1000, **limits)
    fail_with(t, "r7", after=1)
    for i in range(300):
        t.engine.add(asking(f"r{i}", [i % 90], 3))
    while t.engine.has_work:
        t.engine.step()
        assert t.engine.idle_s() == 0


def test_a_trial_is_not_put_off_by_newcomers_that_are_more_urgent():
    t = tiny(policy="priority", max_num_seqs=2, max_queued=1000)
    t.engine.add(asking("accused", [1], 9, priority=5))
    t.engine.step()
    t.engine.add(asking("held", [2], 9))
    fail_once(t, "on_dispatch", 1)
    t.engine.step()
    fail_once(t, "on_dispatch", 1)
    t.engine.step()
    [[held]] = t.engine.scheduler.waiting.held
    assert held.request_id == "held"
    for i in range(60):
        t.engine.add(asking(f"newcomer {i}", [3], 2))
        t.engine.step()
    assert held.is_finished
