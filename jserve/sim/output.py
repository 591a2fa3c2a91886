"""Shows results wherever the flags say: text, JSON, PNG, HTML. Knows reports and the ways to show
them: runs nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from jserve.errors import ConfigError
from jserve.sim import plot, report
from jserve.sim.page import Table, write_page
from jserve.sim.runs import Recommendation, Run
from jserve.sim.step_log import StepLog

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_UNRECORDED = ("json", "plot", "html")  # flags that tell nothing about a run
_CARDS = (  # title, path in the report, format
    ("requests/s", ("requests_per_s",), "{:.2f}"),
    ("output tokens/s", ("output_tokens_per_s",), "{:,.0f}"),
    ("TTFT p95", ("ttft_ms", "p95"), "{:,.1f} ms"),
    ("ITL p95", ("itl_ms", "p95"), "{:,.1f} ms"),
    ("goodput", ("goodput", "share_percent"), "{:.1f} %"),
    ("fairness, Jain", ("fairness", "jain"), "{:.3f}"),
    ("device busy", ("utilisation", "busy_percent"), "{:.1f} %"),
    ("steps", ("utilisation", "steps"), "{:,}"),
    ("prompt tokens cached", ("prefix_hit_percent",), "{:.1f} %"),
    ("preemptions", ("num_preemptions",), "{:,}"),
)


def check_outputs(values: flags.FlagValues) -> None:
    """Raises ConfigError now for what would otherwise fail after a long run."""
    for name in ("json", "plot", "html"):
        path = values[name].value
        if path and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"--{name}={path}: there is no such folder; make it first")
    if values.plot or values.html:
        plot.figure_class()


def show_run(values: flags.FlagValues, run: Run) -> None:
    print(f"timed by     {run.setup.timed_by}")
    print(report.text(run.report))
    config = run.setup.config
    limits = plot.Limits(config.num_pages, config.max_num_seqs)
    _write(
        values,
        "Simulated serving",
        f"Timed by {run.setup.timed_by}. {_settings_text(values)}",
        cards=_cards(run.report, _CARDS),
        tables=report.tables(run.report),
        draw=lambda: {
            "Distributions": plot.distributions_figure(_distributions(run)),
            "Steps over time": plot.timeline_figure(run.recorder.timeline, limits),
        },
        data=run.report,
    )


def show_runs(values: flags.FlagValues, runs: Sequence[Run]) -> None:
    compared = [(run.settings, run.report) for run in runs]
    rows = report.comparison(compared)
    print(report.table(rows))
    _write(
        values,
        "Simulated runs compared",
        f"Timed by {runs[0].setup.timed_by}. {_settings_text(values)}",
        tables={"Comparison": rows},
        draw=lambda: {"Figures": plot.comparison_figure(compared)},
        data={"runs": [{"settings": s, "report": r} for s, r in compared]},
    )


def show_recommendation(values: flags.FlagValues, found: Recommendation) -> None:
    compared = [(run.settings, run.report) for run in found.runs]
    rows = report.comparison(compared)
    print(f"{report.table(rows)}\n\n{found.text()}")
    target = found.tpot_slo_ms
    _write(
        values,
        "Recommended batch cap",
        f"{found.text()}. {_settings_text(values)}",
        tables={"Caps tried": rows},
        draw=lambda: {"Figures": plot.comparison_figure(compared, tpot_slo_ms=target)},
        data={
            "recommendation": found.to_dict(),
            "runs": [{"settings": s, "report": r} for s, r in compared],
        },
    )


def show_step_log(values: flags.FlagValues, log: StepLog) -> None:
    timeline = log.timeline()
    totals, peaks = timeline.totals(), timeline.peaks
    steps = totals["steps"]
    if not steps:
        raise ConfigError(f"{log.path} has no step; let the server run some requests first")
    columns = timeline.columns()
    duration_s = float(columns["end_s"].max() - columns["start_s"].min())
    figures = {
        "steps": steps,
        "duration_s": duration_s,
        "busy_percent": 100 * totals["busy_s"] / duration_s if duration_s else 0.0,
        "decode_rows_per_step": totals["decode_rows"] / steps,
        "prefill_tokens_per_step": totals["prefill_tokens"] / steps,
        "peak_pages_used": peaks["pages_used"],
        "peak_waiting": peaks["waiting"],
        "preemptions": totals["preemptions"],
    }
    series = {"without prompts": timeline.decode_s, "with prompts": timeline.mixed_s}
    rows = report.times_table({name: h.summary_ms() for name, h in series.items()})
    print(report.table([[name, f"{number:.5g}"] for name, number in figures.items()]))
    print(f"\n{report.table(rows)}")
    limits = plot.Limits(int(log.header.get("num_pages") or 0))
    _write(
        values,
        "Steps of a real engine",
        f"{log.path}, model {log.header.get('model', 'unknown')}",
        cards={name.replace("_", " "): f"{number:,.5g}" for name, number in figures.items()},
        tables={"Step times": rows},
        draw=lambda: {
            "Distributions": plot.distributions_figure({"Step time": series}),
            "Steps over time": plot.timeline_figure(timeline, limits),
        },
        data={"header": log.header, **figures},
    )


def _write(
    values: flags.FlagValues,
    title: str,
    about: str,
    *,
    cards: Mapping[str, str] | None = None,
    tables: Mapping[str, Table],
    draw: Callable[[], Mapping[str, Figure]],
    data: Mapping[str, Any],
) -> None:
    """Writes what the flags ask for; `draw` is called only if there is to be a picture."""
    if values.json:
        record = {**data, "settings": _settings(values)}
        Path(values.json).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if not (values.plot or values.html):
        return
    figures = draw()
    if values.plot:
        plot.save_png(list(figures.values()), values.plot)
    if values.html:
        pictures = {heading: plot.to_svg(figure) for heading, figure in figures.items()}
        write_page(
            values.html,
            title,
            about,
            cards=cards or {},
            tables=tables,
            pictures=pictures,
            data=data,
        )


def _settings(values: flags.FlagValues) -> dict[str, Any]:
    """The flags of jserve that were given, or set by a search."""
    ours = (
        f for m, fs in values.flags_by_module_dict().items() if m.startswith("jserve.") for f in fs
    )
    return {f.name: f.value for f in ours if f.value != f.default and f.name not in _UNRECORDED}


def _settings_text(values: flags.FlagValues) -> str:
    return " ".join(f"--{name}={value}" for name, value in _settings(values).items())


def _cards(
    figures: Mapping[str, Any], cards: Sequence[tuple[str, Sequence[str], str]]
) -> dict[str, str]:
    found = {title: (report.value_at(figures, path), form) for title, path, form in cards}
    return {title: form.format(v) for title, (v, form) in found.items() if v is not None}


def _distributions(run: Run) -> plot.Distributions:
    """A panel per kind of time; a line per class where there are several."""
    recorder = run.recorder
    groups = {"all": recorder.total}
    if len(recorder.classes) > 1:
        groups |= {name or report.UNNAMED: g for name, g in sorted(recorder.classes.items())}
    per_request = {
        title: {name: getattr(group, field) for name, group in groups.items()}
        for title, field in (("TTFT", "ttft"), ("TPOT", "tpot"), ("E2E", "e2e"), ("Queue", "queue"))
    }
    timeline = recorder.timeline
    steps = {"without prompts": timeline.decode_s, "with prompts": timeline.mixed_s}
    return per_request | {"ITL": {"all": recorder.itl}, "Step time": steps}
