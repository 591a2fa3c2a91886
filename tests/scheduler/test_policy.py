"""WaitingQueue: urgent first, then in order of arrival."""

from __future__ import annotations

from scheduler.policy import WaitingQueue
from scheduler.request import Request, SamplingView


def request(name: str, arrival: float, priority: int = 0) -> Request:
    return Request(name, [1], SamplingView(max_tokens=1), priority=priority, arrival_time=arrival)


def order(queue: WaitingQueue) -> str:
    names = ""
    while (first := queue.peek()) is not None:
        names += first.request_id
        queue.remove(first)
    return names


def test_requests_come_by_priority_then_arrival_then_insertion():
    queue = WaitingQueue()
    for r in (
        request("c", 3.0),
        request("a", 1.0),
        request("b", 1.0),
        request("z", 0.0, priority=1),
        request("!", 9.0, priority=-1),
    ):
        queue.push(r)
    assert len(queue) == 5
    assert order(queue) == "!abcz"
    assert len(queue) == 0


def test_a_request_that_comes_back_is_ahead_of_later_arrivals():
    queue = WaitingQueue()
    early, late = request("e", 1.0), request("l", 2.0)
    queue.push(late)
    queue.push(early)  # preempted, say
    assert order(queue) == "el"


def test_a_removed_request_is_skipped_and_may_be_removed_twice():
    queue = WaitingQueue()
    first, second = request("a", 1.0), request("b", 2.0)
    queue.push(first)
    queue.push(second)
    queue.remove(first)
    queue.remove(first)
    assert (len(queue), list(queue)) == (1, [second])
    assert queue.peek() is second
    assert queue.peek() is second, "peeking took it"


def test_a_request_can_leave_and_come_back():
    queue = WaitingQueue()
    only = request("a", 1.0)
    for _ in range(3):
        queue.push(only)
        assert queue.peek() is only
        queue.remove(only)
        assert queue.peek() is None


def test_removed_requests_are_let_go_behind_a_first_one_that_stays():
    queue = WaitingQueue()
    queue.push(request("first", 0.0))
    for i in range(1000):
        gone = request(f"r{i}", 1.0 + i)
        queue.push(gone)
        queue.remove(gone)
    assert len(queue._heap) < 50
