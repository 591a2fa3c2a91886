"""Orders of waiting requests: what each policy puts first, and what all of them share."""

from __future__ import annotations

import math

import pytest

from scheduler.config import POLICY_NAMES, RequestClass, SchedulerConfig
from scheduler.policy import (
    MAX_IDLE_TENANTS,
    POLICIES,
    FairShare,
    LongestPrefix,
    PolicySettings,
    Priority,
    ShortestJob,
    WaitingQueue,
)
from scheduler.request import FinishReason, Request, SamplingView
from scheduler.scheduler import Scheduler

EVERY_POLICY = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def request(name: str, arrival: float, *, prompt: int = 1, output: int = 1, **fields) -> Request:
    sampling = SamplingView(max_tokens=output)
    return Request(name, [1] * prompt, sampling, arrival_time=arrival, **fields)


def order(queue: WaitingQueue, now: float = 0.0) -> str:
    names = ""
    while (first := queue.first(now)) is not None:
        names += first.request_id
        queue.remove(first)
    return names


def pushed(queue: WaitingQueue, *requests: Request) -> WaitingQueue:
    for r in requests:
        queue.push(r)
    return queue


# ---- what all policies share ----------------------------------------------------------------


@EVERY_POLICY
def test_equal_requests_come_in_order_of_arrival_then_insertion(policy):
    queue = pushed(policy(), request("c", 3.0), request("a", 1.0), request("b", 1.0))
    assert len(queue) == 3
    assert order(queue) == "abc"
    assert len(queue) == 0


@EVERY_POLICY
def test_a_request_that_comes_back_is_ahead_of_later_arrivals(policy):
    early, late = request("e", 1.0), request("l", 2.0)
    assert order(pushed(policy(), late, early)) == "el"


@EVERY_POLICY
def test_a_removed_request_is_skipped_and_may_be_removed_twice(policy):
    first, second = request("a", 1.0), request("b", 2.0)
    queue = pushed(policy(), first, second)
    queue.remove(first)
    queue.remove(first)
    assert (len(queue), list(queue)) == (1, [second])
    assert queue.first(0.0) is second
    assert queue.first(0.0) is second, "looking took it"


@EVERY_POLICY
def test_a_request_can_leave_and_come_back(policy):
    queue, only = policy(), request("a", 1.0)
    for _ in range(3):
        queue.push(only)
        assert queue.first(0.0) is only
        queue.remove(only)
        assert queue.first(0.0) is None


@EVERY_POLICY
def test_whoever_waited_too_long_comes_first_oldest_first(policy):
    settings = PolicySettings(max_starvation_s=10.0, cached_tokens=lambda r: len(r.request_id) - 1)
    queue = pushed(
        policy(settings),
        request("b", 2.0, priority=9, prompt=500, output=500, tenant="busy"),
        request("a", 1.0, priority=9, prompt=900, output=900, tenant="busy"),
        request("new", 11.9),
    )
    queue.on_served(request("x", 0.0, tenant="busy"), 1000, 1000)
    assert order(queue, now=12.0) == "abnew"


def test_removed_requests_are_let_go_behind_a_first_one_that_stays():
    queue = pushed(Priority(), request("first", 0.0))
    for i in range(1000):
        gone = request(f"r{i}", 1.0 + i)
        queue.push(gone)
        queue.remove(gone)
    assert len(queue._by_key._heap) < 50
    assert len(queue._by_arrival._heap) < 50


# ---- each policy's own ----------------------------------------------------------------------


def test_fcfs_looks_at_arrival_only():
    queue = pushed(WaitingQueue(), request("a", 1.0, priority=5, prompt=99), request("b", 2.0))
    assert order(queue) == "ab"


def test_priority_comes_before_arrival():
    queue = pushed(
        Priority(), request("a", 1.0), request("z", 0.0, priority=1), request("!", 9.0, priority=-1)
    )
    assert order(queue) == "!az"


def test_sjf_puts_the_least_remaining_work_first():
    long_prompt = request("p", 1.0, prompt=16_000, output=10)
    long_output = request("o", 2.0, prompt=10, output=900)
    short = request("s", 3.0, prompt=100, output=20)
    assert order(pushed(ShortestJob(), long_prompt, long_output, short)) == "sop"


