"""What the live page is told: steps, requests, queues and distributions, and what that costs."""

from __future__ import annotations

import json
import timeit

import pytest

from jserve.engine.activity import MAX_QUEUES, MAX_SHOWN, MAX_STEPS, OTHERS, WINDOW_S, Activity
from jserve.engine.async_engine import AsyncEngine
from jserve.engine.metrics import LATENCY_BUCKETS
from jserve.errors import EngineDead
from scheduler.config import RequestClass
from tests.engine.tiny import asking, run, tiny

STEP_LIMIT_S = 5e-6
CLASSES = (
    RequestClass(name="chat", ttft_slo_s=0.5, itl_slo_s=0.1),
    RequestClass(name="batch", priority=10),
)


def steps_of(snapshot: dict) -> list[dict]:
    return [dict(zip(snapshot["step_fields"], step, strict=True)) for step in snapshot["steps"]]


def test_each_step_is_told_once_with_what_it_computed():
    t = tiny()
    t.engine.add(asking("a", list(range(13)), max_tokens=4))
    run(t.engine)
    snapshot = t.engine.activity(0)
    steps = steps_of(snapshot)
    assert [s["prefill_tokens"] for s in steps] == [8, 5, 0, 0, 0]
    assert [s["decode_rows"] for s in steps] == [0, 0, 1, 1, 1]
    assert [s["chunks"] for s in steps] == [1, 1, 0, 0, 0]
    assert all(s["bucket_tokens"] >= s["prefill_tokens"] + s["decode_rows"] for s in steps)
    assert [s["pages_used"] > 0 for s in steps] == [True] * 4 + [False]
    assert {s["pages_used"] + s["pages_cached"] + s["pages_free"] for s in steps} == {63}
    assert sorted(s["t_s"] for s in steps) == [s["t_s"] for s in steps]
    seen = snapshot["seq"]
    assert seen == len(steps)
    assert t.engine.activity(seen)["steps"] == []
    t.engine.add(asking("b", [1, 2], max_tokens=1))
    run(t.engine)
    assert len(t.engine.activity(seen)["steps"]) == 1


def test_whoever_comes_from_another_engine_is_told_all():
    t = tiny()
    t.engine.add(asking("a", [1, 2, 3], max_tokens=3))
    run(t.engine)
    assert len(t.engine.activity(10_000)["steps"]) == len(t.engine.activity(-1)["steps"]) == 3


def test_requests_and_queues_are_told_by_class_and_tenant():
    t = tiny(max_num_seqs=2, max_num_batched_tokens=8, classes=CLASSES)
    for name, kind, tenant in (
        *(("a", "chat", "gold"), ("b", "batch", "gold"), ("c", "batch", "free")),
        *(("d", "batch", "free"), ("e", "", "")),
    ):
        prompt = [ord(name) % 50] * 12
        t.engine.add(asking(name, prompt, max_tokens=5, request_class=kind, tenant=tenant))
    t.clock.now = 2.0
    for _ in range(4):
        t.engine.step()
    snapshot = json.loads(json.dumps(t.engine.activity(0)))
    requests = {r["id"]: r for r in snapshot["requests"]}
    assert {n: r["status"] for n, r in requests.items()} == {
        **{"a": "running", "e": "running"},
        **{"b": "waiting", "c": "waiting", "d": "waiting"},
    }
    a = requests["a"]
    assert (a["class"], a["tenant"], a["prompt_tokens"], a["max_tokens"]) == ("chat", "gold", 12, 5)
    assert a["computed_tokens"] == 12 + a["output_tokens"]  # the last one is in flight
    assert a["age_s"] == 2.0
    assert snapshot["classes"] == ["", "chat", "batch"]
    assert snapshot["budget"]["max_running"] == snapshot["limits"]["max_num_seqs"] == 2
    assert steps_of(snapshot)[-1]["waiting"] == [0, 0, 3]
    assert [(q["class"], q["tenant"], q["requests"], q["tokens"]) for q in snapshot["queue"]] == [
        ("batch", "free", 2, 24),
        ("batch", "gold", 1, 12),
    ]
    assert snapshot["queue"][0]["oldest_s"] == 2.0
    run(t.engine)
    assert t.engine.scheduler.waiting.waiting_of.total() == 0
    assert t.engine.activity(0)["queue"] == t.engine.activity(0)["requests"] == []


