"""Runs simulations: one, a table of them, or a search. Knows setups and reports: not how they are
shown."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from absl import flags
from tqdm import tqdm

from jserve.errors import ConfigError
from jserve.sim.recorder import Recorder
from jserve.sim.report import to_dict, value_at
from jserve.sim.setup import Setup, setup_from_flags
from scheduler.request import Request
from scheduler.simulator import simulate


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation: the flags that set it apart from others, and what came of it."""

    settings: dict[str, str]
    setup: Setup
    recorder: Recorder
    report: dict[str, Any]


def run_once(setup: Setup, settings: dict[str, str] | None = None) -> Run:
    """Simulates one setup, with a progress bar on a terminal's stderr."""
    recorder = Recorder(setup.targets, setup.default_targets)
    skipped: Counter[str] = Counter()

    def load() -> Iterator[Request]:
        request = None
        for request in setup.open_requests(skipped):
            bar.update()
            yield request
        if request is not None:
            recorder.on_load_end(request.arrival_time)

    label = " ".join(f"{name}={value}" for name, value in (settings or {}).items())
    with tqdm(total=setup.num_requests or None, desc=label, unit="request", disable=None) as bar:
        totals = simulate(
            setup.config,
            setup.step_time,
            load(),
            recorder,
            overlap=setup.overlap,
            closed_loop=setup.closed_loop,
            swap_page_s=setup.swap_page_s,
        )
    if not recorder.total.num_requests:
        raise ConfigError(f"no request was simulated; left out: {dict(skipped) or 'none'}")
    report = to_dict(recorder, setup.config, totals.num_refused, skipped)
    return Run(settings or {}, setup, recorder, {"timed_by": setup.timed_by, **report})


def parse_variants(flag: str, text: str) -> tuple[str, list[str]]:
    """Reads "name=value,value" of --compare and --sweep. Raises ConfigError."""
    name, _, listed = text.partition("=")
    choices = [value.strip() for value in listed.split(",") if value.strip()]
    if not name.strip() or len(choices) < 2:
        raise ConfigError(
            f"--{flag}={text} needs a flag and two values at least, as in policy=fcfs,sjf"
        )
    return name.strip(), choices


def run_variants(
    values: flags.FlagValues, variants: Sequence[tuple[str, list[str]]]
) -> Iterator[Run]:
    """Yields a run for each combination of the flags' values, the last flag's changing fastest."""
    names = [name for name, _ in variants]
    for combination in itertools.product(*(choices for _, choices in variants)):
        settings = dict(zip(names, combination, strict=True))
        with _flags_set(values, settings):
            yield run_once(setup_from_flags(values), settings)


@contextmanager
def _flags_set(values: flags.FlagValues, settings: dict[str, str]) -> Iterator[None]:
    before = {}
    try:
        for name, text in settings.items():
            if name not in values:
                raise ConfigError(f"there is no --{name} to vary; --help lists the flags")
            try:
                parsed = values[name].parser.parse(text)
            except ValueError as error:
                raise ConfigError(f"--{name}={text}: {error}") from error
            before[name] = values[name].value
            values[name].value = parsed
        yield
    finally:
        for name, value in before.items():
            values[name].value = value


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Where p95 TPOT crosses a target: the largest cap within it and the next one tried."""

    tpot_slo_ms: float
    largest_within: Run | None
    smallest_beyond: Run | None
    runs: list[Run]  # in order of their cap

    def text(self) -> str:
        flag, target = "--max_num_seqs", f"the target of {self.tpot_slo_ms:g} ms"
        within, beyond = self.largest_within, self.smallest_beyond
        if within is None:
            assert beyond is not None, "some cap was tried"
            return f"even {flag}={_cap(beyond)} has p95 TPOT {_tpot(beyond):.1f} ms, above {target}"
        found = f"{flag}={_cap(within)}: p95 TPOT {_tpot(within):.1f} ms, within {target}"
        if beyond is None:
            return f"{found}; so is every cap tried, and the load may never fill more slots"
        return f"{found}; it crosses the target by {_cap(beyond)}, with {_tpot(beyond):.1f} ms"

    def to_dict(self) -> dict[str, Any]:
        ends = {"largest_within": self.largest_within, "smallest_beyond": self.smallest_beyond}
        return {
            "tpot_slo_ms": self.tpot_slo_ms,
            **{
                name: {"max_num_seqs": _cap(run), "tpot_p95_ms": _tpot(run)} if run else None
                for name, run in ends.items()
            },
        }


def recommend(
    values: flags.FlagValues, tpot_slo_ms: float, candidates: Sequence[int]
) -> Recommendation:
    """Bisects ascending `candidates` for the largest --max_num_seqs whose p95 TPOT is within the
    target, taking it that TPOT grows with the cap."""
    runs: dict[int, Run] = {}
    low, high = -1, len(candidates)  # the largest known to be within, the smallest beyond
    while high - low > 1:
        middle = (low + high) // 2
        settings = {"max_num_seqs": str(candidates[middle])}
        with _flags_set(values, settings):
            run = runs[middle] = run_once(setup_from_flags(values), settings)
        if _tpot(run) <= tpot_slo_ms:
            low = middle
        else:
            high = middle
    ordered = [runs[i] for i in sorted(runs)]
    return Recommendation(tpot_slo_ms, runs.get(low), runs.get(high), ordered)


def _cap(run: Run) -> int:
    return run.setup.config.max_num_seqs


def _tpot(run: Run) -> float:
    return value_at(run.report, ("tpot_ms", "p95")) or 0.0
