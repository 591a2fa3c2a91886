"""Turns what was recorded into plain figures, and figures into text. Knows numbers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jserve.sim.histogram import PERCENTILES
from jserve.sim.recorder import MAX_TENANTS, Group, Recorder
from scheduler.config import SchedulerConfig

MAX_TENANTS_SHOWN = 10
UNNAMED = "(none)"  # shown for requests without a class or tenant
COMPARED = (  # columns of a comparison: title, path in the report, decimals
    ("TTFT p50", ("ttft_ms", "p50"), 1),
    ("TTFT p95", ("ttft_ms", "p95"), 1),
    ("ITL p50", ("itl_ms", "p50"), 1),
    ("ITL p95", ("itl_ms", "p95"), 1),
    ("TPOT p95", ("tpot_ms", "p95"), 1),
    ("E2E p95", ("e2e_ms", "p95"), 1),
    ("out tok/s", ("output_tokens_per_s",), 1),
    ("req/s", ("requests_per_s",), 2),
    ("good %", ("goodput", "share_percent"), 1),
    ("Jain", ("fairness", "jain"), 3),
    ("preempt", ("num_preemptions",), 0),
    ("cached %", ("prefix_hit_percent",), 1),
    ("busy %", ("utilisation", "busy_percent"), 1),
)


Rows = list[list[str]]  # of a table, the header first


def jain(shares: Sequence[float]) -> float:
    """Returns Jain's fairness index: 1 when all are equal, 1/n when one has everything.

    Source: Jain, Chiu, Hawe, DEC-TR-301, 1984.
    """
    squares = sum(x * x for x in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def to_dict(
    recorder: Recorder,
    config: SchedulerConfig,
    num_refused: int = 0,
    skipped: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Returns a run's report; plain JSON values.

    Rates are over `duration_s`, from the first arrival to the last end. `itl_ms` has a sample per
    token, every other time one per request. `goodput` counts complete requests within the targets
    of their class, its share is of all that came; None without targets. `num_refused`: by the
    bounds of the queue. `skipped`: requests that were never sent, and why.
    """
    r, total = recorder, recorder.total
    targets = {"": r.default_targets.in_ms(), **{k: t.in_ms() for k, t in r.targets.items()}}
    has_targets = any(targets.values())
    duration_s = max(r.last_end_s - r.first_arrival_s, 0.0)
    per_s = 1 / duration_s if duration_s else 0.0
    tokens = total.prompt_tokens + total.output_tokens
    tenants = r.largest_tenants()
    report = {
        "duration_s": duration_s,
        **_group(total, per_s, has_targets),
        "targets": targets,
        "num_refused": num_refused,
        "itl_ms": r.itl.summary_ms(),
        "total_tokens_per_s": tokens * per_s,
        "finish_reasons": dict(r.finish_reasons),
        "skipped": dict(skipped or {}),
        "num_preemptions": sum(r.preemptions.values()),
        "preemptions": dict(r.preemptions),
        "fairness": _fairness(r, config.tenant_weights),
        "utilisation": _utilisation(r, config, per_s),
        "classes": {
            k or UNNAMED: _group(g, per_s, has_targets) for k, g in sorted(r.classes.items())
        },
        "tenants": {
            k or UNNAMED: _group(g, per_s, has_targets) for k, g in sorted(tenants.items())
        },
    }
    if has_targets:
        came = total.num_requests + num_refused
        report["goodput"]["share_percent"] = _percent(total.num_good, came)
    if r.other_tenants.num_requests:
        report["other_tenants"] = _group(r.other_tenants, per_s, has_targets)
    return report


