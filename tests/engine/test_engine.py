"""The engine's loop over a fake device: tokens, stops, aborts, deadlines, limits and counts."""

from __future__ import annotations

import pytest

from jserve.errors import DeadlineExceeded, EngineDead, InvalidRequest, Overloaded
from jserve.messages import GenerateRequest
from tests.engine.tiny import answer, asking, byte_tokenizer, joined, run, tiny

BOTH = pytest.mark.parametrize("overlap", [True, False])
MIXED = [
    asking("short", [5], 3),
    asking("aligned", list(range(1, 17)), 9),
    asking("chunked", [(7 * i) % 90 for i in range(40)], 20),
    asking("one", [1, 2, 3], 1),
    asking("queued", [50, 60], 30),
    asking("also queued", [9] * 11, 12),
]


def text_of(token_ids: list[int]) -> str:
    return byte_tokenizer().decode(token_ids)


@BOTH
def test_requests_that_share_steps_get_the_tokens_they_would_get_alone(overlap):
    t = tiny(overlap=overlap)
    for request in MIXED:
        t.engine.add(request)
    outputs = joined(run(t.engine))
    for request in MIXED:
        output = outputs[request.request_id]
        assert output.token_ids == answer(request)
        assert output.text == text_of(output.token_ids)
        assert output.prompt_token_ids == request.prompt_token_ids
        assert output.last.finish_reason == "length"
        usage = output.last.usage
        assert usage.prompt_tokens == len(request.prompt_token_ids)
        assert usage.completion_tokens == request.sampling.max_tokens
    t.assert_idle()


def test_with_overlap_a_step_is_dispatched_before_the_one_before_it_is_collected():
    t = tiny(overlap=True)
    t.engine.add(asking("a", [1, 2], 4))
    run(t.engine)
    assert t.device.events[:4] == [
        ("dispatch", 0),
        ("dispatch", 1),
        ("collect", 0),
        ("dispatch", 2),
    ]


def test_without_overlap_each_step_is_collected_before_the_next_is_dispatched():
    t = tiny(overlap=False)
    t.engine.add(asking("a", [1, 2], 4))
    run(t.engine)
    assert t.device.events == [(what, n) for n in range(4) for what in ("dispatch", "collect")]


def test_no_step_is_dispatched_for_a_token_beyond_max_tokens():
    for overlap in (True, False):
        t = tiny(overlap=overlap)
        t.engine.add(asking("a", [1, 2], 5))
        run(t.engine)
        assert t.device.num_tokens == 2 + 4  # the last token is never fed back


@BOTH
def test_O08_a_stop_string_over_several_tokens_ends_the_text_before_it(overlap):
    request = asking("a", [3, 1, 4], 12)
    ids = answer(request)
    stop = text_of(ids[4:7])
    t = tiny(overlap=overlap)
    t.engine.add(asking("a", [3, 1, 4], 12, stop=(stop,)))
    output = joined(run(t.engine))["a"]
    assert output.text == text_of(ids[:4])
    assert output.token_ids == ids[:7], "the token computed after the stop was delivered"
    assert (output.last.finish_reason, output.last.stop_reason) == ("stop", stop)
    assert output.last.usage.completion_tokens == 7
    t.assert_idle()


@BOTH
def test_a_stop_token_is_delivered_as_an_id_but_not_as_text(overlap):
    ids = answer(asking("a", [3, 1, 4], 12))
    stop = ids[5]
    first = ids.index(stop)
    t = tiny(overlap=overlap, eos=(stop,))
    t.engine.add(asking("a", [3, 1, 4], 12))
    t.engine.add(asking("b", [3, 1, 4], 12, ignore_eos=True))
    t.engine.add(asking("c", [3, 1, 4], 12, ignore_eos=True, stop_token_ids=(stop,)))
    outputs = joined(run(t.engine))
    for name in "ac":
        assert outputs[name].token_ids == ids[: first + 1]
        assert outputs[name].text == text_of(ids[:first])
        assert (outputs[name].last.finish_reason, outputs[name].last.stop_reason) == ("stop", stop)
    assert outputs["b"].token_ids == ids
    t.assert_idle()


def test_O11_text_held_back_for_a_stop_string_comes_with_the_last_update():
    request = asking("a", [3, 1, 4], 6)
    ids = answer(request)
    stop = text_of(ids[4:6]) + "never"
    t = tiny()
    t.engine.add(asking("a", [3, 1, 4], 6, stop=(stop,)))
    output = joined(run(t.engine))["a"]
    assert (output.text, output.last.finish_reason) == (text_of(ids), "length")


