"""Histograms, the timeline and the recorder on results made by hand."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

from jserve.sim.histogram import Histogram
from jserve.sim.recorder import MAX_TENANTS, Recorder, Targets
from jserve.sim.report import jain, table, text, to_dict
from jserve.sim.timeline import COUNTS, Timeline
from scheduler.config import SchedulerConfig
from scheduler.request import FinishReason, Request, SamplingView

CONFIG = SchedulerConfig(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    prefill_chunk=32,
    page_size=16,
    num_pages=101,
    max_model_len=512,
    tenant_weights={"gold": 3.0},
)


def ended(recorder, *, arrival_s=0.0, ttft_s=0.1, gap_s=0.01, output=11, **fields):
    """Tells the recorder of a request of 40 prompt tokens, and returns it."""
    reason = fields.pop("reason", FinishReason.LENGTH)
    cached, preemptions = fields.pop("cached", 0), fields.pop("preemptions", 0)
    request = Request(
        "r", list(range(40)), SamplingView(max_tokens=output), arrival_time=arrival_s, **fields
    )
    request.first_scheduled_time = arrival_s + ttft_s / 2
    request.num_output_tokens, request.finish_reason = output, reason
    request.num_cached_tokens, request.num_preemptions = cached, preemptions
    last_s = arrival_s + ttft_s + gap_s * (output - 1)
    recorder.on_first_token(request, ttft_s)
    recorder.on_finish(request, last_s, ttft_s, last_s)
    return request


def steps(timeline, start_s, durations, **counts):
    timeline.add(start_s, np.array(durations), *(counts.get(name, 0) for name in COUNTS))


# ---- histograms ----


def test_percentiles_are_within_a_quarter_per_cent_of_the_samples():
    samples = np.random.default_rng(0).lognormal(-4, 2, 20_000)
    one_by_one, at_once = Histogram(), Histogram()
    for value in samples.tolist():
        one_by_one.add(value)
    at_once.add_many(samples, np.ones(len(samples), np.int64))
    for histogram in (one_by_one, at_once):
        for percent in (1, 50, 90, 95, 99):
            exact = np.percentile(samples, percent, method="inverted_cdf")
            assert histogram.percentile(percent) == pytest.approx(exact, rel=0.0026)
        assert histogram.mean == pytest.approx(samples.mean())
        assert (histogram.least, histogram.most) == (samples.min(), samples.max())


def test_samples_may_count_several_times_or_not_at_all():
    histogram = Histogram()
    histogram.add_many(np.array([1.0, 9.0, 5.0]), np.array([3, 1, 0]))
    assert (histogram.count, histogram.total, histogram.most) == (4, 12.0, 9.0)
    assert histogram.percentile(75) == pytest.approx(1.0, rel=0.003)
    assert histogram.percentile(76) == pytest.approx(9.0, rel=0.003)


def test_merged_histograms_are_those_of_all_samples():
    parts, whole = [Histogram(), Histogram()], Histogram()
    for i, value in enumerate([0.0, 0.001, 0.002, 0.4, 70.0]):
        parts[i % 2].add(value)
        whole.add(value)
    parts[0].merge(parts[1])
    assert parts[0].summary_ms() == pytest.approx(whole.summary_ms())
    assert parts[0].least == 0.0


def test_an_empty_histogram_has_no_summary():
    assert Histogram().summary_ms() is None


# ---- the timeline ----


def test_a_timeline_with_room_keeps_each_step():
    timeline = Timeline()
    steps(timeline, 0.0, [0.5], decode_rows=3, prefill_tokens=20, chunks=1)
    steps(timeline, 2.0, [0.1, 0.3], decode_rows=4, preemptions=1)
    columns = timeline.columns()
    assert columns["start_s"].tolist() == [0.0, 2.0]
    assert columns["end_s"].tolist() == pytest.approx([0.5, 2.4])
    assert columns["max_step_s"].tolist() == [0.5, 0.3]
    assert columns["decode_rows"].tolist() == [3.0, 4.0]
    assert columns["preemptions"].tolist() == [0.0, 1.0]
    assert timeline.totals()["decode_rows"] == 3 + 2 * 4
    assert timeline.mixed_s.count == 1
    assert timeline.decode_s.count == 2
    assert timeline.peaks["decode_rows"] == 4


@pytest.mark.parametrize("idle_s", [0.0, 5.0])
def test_a_full_timeline_halves_its_resolution_and_keeps_its_sums(idle_s):
    timeline, now = Timeline(capacity=64), 0.0
    rng = np.random.default_rng(1)
    sums = {"decode_rows": 0, "prefill_tokens": 0, "busy_s": 0.0, "steps": 0}
    for i in range(20_000):
        durations = rng.uniform(0.001, 0.01, rng.integers(1, 4))
        rows, tokens = int(rng.integers(9)), int(rng.integers(100))
        steps(timeline, now, durations, decode_rows=rows, prefill_tokens=tokens)
        now += durations.sum() + (idle_s if i % 1000 == 0 else 0.0)
        sums["decode_rows"] += rows * len(durations)
        sums["prefill_tokens"] += tokens * len(durations)
        sums["busy_s"] += durations.sum()
        sums["steps"] += len(durations)
    columns, totals = timeline.columns(), timeline.totals()
    assert {name: totals[name] for name in sums} == pytest.approx(sums)
    assert 4 < len(columns["start_s"]) <= 64
    assert (np.diff(columns["start_s"]) > 0).all()
    assert columns["end_s"].max() <= now + 1e-9


# ---- the recorder ----


def test_memory_does_not_grow_with_the_number_of_steps():
    recorder = Recorder()

    def feed(count):
        for i in range(count):
            recorder.on_steps(i * 1e-3, np.array([1e-3]), 8, 0, 0, 100, 5, 0, 0, 8)
            recorder.on_gaps(np.array([1e-3]), 8)

    feed(20_000)
    tracemalloc.start()
    feed(8192 * 3)  # as many flushes as fit: what is buffered is equal before and after
    before, _ = tracemalloc.get_traced_memory()
    feed(8192 * 6)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 100_000
    assert recorder.itl.count == 8 * (20_000 + 9 * 8192)


def test_telling_the_recorder_of_a_step_costs_microseconds():
    recorder, one = Recorder(), np.array([1e-3])
    begin = time.perf_counter()
    for i in range(20_000):
        recorder.on_steps(i * 1e-3, one, 8, 0, 0, 100, 5, 0, 0, 8)
        recorder.on_gaps(one, 8)
    assert (time.perf_counter() - begin) / 40_000 < 30e-6  # about 1 us; the bound is for a busy CI


def test_latencies_goodput_and_rates_follow_from_the_requests():
    recorder = Recorder(default_targets=Targets(ttft_s=0.5, itl_s=0.02))
    ended(recorder, ttft_s=0.1, gap_s=0.01)
    ended(recorder, ttft_s=0.6, gap_s=0.01, arrival_s=1.0)  # late
    ended(recorder, ttft_s=0.1, gap_s=0.03, arrival_s=1.0, cached=32)  # slow
    ended(recorder, ttft_s=0.1, output=1, arrival_s=1.9)  # no gap: any ITL will do
    recorder.on_gaps(np.array([0.01, 0.03]), 10)
    report = to_dict(recorder, CONFIG, num_refused=4)
    assert report["duration_s"] == pytest.approx(2.0)
    assert report["goodput"] == pytest.approx({"requests_per_s": 1.0, "share_percent": 25.0})
    assert report["requests_per_s"] == pytest.approx(2.0)
    assert report["output_tokens_per_s"] == pytest.approx(17.0)
    assert report["total_tokens_per_s"] == pytest.approx((160 + 34) / 2)
    assert report["prefix_hit_percent"] == pytest.approx(20.0)
    assert report["ttft_ms"]["max"] == pytest.approx(600)
    assert report["tpot_ms"]["max"] == pytest.approx(30)
    assert report["itl_ms"]["mean"] == pytest.approx(20)
    assert report["queue_ms"]["p50"] == pytest.approx(50, rel=0.003)
    assert "25.0 % within ttft_ms 500, itl_ms 20" in text(report)
    assert "refused      4" in text(report)


def test_each_class_is_measured_by_its_own_targets():
    recorder = Recorder({"chat": Targets(ttft_s=0.2), "batch": Targets()})
    for kind in ("chat", "batch", "chat"):
        ended(recorder, ttft_s=0.3, request_class=kind)
    report = to_dict(recorder, CONFIG)
    assert report["classes"]["chat"]["goodput"]["share_percent"] == 0
    assert report["classes"]["batch"]["goodput"]["share_percent"] == 100
    assert "the targets of their classes" in text(report)
    assert "Classes" not in text(report)
    assert "classes  requests" in text(report)


def test_requests_that_did_not_complete_have_no_latencies_but_a_reason():
    recorder = Recorder()
    ended(recorder)
    request = Request("late", [1], SamplingView(max_tokens=1))
    request.finish_reason = FinishReason.DEADLINE
    recorder.on_finish(request, 3.0, None, None)
    report = to_dict(recorder, CONFIG)
    assert (report["num_requests"], report["num_complete"]) == (2, 1)
    assert report["e2e_ms"]["max"] < 1000
    assert report["prompt_tokens"] == 40
    assert "ended early  1 deadline" in text(report)


def test_preemptions_are_counted_by_cause_and_shown_at_their_step():
    recorder = Recorder()
    request = ended(recorder, preemptions=2)
    recorder.on_preemption(request, "no_free_page")
    recorder.on_preemption(request, "no_free_page")
    recorder.on_steps(0.0, np.array([0.1]), 1, 0, 0, 1, 50, 25, 0, 1)
    recorder.on_steps(0.1, np.array([0.1]), 1, 0, 0, 1, 50, 25, 3, 1)
    report = to_dict(recorder, CONFIG)
    assert report["preemptions"] == {"no_free_page": 2}
    assert report["num_preempted"] == 1
    assert recorder.timeline.columns()["preemptions"].tolist() == [2.0, 0.0]
    assert report["utilisation"]["pages_percent"] == pytest.approx(50.0)
    assert report["utilisation"]["slots_percent"] == pytest.approx(25.0)
    assert report["utilisation"]["busy_percent"] == pytest.approx(100.0)
    assert report["utilisation"]["peak_waiting"] == 3


# ---- fairness ----


def test_jains_index_is_1_for_equals_and_one_nth_for_a_monopoly():
    assert jain([5, 5, 5]) == pytest.approx(1.0)
    assert jain([9, 0, 0]) == pytest.approx(1 / 3)
    assert jain([0, 0]) == 1.0


def test_fairness_counts_what_was_served_while_there_was_load_over_weights():
    recorder = Recorder()
    for tenant, count in (("gold", 3), ("free", 1)):
        for _ in range(count):
            ended(recorder, tenant=tenant)
    recorder.on_load_end(12.0)
    for _ in range(20):
        ended(recorder, tenant="free")  # alone at the end: nobody competes
    fairness = to_dict(recorder, CONFIG)["fairness"]
    assert fairness["jain"] == pytest.approx(1.0)
    assert fairness["num_tenants"] == 2
    assert "12.0 s" in fairness["scope"]


def test_one_tenant_alone_has_no_fairness():
    recorder = Recorder()
    ended(recorder, tenant="gold")
    assert to_dict(recorder, CONFIG)["fairness"] is None


def test_of_very_many_tenants_the_largest_are_told_apart():
    recorder = Recorder()
    for i in range(5 * MAX_TENANTS):
        ended(recorder, tenant=f"small{i}", output=1)
        ended(recorder, tenant="large", output=100)
    tenants = recorder.largest_tenants()
    assert len(tenants) <= MAX_TENANTS
    assert tenants["large"].num_complete == 5 * MAX_TENANTS
    pooled = recorder.other_tenants.num_requests
    assert pooled + sum(g.num_requests for g in tenants.values()) == 10 * MAX_TENANTS


def test_a_table_is_aligned():
    assert table([["a", "bb"], ["long", "3"]]) == "a     bb\nlong   3"
