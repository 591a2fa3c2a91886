"""Draws figures with matplotlib: distributions, a timeline of steps, a comparison of runs. Knows
histograms and timelines: no requests, no pages of text."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jserve.errors import ConfigError
from jserve.sim.histogram import Histogram
from jserve.sim.report import value_at
from jserve.sim.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Readable on white and on near-black, and apart for the colour-blind (after Okabe and Ito, 2008).
BLUE, ORANGE, GREEN, PURPLE, RED, GREY = (
    *("#3a86c8", "#d98324", "#2a9d74", "#a26bb5", "#d1495b", "#8a8f98"),
)
COLORS = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)
_INK = "#1f2328"  # text and axes; the page gives it the colour of its own text
_LEAST_S = 1e-6  # what is less is drawn there: the axis is logarithmic
MAX_SERIES = 6
_TPOT = "TPOT p95, ms"
COMPARED = (  # panels of a comparison
    ("TTFT p95, ms", ("ttft_ms", "p95")),
    ("ITL p95, ms", ("itl_ms", "p95")),
    ("output tokens/s", ("output_tokens_per_s",)),
    ("goodput, requests/s", ("goodput", "requests_per_s")),
)

Distributions = Mapping[str, Mapping[str, Histogram]]  # panel -> series -> seconds


@dataclass(frozen=True, slots=True)
class Limits:
    """The capacities that a timeline is drawn against; 0: unknown."""

    num_pages: int = 0
    max_num_seqs: int = 0


def figure_class() -> Any:
    """Returns matplotlib's Figure, which needs no screen, in this module's style.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "pictures need matplotlib: pip install 'jserve[sim]', or leave out --plot and --html"
        ) from None
    matplotlib.rcParams.update(
        {
            **{"svg.fonttype": "none", "svg.hashsalt": "jserve", "font.size": 9},
            **{"font.family": "sans-serif", "axes.titlesize": 10, "axes.titleweight": "bold"},
            **{"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"},
            **{"axes.axisbelow": True},
            **{"axes.grid": True, "grid.color": GREY, "grid.alpha": 0.25, "grid.linewidth": 0.6},
            **{"legend.frameon": False, "legend.fontsize": 8, "lines.linewidth": 1.4},
            **{"text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": GREY},
            **{"xtick.color": _INK, "ytick.color": _INK, "axes.titlecolor": _INK},
            **{"path.simplify": True, "path.simplify_threshold": 0.5},
        }
    )
    return Figure