def test_sjf_learns_how_long_the_outputs_of_a_tenant_are():
    queue = ShortestJob()
    ended = request("x", 0.0, output=1000, tenant="brief")
    ended.num_output_tokens = 4
    ended.finish_reason = FinishReason.LENGTH
    queue.on_finished(ended)
    brief = request("b", 2.0, output=1000, tenant="brief")
    other = request("o", 1.0, output=100)
    assert order(pushed(queue, brief, other)) == "bo"


def test_sjf_remembers_a_bounded_number_of_tenants():
    queue = ShortestJob()
    for i in range(2 * MAX_IDLE_TENANTS):
        ended = request("x", 0.0, tenant=str(i))
        ended.finish_reason = FinishReason.STOP
        queue.on_finished(ended)
    assert len(queue._mean_output) == MAX_IDLE_TENANTS


def test_fair_share_puts_the_tenant_that_was_served_least_first():
    queue = pushed(
        FairShare(),
        *(request("f", float(i), tenant="flood") for i in range(3)),
        request("q", 5.0, tenant="quiet"),
    )
    first = queue.first(9.0)
    queue.remove(first)
    queue.on_served(first, 100, 1)
    assert order(queue) == "qff"


def test_fair_share_counts_output_double_and_divides_by_weight():
    queue = FairShare(PolicySettings(tenant_weights={"heavy": 4.0}))
    pushed(queue, request("h", 1.0, tenant="heavy"), request("l", 2.0, tenant="light"))
    queue.on_served(request("x", 0.0, tenant="heavy"), 0, 100)  # 200 / 4
    queue.on_served(request("x", 0.0, tenant="light"), 49, 0)
    assert order(queue) == "lh"
    pushed(queue, request("h", 1.0, tenant="heavy"), request("l", 2.0, tenant="light"))
    queue.on_served(request("x", 0.0, tenant="light"), 2, 0)
    assert order(queue) == "hl"


def test_fair_share_saves_nothing_up_for_a_tenant_that_was_away():
    queue, busy = FairShare(), request("b", 1.0, tenant="busy")
    queue.push(busy)
    queue.on_served(busy, 1000, 0)
    pushed(queue, *(request("a", 2.0 + i, tenant="away") for i in range(2)))
    queue.on_served(request("x", 0.0, tenant="away"), 1, 0)
    assert queue.first(9.0) is busy, "the other came back at busy's count, not at zero"


def test_fair_share_keeps_the_count_while_nobody_waits():
    queue, busy = FairShare(), request("b", 1.0, tenant="busy")
    queue.push(busy)
    queue.on_served(busy, 1000, 0)
    queue.remove(busy)
    pushed(queue, request("n", 2.0, tenant="new"))
    queue.on_served(request("x", 0.0, tenant="new"), 1, 0)
    pushed(queue, request("b", 3.0, tenant="busy"))
    assert order(queue) == "bn"


def test_fair_share_forgets_tenants_that_would_come_back_at_the_floor():
    queue = FairShare()
    for i in range(3 * MAX_IDLE_TENANTS):
        r = request("x", float(i), tenant=str(i))
        queue.push(r)
        queue.on_served(r, 1, 0)
        queue.remove(r)
    assert len(queue._served) <= MAX_IDLE_TENANTS + 2
    assert len(queue._order) <= 2


def test_longest_prefix_comes_first_among_the_oldest():
    cached = {"a": 0, "b": 32, "c": 64, "late": 999}
    settings = PolicySettings(cached_tokens=lambda r: cached.get(r.request_id, 0))
    window = LongestPrefix.WINDOW
    crowd = [request("x", 4.0 + i) for i in range(window - 3)]
    queue = pushed(
        LongestPrefix(settings),
        *(request(n, float(i)) for i, n in enumerate("abc")),
        *crowd,
        request("late", 1e6),
    )
    assert order(queue).startswith("clateba")


def test_longest_prefix_looks_at_a_few_however_long_the_queue():
    looked = []
    settings = PolicySettings(cached_tokens=lambda r: looked.append(r) or 0)
    queue = pushed(LongestPrefix(settings), *(request("r", float(i)) for i in range(1000)))
    assert queue.first(0.0).arrival_time == 0.0
    assert len(looked) == LongestPrefix.WINDOW


# ---- in the scheduler -----------------------------------------------------------------------


def limits(policy: str, **settings) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=1,
        max_num_batched_tokens=64,
        prefill_chunk=64,
        page_size=4,
        num_pages=64,
        max_model_len=128,
        policy=policy,
        **settings,
    )


