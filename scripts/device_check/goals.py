"""What the check must show, judged from its records. Knows names and numbers; standard library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

LARGE_DECODE_BYTES = 2**28  # below, a layer is too short to be judged by bandwidth
LARGE_CHUNK = 2048  # tokens of prefill; below, there are too few tiles to fill a GPU


@dataclass(frozen=True, slots=True)
class Goal:
    """`got` is None where nothing was measured; `is_met` is then None too."""

    name: str
    wanted: str
    got: Any
    is_met: bool | None


def judge(records: Iterable[dict[str, Any]]) -> list[Goal]:
    """Returns every goal of the check, met or not; the worst of what was measured counts."""
    records = list(records)
    good = [r for r in records if "error" not in r and "skipped" not in r]
    kernels = [r for r in good if r["part"] == "kernels" and r.get("form") == "kernel"]
    decode = [r["share"] for r in kernels if r.get("bytes", 0) >= LARGE_DECODE_BYTES]
    prefill = [r["share"] for r in kernels if r.get("chunk", 0) >= LARGE_CHUNK]
    engine = {r["name"]: r for r in good if r["part"] == "engine"}
    rates = [r["roofline_share"] for r in engine.values() if "roofline_share" in r]
    gaps = [r["gap_us"] for r in engine.values() if "gap_us" in r]
    compilations = [r["compilations"] for r in engine.values() if "compilations" in r]
    recovered = [r["recovers"] for r in engine.values() if "recovers" in r]
    numerics = [r for r in records if r["part"] == "numerics" and ("ok" in r or "error" in r)]
    wrong = [r["name"] for r in numerics if not r.get("ok")]
    return [
        _goal("numerics", "every case within its tolerance", wrong if numerics else None,
              lambda names: not names),
        _goal("decode attention", ">= 0.85 of copy bandwidth", min(decode, default=None),
              lambda share: share >= 0.85),
        _goal("prefill attention", ">= 0.60 of matmul rate", min(prefill, default=None),
              lambda share: share >= 0.60),
        _goal("engine decode", ">= 0.80 of the bandwidth roofline", min(rates, default=None),
              lambda share: share >= 0.80),
        _goal("idle gap between steps", "< 50 us", max(gaps, default=None),
              lambda gap_us: gap_us < 50),
        _goal("compilations after warm-up", "0", max(compilations, default=None),
              lambda count: count == 0),
        _goal("after a step that fails", "the same tokens", min(recovered, default=None),
              lambda recovers: recovers),
    ]  # fmt: skip


def _goal(name: str, wanted: str, got: Any, is_met) -> Goal:
    return Goal(name, wanted, got, None if got is None else is_met(got))


def as_json(goals: list[Goal]) -> list[dict[str, Any]]:
    return [asdict(goal) for goal in goals]