@BOTH
def test_an_abort_at_any_point_frees_everything_and_leaves_the_others_alone(overlap):
    others = [asking("x", [8, 9], 14), asking("y", [4] * 20, 10)]
    for turn in range(18):
        t = tiny(overlap=overlap, max_num_seqs=3)
        for request in (others[0], asking("gone", list(range(30)), 9), others[1]):
            t.engine.add(request)
        before = [u for _ in range(turn) for u in t.engine.step()]
        t.engine.abort("gone")
        after = run(t.engine)
        assert all(update.request_id != "gone" for update in after)
        outputs = joined(before + after)
        assert all(outputs[r.request_id].token_ids == answer(r) for r in others)
        t.assert_idle()


def test_an_abort_of_a_queued_request_means_that_it_never_runs():
    t = tiny(max_num_seqs=1, enable_prefix_cache=False)
    t.engine.add(asking("busy", [1, 2], 6))
    for i in range(5):
        t.engine.add(asking(f"q{i}", [3] * 10, 6))
    t.engine.step()
    for i in range(5):
        t.engine.abort(f"q{i}")
    run(t.engine)
    assert t.device.num_tokens == 2 + 5
    assert t.value("requests_finished_total", reason="abort") == 5
    t.assert_idle()


def test_aborting_an_unknown_or_finished_request_does_nothing():
    t = tiny()
    t.engine.add(asking("a", [1], 2))
    run(t.engine)
    t.engine.abort("a")
    t.engine.abort("never seen")
    assert t.value("requests_finished_total", reason="abort") == 0


def test_an_id_is_free_again_at_once_after_an_abort_and_old_steps_do_not_reach_its_new_user():
    t = tiny()
    t.engine.add(asking("a", [1, 2], 20))
    for _ in range(3):
        t.engine.step()
    t.engine.abort("a")  # with a step in flight
    again = asking("a", [30, 40, 50], 5)
    t.engine.add(again)
    output = joined(run(t.engine))["a"]
    assert output.token_ids == answer(again)
    assert output.prompt_token_ids == again.prompt_token_ids


@BOTH
def test_a_deadline_ends_a_running_request_with_what_it_has(overlap):
    t = tiny(overlap=overlap)
    t.engine.add(asking("late", [1, 2], 40, timeout_s=5.0))
    before = [u for _ in range(6) for u in t.engine.step()]
    t.clock.now = 5.0
    output = joined(before + run(t.engine))["late"]
    assert output.last.finish_reason == "deadline"
    assert isinstance(output.last.error, DeadlineExceeded)
    assert 0 < len(output.token_ids) == output.last.usage.completion_tokens < 40
    assert output.last.timings.e2e_s == 5.0
    assert t.value("requests_finished_total", reason="deadline") == 1
    t.assert_idle()


def test_a_deadline_ends_a_queued_request_that_never_ran():
    t = tiny(max_num_seqs=1, enable_prefix_cache=False)
    t.engine.add(asking("busy", [1, 2], 8))
    t.engine.add(asking("late", [3] * 10, 8, timeout_s=1.0))
    before = t.engine.step()
    t.clock.now = 1.5
    outputs = joined(before + run(t.engine))
    assert outputs["late"].last.finish_reason == "deadline"
    assert "1.500 s" in str(outputs["late"].last.error)
    assert outputs["late"].token_ids == []
    assert outputs["late"].last.timings.ttft_s is None
    assert len(outputs["busy"].token_ids) == 8
    assert t.device.num_tokens == 2 + 7
    assert t.value("time_to_first_token_seconds_count") == 1
    t.assert_idle()


def test_a_full_queue_is_overloaded_before_any_work_and_has_room_again_later():
    t = tiny(max_num_seqs=2, max_queued=3)
    for i in range(5):
        t.engine.add(asking(f"r{i}", [i + 1], 4))
    with pytest.raises(Overloaded, match="5 requests are running or queued"):
        t.engine.add(asking("r5", [1], 4))
    t.engine.abort("r4")
    t.engine.add(asking("r5", [1], 4))
    assert len(joined(run(t.engine))) == 5
    t.assert_idle()


