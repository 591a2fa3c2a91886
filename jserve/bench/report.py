"""Turns results into percentiles, rates and goodput, as JSON and as a table. Knows numbers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jserve.bench.load import RequestResult
from jserve.errors import ConfigError

PERCENTILES = (50, 90, 95, 99)
GOODPUT_KEYS = ("ttft_ms", "itl_ms", "e2e_ms")


def parse_goodput(text: str) -> dict[str, float]:
    """Reads targets such as "ttft_ms:500,itl_ms:50". Raises ConfigError."""
    try:
        pairs = [part.split(":") for part in text.split(",") if part]
        targets = {name.strip(): float(limit) for name, limit in pairs}
    except ValueError:
        targets = {"": 0.0}
    if not all(name in GOODPUT_KEYS and limit > 0 for name, limit in targets.items()):
        raise ConfigError(
            f"--goodput={text} is not understood; use ttft_ms:500,itl_ms:50,e2e_ms:9000"
        )
    return targets


def summarize(
    results: Sequence[RequestResult], goodput_targets: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Returns the report of a run; plain JSON values.

    Times are in milliseconds, over requests that succeeded: `ttft_ms`, `e2e_ms` and `queue_ms`
    have a sample per request, `itl_ms` one per token. Where nothing was measured (no server told
    its queue time) the entry is None. `goodput` is the rate of requests that met all targets, with
    the request's mean ITL against `itl_ms`. Rates are over `duration_s`, from the first request's
    due time to the last one's end.
    """
    good = [r for r in results if r.error is None]
    duration_s = max((r.end_s for r in results), default=0.0) - min(
        (r.due_s for r in results), default=0.0
    )
    per_s = (lambda n: n / duration_s) if duration_s > 0 else lambda n: 0.0
    num_prompt = sum(r.usage.prompt_tokens for r in good)
    num_output = sum(r.usage.completion_tokens for r in good)
    report: dict[str, Any] = {
        "num_requests": len(results),
        "num_ok": len(good),
        "num_failed": len(results) - len(good),
        "failures": dict(Counter(r.error for r in results if r.error is not None).most_common(10)),
        "duration_s": duration_s,
        "requests_per_s": per_s(len(good)),
        "prompt_tokens": num_prompt,
        "cached_prompt_tokens": sum(r.usage.cached_tokens for r in good),
        "output_tokens": num_output,
        "prompt_tokens_per_s": per_s(num_prompt),
        "output_tokens_per_s": per_s(num_output),
        "total_tokens_per_s": per_s(num_prompt + num_output),
        "max_send_lag_ms": 1e3 * max((r.sent_s - r.due_s for r in results), default=0.0),
        "ttft_ms": _percentiles(r.ttft_s for r in good),
        "itl_ms": _percentiles(gap for r in good for gap in r.gaps_s),
        "e2e_ms": _percentiles(r.e2e_s for r in good),
        "queue_ms": _percentiles(r.queue_s for r in good),
    }
    if goodput_targets:
        num_met = sum(_meets(r, goodput_targets) for r in good)
        report["goodput"] = {
            "targets": dict(goodput_targets),
            "requests_per_s": per_s(num_met),
            "share": num_met / len(results) if results else 0.0,
        }
    return report


def _percentiles(seconds: Iterable[float | None]) -> dict[str, float] | None:
    samples = 1e3 * np.array([s for s in seconds if s is not None], dtype=np.float64)
    if not samples.size:
        return None
    values = {f"p{p}": float(np.percentile(samples, p)) for p in PERCENTILES}
    return {"mean": float(samples.mean()), **values, "max": float(samples.max())}


def _meets(result: RequestResult, targets: Mapping[str, float]) -> bool:
    """A request of one token has no gaps, and so meets any ITL."""
    measured = {
        "ttft_ms": result.ttft_s,
        "itl_ms": result.mean_itl_s or 0.0,
        "e2e_ms": result.e2e_s,
    }
    values = [(measured[name], limit) for name, limit in targets.items()]
    return all(value is not None and 1e3 * value <= limit for value, limit in values)


def table(report: Mapping[str, Any]) -> str:
    """Returns the report for people, as lines of text."""
    r = report
    lines = [
        f"requests  {r['num_ok']} ok, {r['num_failed']} failed in {r['duration_s']:.2f} s, "
        f"{r['requests_per_s']:.2f}/s",
        f"tokens    {r['prompt_tokens']} prompt ({r['cached_prompt_tokens']} cached), "
        f"{r['output_tokens']} output",
        f"tokens/s  {r['prompt_tokens_per_s']:.1f} prompt, {r['output_tokens_per_s']:.1f} output, "
        f"{r['total_tokens_per_s']:.1f} total",
    ]
    if goodput := r.get("goodput"):
        targets = ", ".join(f"{k} {v:g}" for k, v in goodput["targets"].items())
        share = f"{100 * goodput['share']:.1f} %"
        lines.append(f"goodput   {goodput['requests_per_s']:.2f}/s, {share} within {targets}")
    columns = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
    lines.append(f"{'ms':<9}" + "".join(f"{name:>10}" for name in columns))
    for name in ("ttft", "itl", "e2e", "queue"):
        values = r[f"{name}_ms"]
        cells = [f"{values[c]:>10.1f}" if values else f"{'-':>10}" for c in columns]
        lines.append(f"{name.upper():<9}" + "".join(cells))
    lines += [f"failed {count} times: {why}" for why, count in r["failures"].items()]
    return "\n".join(lines)
