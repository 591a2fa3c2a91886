"""How long a device had nothing to do, read from a profile. Knows intervals, not what ran."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

Interval = tuple[float, float]  # start and end, nanoseconds


def idle_figures(intervals: Iterable[Interval], num_steps: int) -> dict[str, float]:
    """Returns what `num_steps` equal steps left idle, in microseconds.

    `gap_us` is the median of the `num_steps` longest idle intervals. The gaps between steps are
    among all gaps, so it is their median or more, wherever in a step the other ones lie.
    """
    gaps, busy, begin, end = [], 0.0, None, 0.0
    for start, stop in sorted(intervals):
        if begin is None:
            begin = end = start
        if start > end:
            gaps.append(start - end)
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    if begin is None:
        raise ValueError("the trace holds nothing that ran on the device")
    longest = sorted(gaps)[-num_steps:]
    return {
        "gap_us": statistics.median(longest) / 1e3 if longest else 0.0,
        "idle_us_per_step": sum(gaps) / num_steps / 1e3,
        "busy_share": busy / (end - begin),
    }


def device_gaps(folder: Path, num_steps: int) -> dict[str, float]:
    """Returns `idle_figures` of a trace that jax.profiler wrote into `folder`.

    Raises:
      NotImplementedError: the trace has no device of its own, as on a CPU.
    """
    [path] = folder.rglob("*.xplane.pb")
    intervals = list(_device_intervals(ProfileData.from_file(str(path)).planes))
    if not intervals:
        raise NotImplementedError("the trace has no device")
    return idle_figures(intervals, num_steps)


def _device_intervals(planes: Any) -> Iterable[Interval]:
    """Yields what ran: of a GPU its streams' kernels and copies, of a TPU its programs."""
    for plane in planes:
        if plane.name.startswith("/device:"):
            lines = {line.name: line for line in plane.lines}
            streams = [line for name, line in lines.items() if name.startswith("Stream")]
            programs = [line for name, line in lines.items() if name == "XLA Modules"]
            for line in streams or programs:
                for event in line.events:
                    yield event.start_ns, event.start_ns + event.duration_ns