def distributions_figure(panels: Distributions) -> Figure:
    """Draws the share of samples up to each time, one panel per kind of time."""
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = figure_class()(figsize=(11, 2.7 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax, (title, series) in zip(axes, panels.items(), strict=False):
        _distribution(ax, title, series)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    return figure


def _distribution(ax: Axes, title: str, series: Mapping[str, Histogram]) -> None:
    series = {name: h for name, h in list(series.items())[:MAX_SERIES] if h.count}
    for color, (name, histogram) in zip(COLORS, series.items(), strict=False):
        values, shares = histogram.cumulative()
        values = 1e3 * np.maximum(values, _LEAST_S)
        steps = np.concatenate([values[:1], values]), 100 * np.concatenate([[0.0], shares])
        ax.step(*steps, where="post", color=color, label=name)
        if len(series) == 1:
            marks = {p: 1e3 * max(histogram.percentile(p), _LEAST_S) for p in (50, 95, 99)}
            ax.plot(list(marks.values()), list(marks), "o", color=color, markersize=4)
            text = "\n".join(f"p{p}  {value:.3g}" for p, value in marks.items())
            ax.text(0.97, 0.06, text, ha="right", va="bottom", transform=ax.transAxes)
    if len(series) > 1:
        ax.legend(loc="best")
    ax.set(title=f"{title}, ms", ylim=(0, 103), ylabel="% of samples")
    if series:
        most = 1e3 * max(h.most for h in series.values())
        _time_axis(ax, 1e3 * max(min(h.least for h in series.values()), _LEAST_S), most)


def _time_axis(ax: Axes, least: float, most: float) -> None:
    """A logarithmic axis with a readable number of labels, unless the times are close together."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if most < 4 * least:
        return
    ax.set_xscale("log")
    subdivisions = (1.0, 2.0, 5.0) if most < 300 * least else (1.0,)
    ax.xaxis.set_major_locator(LogLocator(subs=subdivisions))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())


def timeline_figure(timeline: Timeline, limits: Limits) -> Figure:
    """Draws what the steps held over time: rows, prompt tokens, pages, requests, durations."""
    columns = timeline.columns()
    show = Pieces(columns)
    figure = figure_class()(figsize=(11, 9), layout="constrained")
    rows, prefill, pages, requests, times = figure.subplots(5, 1, sharex=True)

    show.area(rows, show.of("decode_rows"), BLUE, "decode rows")
    show.line(rows, show.of("chunks"), ORANGE, "prefill chunks")
    _capacity(rows, "Rows per step", limits.max_num_seqs, "slots")

    show.line(prefill, show.of("prefill_tokens"), ORANGE, "prefill tokens")
    prefill.set(title="Prompt tokens per step")

    used, cached = show.of("pages_used"), show.of("pages_cached", held=True)
    show.area(pages, used, GREEN, "in use")
    show.area(pages, used + cached, GREY, "cached", above=used)
    at = np.flatnonzero(columns["preemptions"])
    if at.size:
        starts = columns["start_s"][at]
        pages.plot(starts, np.zeros(at.size), "|", color=RED, label="preemption", markersize=9)
    _capacity(pages, "KV pages", limits.num_pages - 1, "in the pool")

    show.line(requests, show.of("running"), BLUE, "running")
    show.line(requests, show.of("waiting"), RED, "waiting")
    requests.set(title="Requests")

    is_merged = columns["steps"].max() > 1
    if is_merged:
        show.line(times, 1e3 * show.of("max_step_s", pause=np.nan), ORANGE, "longest")
    mean_s = columns["busy_s"] / np.maximum(columns["steps"], 1)
    show.line(times, 1e3 * show.piecewise(mean_s, np.nan), BLUE, "mean" if is_merged else "actual")
    predicted_s = columns["predicted_s"]
    if (predicted_s > _LEAST_S).any():
        known_s = np.where(predicted_s > _LEAST_S, predicted_s, np.nan)  # else: no model yet
        show.line(times, 1e3 * show.piecewise(known_s, np.nan), GREEN, "predicted")
    times.set(title="Step time, ms", xlabel="seconds")
    for ax in (rows, prefill, pages, requests, times):
        ax.set_ylim(bottom=0)
        ax.margins(x=0.005)
        ax.legend(loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=4)
    return figure


class Pieces:
    """Draws a timeline's records, and the pauses between them, as pieces of constant value."""

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        start_s, end_s = columns["start_s"], columns["end_s"]
        self._columns = columns
        shortest_s = 0.5 * np.median(end_s - start_s)  # that is worth drawing
        pauses = np.flatnonzero(start_s[1:] - end_s[:-1] > shortest_s)
        self._pick = np.insert(np.arange(len(start_s)), pauses + 1, -1)  # the last one: a pause
        edges = np.append(np.insert(start_s, pauses + 1, end_s[pauses]), end_s[-1:])
        self.edges = np.maximum.accumulate(edges)

    def of(self, name: str, pause: float = 0.0, held: bool = False) -> np.ndarray:
        """Returns a column's value per piece; a pause has `pause`, or what was before if `held`."""
        values = self.piecewise(self._columns[name], pause)
        if held:
            before = np.maximum.accumulate(np.where(self._pick < 0, 0, np.arange(len(values))))
            values = values[before]
        return values

    def piecewise(self, values: np.ndarray, pause: float) -> np.ndarray:
        return np.append(values, pause)[self._pick]

    def line(self, ax: Axes, values: np.ndarray, color: str, label: str) -> None:
        ax.stairs(values, self.edges, color=color, label=label, baseline=None, linewidth=1.1)

    def area(
        self, ax: Axes, values: np.ndarray, color: str, label: str, above: np.ndarray | None = None
    ) -> None:
        base = np.zeros_like(values) if above is None else above
        style: Any = {"color": color, "alpha": 0.45, "linewidth": 0}
        ax.stairs(values, self.edges, baseline=base, fill=True, label=label, **style)


def _capacity(ax: Axes, title: str, most: int, what: str) -> None:
    """Says how many there are in all, and draws it where the data come near."""
    ax.set(title=f"{title} (of {most} {what})" if most > 0 else title)
    if 0 < most < 3 * ax.get_ylim()[1]:
        ax.axhline(most, color=GREY, linestyle="--", linewidth=1)


def comparison_figure(
    runs: Sequence[tuple[Mapping[str, str], Mapping[str, Any]]], tpot_slo_ms: float | None = None
) -> Figure:
    """Draws the figures of (settings, report) over the last setting's value, a line for each value
    of those before it; bars where the values are no numbers. A TPOT target has a panel of its own.
    """
    figure = figure_class()(figsize=(11, 6), layout="constrained")
    x_name = list(runs[0][0])[-1]
    xs = list(dict.fromkeys(settings[x_name] for settings, _ in runs))
    lines: dict[str, dict[str, Mapping[str, Any]]] = {}
    for settings, report in runs:
        label = ", ".join(f"{k}={v}" for k, v in settings.items() if k != x_name)
        lines.setdefault(label, {})[settings[x_name]] = report
    panels = ({_TPOT: ("tpot_ms", "p95")} if tpot_slo_ms else {}) | dict(COMPARED)
    panels = {t: p for t, p in panels.items() if any(value_at(r, p) is not None for _, r in runs)}
    axes = list(figure.subplots(2, -(-len(panels) // 2), squeeze=False).flat)
    for ax, (title, path) in zip(axes, panels.items(), strict=False):
        _comparison(ax, xs, {k: [value_at(r[x], path) for x in xs] for k, r in lines.items()})
        if tpot_slo_ms and title == _TPOT:
            ax.axhline(tpot_slo_ms, color=RED, linestyle="--", linewidth=1, label="target")
            ax.legend()
        ax.set(title=title, xlabel=x_name)
        ax.set_ylim(bottom=0)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    if len(lines) > 1:
        axes[0].legend()
    return figure


def _comparison(ax: Axes, xs: Sequence[str], lines: Mapping[str, Sequence[float | None]]) -> None:
    """Lines over numbers, groups of bars over names; a missing figure is left out."""
    is_line = all(map(_is_number, xs))
    for i, (label, figures) in enumerate(lines.items()):
        values = [np.nan if value is None else value for value in figures]
        color = COLORS[i % len(COLORS)]
        if is_line:
            ax.plot([float(x) for x in xs], values, "o-", color=color, label=label, ms=4)
        else:
            width = 0.7 / len(lines)
            at = np.arange(len(xs)) + width * (i + 0.5) - 0.35
            bars = ax.bar(at, values, width * 0.92, color=color, label=label)
            ax.bar_label(bars, fmt="%.4g", fontsize=7.5, color=_INK)
    if is_line:
        numbers = sorted(map(float, xs))
        if len(numbers) <= 8 and numbers[0] > 0 and numbers[-1] >= 8 * numbers[0]:
            ax.set_xscale("log")
            ax.set_xticks(numbers, [f"{x:g}" for x in numbers])
            ax.minorticks_off()
    else:
        ax.set_xticks(range(len(xs)), xs)
        ax.grid(False, axis="x")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def save_png(figures: Sequence[Figure], path: str) -> None:
    """Writes figures, one above another, as one picture."""
    from PIL import Image

    images = []
    for figure in figures:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130, facecolor="white")
        images.append(Image.open(buffer).convert("RGB"))
    whole = Image.new("RGB", (max(i.width for i in images), sum(i.height for i in images)), "white")
    top = 0
    for image in images:
        whole.paste(image, (0, top))
        top += image.height
    whole.save(path, format="png")


def to_svg(figure: Figure) -> str:
    """Returns a figure for inline use in a page, whose text colour it takes."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip().replace(_INK, "currentColor")
    # Hundredths of a point are enough for lines.
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
    return re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