def run_all(scheduler: Scheduler, requests: list[Request]) -> str:
    """Serves `requests` one at a time; returns the order in which they were started."""
    for r in requests:
        scheduler.add(r)
    started = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule(now=100.0)
        started += [row.request.request_id for row in plan.rows if row.request not in started]
        scheduler.update(plan, [5] * len(plan.rows))
    return "".join(dict.fromkeys(started))


def test_scheduler_tells_the_policy_what_it_served():
    requests = [request("a", 1.0, prompt=9, output=3, tenant="t") for _ in range(1)]
    requests += [request("b", 2.0, tenant="t"), request("c", 3.0, tenant="u")]
    assert run_all(Scheduler(limits("fair")), requests) == "acb"


def test_scheduler_tells_the_policy_how_long_outputs_were():
    s = Scheduler(limits("sjf"))
    run_all(s, [request("x", 0.0, output=2, tenant="brief")])
    slow, brief = request("s", 1.0, output=20), request("b", 2.0, output=100, tenant="brief")
    assert run_all(s, [slow, brief]) == "bs"


def test_scheduler_tells_the_prefix_policy_what_is_cached():
    s = Scheduler(limits("prefix"))
    run_all(s, [Request("x", list(range(40)), SamplingView(max_tokens=1))])
    fresh = Request("f", [99] * 40, SamplingView(max_tokens=1), arrival_time=1.0)
    again = Request("a", [*range(39), 77], SamplingView(max_tokens=1), arrival_time=2.0)
    assert run_all(s, [fresh, again]) == "af"
    assert again.num_cached_tokens == 36


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_waits_past_the_bound_while_urgent_requests_keep_coming(policy):
    s = Scheduler(limits(policy, max_starvation_s=5.0))
    patient = request("p", 0.0, prompt=50, output=30, priority=9, tenant="flood")
    s.add(patient)
    now = 0.0
    while patient.first_scheduled_time is None:
        s.add(request(f"r{now}", now, priority=-1, tenant=f"t{now}"))
        plan = s.schedule(now)
        s.update(plan, [5] * len(plan.rows))
        now += 1.0
    assert patient.first_scheduled_time <= 5.0


def test_an_aborted_request_leaves_every_order():
    s = Scheduler(limits("fair"))
    gone = request("g", 1.0, tenant="t")
    s.add(gone)
    s.finish(gone, FinishReason.ABORT)
    assert s.waiting.first(0.0) is None


def test_without_a_bound_time_does_not_matter():
    queue = pushed(Priority(), request("a", 1.0, priority=1), request("b", 2.0))
    assert queue.settings.max_starvation_s == math.inf
    assert queue.first(1e12).request_id == "b"


def test_sjf_learns_nothing_from_what_did_not_end_by_itself():
    queue = ShortestJob()
    for reason in (FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.ERROR):
        ended = request("x", 0.0, output=1000, tenant="brief")
        ended.finish_reason = reason
        queue.on_finished(ended)
    brief = request("b", 2.0, output=1000, tenant="brief")
    other = request("o", 1.0, output=100)
    assert order(pushed(queue, brief, other)) == "ob"


def test_fair_shares_hold_among_requests_of_a_class_at_its_cap():
    limits = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        prefill_chunk=32,
        page_size=4,
        num_pages=500,
        max_model_len=64,
        enable_prefix_cache=False,
        policy="fair",
        classes=(RequestClass(name="batch", max_num_seqs=1),),
    )
    scheduler = Scheduler(limits)
    for i in range(40):
        tenant = "quiet" if i >= 38 else "flood"
        scheduler.add(
            Request(
                f"{tenant}{i}",
                [1 + i, 2, 3],
                SamplingView(max_tokens=2),
                tenant=tenant,
                request_class="batch",
                arrival_time=float(i),
            )
        )
    ended: list[str] = []
    for _ in range(200):
        plan = scheduler.schedule(50.0)
        scheduler.update(plan, [7] * len(plan.requests))
        ended += [r.request_id for r in plan.requests if r.is_finished]
    assert len(ended) == 40
    assert max(ended.index("quiet38"), ended.index("quiet39")) <= 5


def test_the_names_that_settings_know_are_the_policies_that_there_are():
    assert set(POLICY_NAMES) == set(POLICIES)