def test_O50_a_live_requests_id_is_refused_and_the_first_user_is_unchanged():
    t = tiny()
    first = asking("same", [1, 2, 3], 10)
    t.engine.add(first)
    before = t.engine.step()
    with pytest.raises(InvalidRequest, match="request_id='same' is in use"):
        t.engine.add(asking("same", [7], 3))
    assert joined(before + run(t.engine))["same"].token_ids == answer(first)
    t.engine.add(first)  # free again after its end
    assert joined(run(t.engine))["same"].token_ids == answer(first)


def test_requests_without_an_id_get_different_ones():
    t = tiny()
    message = GenerateRequest(prompt_token_ids=[1], sampling=asking("", [1], 1).sampling)
    assert t.engine.add(message) != t.engine.add(message)


@BOTH
def test_O45_preempted_requests_lose_and_repeat_nothing_and_are_counted_once(overlap):
    requests = [asking(f"r{i}", [i + 1, i + 2], 30) for i in range(4)]
    t = tiny(overlap=overlap, num_pages=1 + 14, enable_prefix_cache=False)
    for request in requests:
        t.engine.add(request)
    outputs = joined(run(t.engine))
    assert t.value("preemptions_total") >= 3
    for request in requests:
        output = outputs[request.request_id]
        assert output.token_ids == answer(request)
        assert output.text == text_of(output.token_ids)
        assert output.last.usage.completion_tokens == 30
    assert t.value("output_tokens_total") == 120
    assert t.value("prompt_tokens_total") == 8
    assert t.value("time_to_first_token_seconds_count") == 4
    assert t.value("queue_time_seconds_count") == 4
    assert t.value("inter_token_latency_seconds_count") == 4 * 29
    assert t.value("e2e_latency_seconds_count") == 4
    assert t.value("requests_finished_total", reason="length") == 4
    assert t.value("prefix_cache_hit_tokens_total") == 0
    t.assert_idle()


def test_times_are_those_of_the_clock():
    t = tiny(overlap=False)
    t.engine.add(asking("a", [1, 2], 3))
    updates = []
    for now in (2.0, 3.0, 5.0):
        t.clock.now = now
        updates += t.engine.step()
    timings = updates[-1].timings
    assert (timings.queue_s, timings.ttft_s, timings.e2e_s, timings.itl_s) == (2.0, 2.0, 5.0, 1.5)


def test_gauges_show_what_runs_waits_and_is_held():
    t = tiny(max_num_seqs=2, overlap=False, enable_prefix_cache=False)
    for i in range(3):
        t.engine.add(asking(f"r{i}", [1] * 6, 20))
    t.engine.step()
    assert t.value("requests_running") == 2
    assert t.value("requests_waiting") == 1
    assert t.value("kv_pages", state="used") == 2 * 2
    assert t.value("live_tokens") == 2 * 6
    run(t.engine)
    t.assert_idle()


def test_padding_and_real_tokens_of_each_step_are_counted():
    t = tiny(overlap=False)
    t.engine.add(asking("a", [1, 2, 3], 3))
    run(t.engine)
    assert t.value("step_tokens_total", kind="real") == t.device.num_tokens == 5
    computed = sum(batch.bucket.num_tokens for batch in t.device.inputs)
    assert t.value("step_tokens_total", kind="padded") == computed - 5 > 0
    assert t.value("step_seconds_count") == 3


def test_O60_the_cache_is_not_reset_while_a_request_uses_its_pages():
    t = tiny()
    prompt = list(range(1, 20))
    t.engine.add(asking("warm", prompt, 4))
    run(t.engine)
    t.engine.add(asking("a", prompt, 10))
    before = t.engine.step()
    assert not t.engine.reset_prefix_cache()
    output = joined(before + run(t.engine))["a"]
    assert output.last.usage.cached_tokens == 16
    assert t.engine.reset_prefix_cache()
    assert t.value("kv_pages", state="cached") == 0
    t.engine.add(asking("b", prompt, 10))
    assert joined(run(t.engine))["b"].last.usage.cached_tokens == 0


def test_a_closed_engine_has_ended_all_requests_and_let_go_of_its_runner():
    t = tiny()
    t.engine.add(asking("a", [1, 2], 20))
    t.engine.step()
    t.engine.close()
    t.assert_idle()
    t.engine.add(asking("b", [1], 2))
    with pytest.raises(EngineDead, match="closed"):
        t.engine.step()


def test_a_failing_device_is_the_callers_to_see():
    t = tiny(fail_at=2)
    t.engine.add(asking("a", [1, 2], 20))
    with pytest.raises(RuntimeError, match="the device is lost"):
        run(t.engine)
