"""The step log: one line per step. Knows numbers and their names: not where they come from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jserve.engine.line_log import LineLog

# One JSON array per step, in this order, after a header object that repeats it.
FIELDS = (
    "t_s",  # when the step began
    "step_s",  # until its results came
    "decode_rows",
    "prefill_tokens",
    "chunks",
    "context_tokens",
    "attended_pairs",
    "bucket_tokens",
    "bucket_rows",
    "pages_used",
    "pages_cached",
    "waiting",
    "running",
    "preemptions",  # that planning this step took
    "predicted_s",
)
_LINE = f"[{','.join('%.6f' if name.endswith('_s') else '%d' for name in FIELDS)}]"


class StepLog:
    """Writes a step log, which replaces what was at `path`.

    The first line is an object: {"step_log": 1, "fields": FIELDS} and what `header` adds.

    Raises:
      ConfigError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._lines = LineLog("step_log", path, "w")

    def begin(self, header: Mapping[str, Any]) -> None:
        self._lines.add(json.dumps({"step_log": 1, "fields": FIELDS, **header}))

    def add(self, values: tuple[float, ...]) -> None:
        """Writes one step, its values in the order of FIELDS."""
        self._lines.add(_LINE % values)

    def close(self) -> None:
        self._lines.close()
