"""The request log: one line per ended request, to be replayed or diagnosed. Knows requests and
times: no clients, no texts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jserve.engine.line_log import LineLog
from jserve.messages import Timings
from scheduler.config import RequestClass
from scheduler.request import Request


class RequestLog:
    """Adds a JSON object per request to a file; times are seconds.

    Raises:
      ConfigError: the file cannot be opened.
    """

    def __init__(
        self,
        path: str,
        *,
        with_prompts: bool,
        classes: Sequence[RequestClass] = (),
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._lines = LineLog("request_log", path, "a")
        self._with_prompts = with_prompts
        self._class_priorities = {c.name: c.priority for c in classes}
        self._wall_clock = wall_clock

    def add(self, request: Request, num_output: int, timings: Timings, reason: str) -> None:
        """Writes a request that ends now, after `num_output` tokens."""
        record: dict[str, Any] = {
            "arrival_s": round(self._wall_clock() - timings.e2e_s, 6),  # since 1970
            "prompt_tokens": request.num_prompt_tokens,
            "output_tokens": num_output,
            "tenant": request.tenant,
            "request_class": request.request_class,
            # Without its class's, so that a replay may give the class another one.
            "priority": request.priority - self._class_priorities.get(request.request_class, 0),
            "cached_tokens": request.num_cached_tokens,
            "queue_s": _rounded(timings.queue_s),
            "ttft_s": _rounded(timings.ttft_s),
            "e2e_s": _rounded(timings.e2e_s),
            "itl_s": _rounded(timings.itl_s),
            "finish_reason": reason,
            "num_preemptions": request.num_preemptions,
        }
        if self._with_prompts:
            record["prompt_token_ids"] = np.asarray(request.prompt_token_ids).tolist()
        self._lines.add(json.dumps(record, separators=(",", ":")))

    def close(self) -> None:
        self._lines.close()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