def test_what_is_told_is_bounded():
    t = tiny(max_queued=600)
    for i in range(600):
        t.engine.add(asking(f"r{i}", [i % 90, 1], max_tokens=2, tenant=f"tenant {i}"))
    t.engine.step()
    snapshot = t.engine.activity(0)
    assert len(snapshot["requests"]) <= MAX_SHOWN + MAX_SHOWN // 4
    assert len(snapshot["queue"]) == MAX_QUEUES + 1
    assert snapshot["queue"][0]["tenant"] == OTHERS
    assert sum(q["requests"] for q in snapshot["queue"]) == len(t.engine.scheduler.waiting)
    run(t.engine, 5000)
    snapshot = t.engine.activity(0)
    assert len(snapshot["steps"]) == min(snapshot["seq"], MAX_STEPS)


def test_distributions_are_those_of_the_last_minute(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("jserve.engine.activity.time.perf_counter", lambda: now[0])
    t = tiny(classes=CLASSES, ttft_slo_s=2.0)
    activity, metrics = Activity(t.engine.scheduler, t.engine.metrics), t.engine.metrics

    def step_at(at: float) -> dict:
        now[0] = at
        activity.on_step(at, 0.01, 4, 1, 0, 0, 0, t.engine.stats())
        return activity.snapshot(0, 0.0)["latency"]

    def of(seconds: float) -> list[int]:
        """One observation in its bucket."""
        bucket = next(i for i, bound in enumerate((*LATENCY_BUCKETS, 1e9)) if seconds <= bound)
        return [int(i == bucket) for i in range(len(LATENCY_BUCKETS) + 1)]

    assert sum(step_at(1000)["ttft"]["counts"]) == 0
    metrics.on_first_token(0.0, 0.3, 10, 0, "chat")
    metrics.on_first_token(0.0, 600.0, 10, 0, "chat")
    metrics.on_token_gap(0.003, "chat")
    latency = step_at(1010)
    assert latency["ttft"]["counts"] == [a + b for a, b in zip(of(0.3), of(600), strict=True)]
    assert latency["itl"]["counts"] == of(0.003)
    assert latency["ttft"]["targets"] == [
        {"class": "", "target_s": 2.0, "met": 0, "missed": 0},
        {"class": "chat", "target_s": 0.5, "met": 1, "missed": 1},
        {"class": "batch", "target_s": 2.0, "met": 0, "missed": 0},
    ]
    assert [t["class"] for t in latency["itl"]["targets"]] == ["chat"]
    metrics.on_first_token(0.0, 0.03, 10, 0, "chat")
    step_at(1040)
    assert step_at(1010 + WINDOW_S + 6)["ttft"]["counts"] == of(0.03)
    assert step_at(1040 + WINDOW_S + 6)["ttft"]["targets"][1] == {
        **{"class": "chat", "target_s": 0.5, "met": 0, "missed": 0},
    }
    metrics.on_first_token(0.0, 0.03, 10, 0, "chat")
    now[0] += WINDOW_S + 1
    assert sum(activity.snapshot(0, 0.0)["latency"]["ttft"]["counts"]) == 0


def test_a_step_is_remembered_in_five_microseconds():
    t = tiny(classes=CLASSES)
    stats = t.engine.stats()
    activity = Activity(t.engine.scheduler, t.engine.metrics)
    at = activity._began

    def on_step() -> None:
        activity.on_step(at, 0.02, 32, 4, 20, 2, 0, stats)

    on_step()  # reads the metrics, as it does each few seconds
    assert min(timeit.repeat(on_step, number=1000, repeat=20)) / 1000 < STEP_LIMIT_S


async def test_the_engine_tells_between_two_steps_until_it_ends():
    t = tiny()
    engine = AsyncEngine(t.engine)
    stream = await engine.submit(asking("a", [1, 2, 3], max_tokens=3))
    assert [u async for u in stream][-1].is_last
    assert (await engine.activity(0))["seq"] == 3
    await engine.drain(0)
    with pytest.raises(EngineDead):
        await engine.activity(0)


async def test_an_engine_survives_what_it_cannot_tell(monkeypatch):
    t = tiny()
    engine = AsyncEngine(t.engine)

    def fail(since: int) -> dict:
        raise KeyError(since)

    monkeypatch.setattr(t.engine, "activity", fail)
    with pytest.raises(KeyError):
        await engine.activity(7)
    stream = await engine.submit(asking("a", [1, 2, 3], max_tokens=3))
    assert [u async for u in stream][-1].is_last
    await engine.drain(0)
