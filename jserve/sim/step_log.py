"""Reads a real engine's step log: what each step held and how long it took. Knows the file's
format, whose fields jserve.engine.step_log names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jserve.engine.step_log import FIELDS
from jserve.errors import ConfigError
from jserve.sim.timeline import COUNTS, Timeline
from scheduler.bucket import Bucket
from scheduler.step_shape import StepShape


@dataclass(frozen=True, slots=True)
class StepLog:
    """A step log that was opened: its header, and its steps for as often as they are read."""

    path: str
    header: dict[str, Any]

    @property
    def buckets(self) -> list[Bucket]:
        return [Bucket(int(t), int(s), bool(d)) for t, s, d in self.header.get("buckets", ())]

    def steps(self) -> Iterator[dict[str, float]]:
        """Yields each step by field. A last line that was cut off, as by a crash, is left out.

        Raises:
          ConfigError: a line is no record; names it.
        """
        with open(self.path, encoding="utf-8") as file:
            file.readline()
            for number, line in enumerate(file, start=2):
                try:
                    yield dict(zip(FIELDS, map(float, json.loads(line)), strict=True))
                except (TypeError, ValueError) as error:
                    if not line.endswith("\n"):
                        return
                    raise ConfigError(
                        f"{self.path}, line {number}: not a step ({error}); remove the line"
                    ) from error

    def samples(self) -> Iterator[tuple[StepShape, float]]:
        """Yields what a step-time model is fitted on: shapes and seconds."""
        for step in self.steps():
            shape = StepShape(
                num_rows=int(step["decode_rows"] + step["chunks"]),
                decode_rows=int(step["decode_rows"]),
                prefill_tokens=int(step["prefill_tokens"]),
                context_tokens=int(step["context_tokens"]),
                attended_pairs=int(step["attended_pairs"]),
            )
            yield shape, step["step_s"]

    def timeline(self) -> Timeline:
        """Returns the steps over time, the first one's beginning at 0."""
        timeline, start_s = Timeline(), None
        for step in self.steps():
            start_s = step["t_s"] if start_s is None else start_s
            duration = np.array([step["step_s"]])
            timeline.add(step["t_s"] - start_s, duration, *(step[name] for name in COUNTS))
        return timeline


def read_step_log(path: str) -> StepLog:
    """Opens a step log.

    Raises:
      ConfigError: there is none at `path`, or one of another kind.
    """
    try:
        with open(path, encoding="utf-8") as file:
            header = json.loads(file.readline())
        if header["step_log"] != 1 or tuple(header["fields"]) != FIELDS:
            raise ValueError(f"version {header['step_log']} with fields {header['fields']}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no step log ({error}); give a file that --step_log of this jserve wrote"
        ) from error
    return StepLog(path, header)
