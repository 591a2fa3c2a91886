"""What one fault costs: the request that it is in, or, where the device fails, a few steps."""

from __future__ import annotations

import logging
import re

import pytest

from jserve.engine.engine import MOST_CULPRITS
from jserve.errors import EngineDead, RequestFailed
from jserve.structured import GrammarKind, StructuredOutput
from scheduler.kv_events import Cleared
from tests.engine.tiny import (
    Tiny,
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
JSON = StructuredOutput(GrammarKind.JSON_OBJECT)
SECRET = "the prompt's own words"


@BOTH
@pytest.mark.parametrize("where", ["on_dispatch", "on_collect"])
@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_a_step_that_fails_once_changes_no_answer(overlap, where, at):
    t = tiny(overlap=overlap)
    fail_once(t, where, at)
    outputs = outputs_of(t, requests())
    for request in requests():
        assert outputs[request.request_id].token_ids == answer(request)
        assert outputs[request.request_id].last.finish_reason == "length"
    assert t.device.num_resets == t.value("step_failures_total") == 1


def test_a_lost_page_is_found_in_no_cache():
    t = tiny()
    shared = list(range(20))
    outputs_of(t, [asking("before", shared, 4)])
    fail_once(t, "on_collect", 2)
    outputs_of(t, [asking("fails", [50], 4)])
    after = asking("after", shared, 4)
    output = outputs_of(t, [after])["after"]
    assert output.token_ids == answer(after)
    assert output.last.usage.cached_tokens == 0


def test_whoever_follows_the_cache_hears_that_a_failed_step_cleared_it():
    t = tiny()
    outputs_of(t, [asking("before", list(range(20)), 4)])
    events: list = []
    t.engine.scheduler.cache.events = events.append
    fail_once(t, "on_collect", 2)
    outputs_of(t, [asking("fails", [50], 4)])
    assert Cleared() in events


def test_what_was_swapped_out_when_the_device_failed_is_computed_anew():
    t = tiny(num_pages=1 + 10, num_host_pages=16, max_num_seqs=4)
    t.engine.scheduler.preemption.swap_page_s = 1e-9
    asked = [asking(f"r{i}", [i + 1] * 8, 20) for i in range(4)]
    for request in asked:
        t.engine.add(request)
    updates = []
    while not t.engine.scheduler.preemption.num_host_pages_used:
        updates += t.engine.step()
    fail_once(t, "on_dispatch", 1)
    outputs = joined(updates + run(t.engine))
    for request in asked:
        assert outputs[request.request_id].token_ids == answer(request)
    assert t.value("step_failures_total") == 1
    t.assert_idle()


def test_a_device_that_fails_with_everything_ends_the_engine():
    t = tiny(max_num_seqs=8)
    t.device.on_collect = _burn
    for request in requests():
        t.engine.add(request)
    with pytest.raises(EngineDead, match=r"every request.*on fire"):
        run(t.engine)
    assert t.value("requests_finished_total", reason="error") == MOST_CULPRITS


def test_a_device_that_cannot_start_anew_ends_the_engine():
    t = tiny(fail_at=2)
    t.engine.add(asking("a", [1], 5))
    with pytest.raises(RuntimeError, match="the device is lost"):
        run(t.engine)


def test_a_broken_invariant_is_not_taken_for_a_failed_step():
    t = tiny()
    t.device.on_dispatch = _violate
    t.engine.add(asking("a", [1], 5))
    with pytest.raises(AssertionError, match="page 0"):
        t.engine.step()


@BOTH
@pytest.mark.parametrize("batching", ["continuous", "dynamic", "static"])
def test_a_request_that_is_sent_again_and_again_does_not_end_the_engine(overlap, batching):
    t = tiny(overlap=overlap, batching=batching, batch_window_s=0.0)
    for again in range(2 * MOST_CULPRITS + 1):
        fail_with(t, "bad", f"bad{again}")
        outputs = outputs_of(t, [asking("bad", [1, 2], 3), asking(f"bad{again}", [3], 3)])
        assert all(isinstance(o.last.error, RequestFailed) for o in outputs.values())
    good = asking("good", [1, 2], 3)
    assert outputs_of(t, [good])["good"].token_ids == answer(good)


def _burn() -> None:
    raise RuntimeError("the device is on fire")


def _violate() -> None:
    raise AssertionError("a token was written to page 0")


# ---- faults of one request ------------------------------------------------------------------


def break_text(t: Tiny, name: str, at: int) -> None:
    """Lets the tokenizer fail at a token of one request's output."""
    live = t.engine._output.live[name][0]
    add, tokens = live.prepared.detokenizer.add, []

    def failing(token_ids):
        tokens.extend(token_ids)
        if len(tokens) >= at:
            raise ValueError(SECRET)
        return add(token_ids)

    live.prepared.detokenizer.add = failing


@BOTH
@pytest.mark.parametrize("at", [1, 4, 9])
def test_a_tokenizer_that_fails_ends_the_one_request_and_its_words_are_not_logged(
    overlap, at, caplog
):
    caplog.set_level(logging.DEBUG)
    t = tiny(overlap=overlap)
    for request in requests():
        t.engine.add(request)
    break_text(t, "r2", at)
    outputs = joined(run(t.engine))
    for request in requests():
        output = outputs[request.request_id]
        if request.request_id == "r2":
            assert isinstance(output.last.error, RequestFailed)
            assert SECRET not in str(output.last.error)
            assert output.token_ids == answer(request)[: at - 1]
        else:
            assert output.token_ids == answer(request)
    assert SECRET not in caplog.text
    told = r"'r2' cannot be dealt with: ValueError, raised at\n(.*\n)*.*in failing"
    assert re.search(told, caplog.text)
    assert t.value("requests_finished_total", reason="error") == 1
    t.assert_idle()


class BrokenMatcher:
    """A grammar that takes anything, until it is asked for the attribute that fails."""

    error = None

    def __init__(self, fails_at: str) -> None:
        self._fails_at = fails_at

    def _check(self, name: str) -> None:
        if name == self._fails_at:
            raise RuntimeError(SECRET)

    @property
    def is_finished(self) -> bool:
        self._check("is_finished")
        return False

    def fill(self, words) -> bool:
        self._check("fill")
        words.fill(0xFFFFFFFF)
        return True

    def accept(self, token_id: int) -> bool:
        self._check("accept")
        return True

    def forced_tokens(self) -> list[int]:
        self._check("forced_tokens")
        return []

    def copy(self):
        return self


@BOTH
@pytest.mark.parametrize("at", ["fill", "accept", "is_finished", "forced_tokens"])
def test_a_grammar_that_fails_ends_the_one_request(overlap, at):
    t = tiny(overlap=overlap, eos=(96,))
    for request in requests(4):
        t.engine.add(request)
    t.engine.processor._new_matcher = lambda structured: BrokenMatcher(at)
    t.engine.add(asking("broken", [1, 2, 3], 9, structured=JSON))
    outputs = joined(run(t.engine))
    assert isinstance(outputs["broken"].last.error, RequestFailed)
    for request in requests(4):
        assert outputs[request.request_id].token_ids == answer(request)
    t.assert_idle()


def test_a_request_that_ends_in_the_turn_in_which_the_device_fails_is_told():
    t = tiny(eos=(96,))
    t.engine.processor._new_matcher = lambda structured: BrokenMatcher("fill")
    t.engine.add(asking("broken", [1, 2, 3], 9, structured=JSON))

    def fail(handle, allowed=None) -> None:
        t.device.choose = lambda handle, allowed=None: None
        raise RuntimeError("a cosmic ray")

    t.device.choose = fail
    outputs = joined(run(t.engine))
    assert isinstance(outputs["broken"].last.error, RequestFailed)
    assert t.value("step_failures_total") == 1
    t.assert_idle()


def test_a_name_that_a_caller_chose_writes_no_line_of_the_log(caplog):
    name = "r\n2026-11-30 all is well"
    t = tiny()
    t.device.on_dispatch = lambda: (_ for _ in ()).throw(RuntimeError("no"))
    t.engine.add(asking(name, [1], 3))
    t.engine.step()
    t.engine.step()
    t.device.on_dispatch = lambda: None
    t.engine.add(asking(name, [1], 3))
    break_text(t, name, 1)
    run(t.engine)
    assert caplog.text.count("all is well") == 2
    assert "\n2026-11-30" not in caplog.text