def _group(group: Group, per_s: float, has_targets: bool) -> dict[str, Any]:
    return {
        "num_requests": group.num_requests,
        "num_complete": group.num_complete,
        "num_preempted": group.num_preempted,
        "requests_per_s": group.num_complete * per_s,
        "prompt_tokens": group.prompt_tokens,
        "cached_prompt_tokens": group.cached_tokens,
        "prefix_hit_percent": _percent(group.cached_tokens, group.prompt_tokens),
        "output_tokens": group.output_tokens,
        "output_tokens_per_s": group.output_tokens * per_s,
        "goodput": {
            "requests_per_s": group.num_good * per_s,
            "share_percent": _percent(group.num_good, group.num_requests),
        }
        if has_targets
        else None,
        "ttft_ms": group.ttft.summary_ms(),
        "tpot_ms": group.tpot.summary_ms(),
        "e2e_ms": group.e2e.summary_ms(),
        "queue_ms": group.queue.summary_ms(),
    }


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


def _fairness(recorder: Recorder, weights: Mapping[str, float]) -> dict[str, Any] | None:
    """Jain's index of served tokens over weight, while there was load if anything ended then."""
    served = recorder.served_under_load
    scope = f"requests that ended by the last arrival, at {recorder.load_end_s or 0.0:.1f} s"
    if not any(served.values()):
        served = {name: g.served_tokens for name, g in recorder.largest_tenants().items()}
        scope = "the whole run"
    if len(served) < 2:
        return None
    if recorder.other_tenants.num_requests:
        scope += f", the {MAX_TENANTS} or more largest tenants"
    shares = [tokens / weights.get(name, 1.0) for name, tokens in served.items()]
    return {"jain": jain(shares), "num_tenants": len(shares), "scope": scope}


def _utilisation(recorder: Recorder, config: SchedulerConfig, per_s: float) -> dict[str, Any]:
    totals, peaks = recorder.timeline.totals(), recorder.timeline.peaks
    steps = totals["steps"]
    mean = {name: totals[name] / steps if steps else 0.0 for name in totals}
    pages = config.num_pages - 1
    return {
        "steps": int(steps),
        "busy_percent": 100 * totals["busy_s"] * per_s,
        "mean_step_ms": 1e3 * mean["busy_s"],
        "decode_step_ms": recorder.timeline.decode_s.summary_ms(),
        "mixed_step_ms": recorder.timeline.mixed_s.summary_ms(),
        "decode_rows_per_step": mean["decode_rows"],
        "prefill_tokens_per_step": mean["prefill_tokens"],
        "slots_percent": _percent(mean["running"], config.max_num_seqs),
        "budget_percent": _percent(
            mean["decode_rows"] + mean["prefill_tokens"], config.max_num_batched_tokens
        ),
        "pages_percent": _percent(mean["pages_used"], pages),
        "peak_pages_percent": _percent(peaks["pages_used"], pages),
        "peak_waiting": int(peaks["waiting"]),
    }


def text(report: Mapping[str, Any]) -> str:
    """Returns a run's report for people."""
    r, use = report, report["utilisation"]
    lines = [
        f"requests     {r['num_complete']} complete of {r['num_requests']} in "
        f"{r['duration_s']:.2f} s, {r['requests_per_s']:.2f}/s",
        f"tokens       {r['prompt_tokens']} prompt ({r['prefix_hit_percent']:.1f} % cached), "
        f"{r['output_tokens']} output",
        f"tokens/s     {r['output_tokens_per_s']:.1f} output, {r['total_tokens_per_s']:.1f} total",
        f"device       {use['busy_percent']:.1f} % busy, {use['steps']} steps of "
        f"{use['mean_step_ms']:.2f} ms on average",
        f"steps hold   {use['decode_rows_per_step']:.1f} decode rows and "
        f"{use['prefill_tokens_per_step']:.1f} prefill tokens, "
        f"{use['budget_percent']:.1f} % of the token budget",
        f"slots        {use['slots_percent']:.1f} % in use; at most {use['peak_waiting']} waited",
        f"pages        {use['pages_percent']:.1f} % in use, {use['peak_pages_percent']:.1f} % at "
        "the peak",
        f"preemptions  {_counts(r['preemptions'])}, of {r['num_preempted']} requests",
    ]
    if r["goodput"]:
        lines.insert(3, f"goodput      {_goodput_text(r)}")
    if fairness := r["fairness"]:
        lines.append(
            f"fairness     Jain {fairness['jain']:.3f} over {fairness['num_tenants']} tenants "
            f"({fairness['scope']})"
        )
    if r["num_refused"]:
        lines.append(
            f"refused      {r['num_refused']} by --max_queued_requests or --max_queued_tokens"
        )
    lines += [f"skipped      {count}: {why}" for why, count in r["skipped"].items()]
    ended = {k: n for k, n in r["finish_reasons"].items() if k not in ("stop", "length")}
    if ended:
        lines.append(f"ended early  {_counts(ended)}")
    for rows in tables(r).values():
        lines += ["", table(rows)]
    return "\n".join(lines)


def tables(report: Mapping[str, Any]) -> dict[str, Rows]:
    """Returns a run's tables by heading: latencies, and of classes and tenants if there are two."""
    shown = {"Latencies": _latencies(report)}
    for heading, groups in (("Classes", report["classes"]), ("Tenants", report["tenants"])):
        if len(groups) > 1:
            shown[heading] = _groups_table(heading, groups)
    return shown


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items()) or "0"


def _goodput_text(report: Mapping[str, Any]) -> str:
    goodput, targets = report["goodput"], dict(report["targets"])
    default = targets.pop("")
    own = any(limits != default for limits in targets.values())
    named = ", ".join(f"{name} {limit:g}" for name, limit in default.items())
    return (
        f"{goodput['requests_per_s']:.2f}/s, {goodput['share_percent']:.1f} % within "
        f"{'the targets of their classes' if own else named}"
    )


def _latencies(report: Mapping[str, Any]) -> Rows:
    return times_table(
        {k: report[f"{k.lower()}_ms"] for k in ("TTFT", "ITL", "TPOT", "E2E", "Queue")}
    )


def times_table(summaries: Mapping[str, Mapping[str, float] | None]) -> Rows:
    """Returns a row per distribution, in milliseconds."""
    columns = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
    rows = [["ms", *columns]]
    for name, values in summaries.items():
        rows.append([name, *(f"{values[c]:.1f}" if values else "-" for c in columns)])
    return rows


def _groups_table(heading: str, groups: Mapping[str, Mapping[str, Any]]) -> Rows:
    largest = sorted(groups, key=lambda name: -groups[name]["num_requests"])[:MAX_TENANTS_SHOWN]
    columns = ["TTFT p50", "TTFT p95", "TPOT p95", "E2E p95", "out tok/s", "req/s"]
    if any(group["goodput"] for group in groups.values()):
        columns.append("good %")
    paths = {name: (path, decimals) for name, path, decimals in COMPARED}
    rows = [[heading.lower(), "requests", *columns]]
    for name in sorted(largest):
        group = groups[name]
        cells = (_cell(group, *paths[c]) for c in columns)
        rows.append([name, str(group["num_requests"]), *cells])
    if len(groups) > len(largest):
        rows.append([f"and {len(groups) - len(largest)} more", *[""] * (len(columns) + 1)])
    return rows


def _cell(report: Mapping[str, Any], path: Sequence[str], decimals: int) -> str:
    value = value_at(report, path)
    return "-" if value is None else f"{value:.{decimals}f}"


def value_at(report: Mapping[str, Any], path: Sequence[str]) -> float | None:
    """Returns the figure at a path of names, or None where there is none."""
    value: Any = report
    for name in path:
        value = value.get(name) if value is not None else None
    return value


def comparison(runs: Sequence[tuple[Mapping[str, str], Mapping[str, Any]]]) -> Rows:
    """Returns one row per run of (settings, report): what was set, then the figures compared.

    Columns in which no run has a figure are left out. Times are in milliseconds.
    """
    shown = [c for c in COMPARED if any(value_at(report, c[1]) is not None for _, report in runs)]
    names = list(runs[0][0])
    rows = [[*names, *(title for title, _, _ in shown)]]
    for settings, report in runs:
        cells = (_cell(report, path, decimals) for _, path, decimals in shown)
        rows.append([*(settings[name] for name in names), *cells])
    return rows


def table(rows: Rows) -> str:
    """Returns aligned columns, the first to the left; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in rows
    )
