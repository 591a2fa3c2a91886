"""Reads recorded load: who asked when for how much. Knows file formats: no model, no scheduler.

Formats, told apart by the first line unless named:
  jserve    our own --request_log: a JSON object per ended request
  azure     Azure LLM inference traces 2023 and 2024: TIMESTAMP,ContextTokens,GeneratedTokens
  mooncake  Mooncake (FAST '25): {"timestamp": ms, "input_length", "output_length", "hash_ids"},
            an id per 512 tokens; prompts with the same leading ids begin alike
  burstgpt  BurstGPT: Timestamp (s), Model, Request tokens, Response tokens, ...; 0: it failed

Sources: github.com/Azure/AzurePublicDataset, github.com/kvcache-ai/Mooncake (FAST25-release),
github.com/HPMLL/BurstGPT.
"""

from __future__ import annotations

import csv
import heapq
import itertools
import json
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TextIO

import numpy as np

from jserve.errors import ConfigError
from jserve.sim.prompts import LONGEST_PROMPT, UniquePrompts, from_blocks
from scheduler.request import Request, SamplingView

MOONCAKE_BLOCK = 512
_REORDERED = 4096  # requests among which a trace may be out of order
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


class Entry(NamedTuple):
    """One recorded request, however it was written down."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prompt: Sequence[int] | None = None  # None: like no other
    tenant: str = ""
    request_class: str = ""
    priority: int = 0


class _Lines:
    """A file's lines and where it stands, so that an error can name the place."""

    def __init__(self, path: str, file: TextIO) -> None:
        self.path, self._file, self.number = path, file, 0

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            self.number += 1
            yield line

    def error(self, why: object, remedy: str) -> ConfigError:
        return ConfigError(f"{self.path}, line {self.number}: {why}; {remedy}")


def read_trace(
    path: str, kind: str = "auto", skipped: Counter[str] | None = None
) -> Iterator[Request]:
    """Yields a trace's requests in order of arrival, the first at 0 s.

    `skipped` counts what was left out, by reason.

    Raises:
      ConfigError: naming file and line, and what to do.
    """
    skipped = Counter() if skipped is None else skipped
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            kind = _kind_of(path, file.readline()) if kind == "auto" else kind
            file.seek(0)
            lines = _Lines(path, file)
            entries = _in_order(_checked(_READERS[kind](lines), lines), lines)
            yield from _requests(entries, skipped)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give another --trace") from error


def _kind_of(path: str, first: str) -> str:
    names = [name.strip() for name in first.split(",")]
    if set(_AZURE) <= set(names):
        return "azure"
    if set(_BURSTGPT) <= set(names):
        return "burstgpt"
    try:
        keys = json.loads(first).keys()
    except (ValueError, AttributeError):
        keys = set()
    if "hash_ids" in keys or "input_length" in keys:
        return "mooncake"
    if "arrival_s" in keys:
        return "jserve"
    raise ConfigError(
        f"{path}, line 1: {first[:80].strip()!r} begins no known trace; name its format with "
        f"--trace_format={'|'.join(FORMATS)}"
    )


def _requests(entries: Iterable[Entry], skipped: Counter[str]) -> Iterator[Request]:
    unique, start_s = UniquePrompts(), None
    for number, entry in enumerate(entries):
        if not 0 < entry.num_prompt_tokens <= LONGEST_PROMPT:
            skipped[f"prompts of none or more than {LONGEST_PROMPT} tokens"] += 1
            continue
        if entry.num_output_tokens < 1:
            skipped["requests without output (failed or aborted)"] += 1
            continue
        start_s = entry.arrival_s if start_s is None else start_s
        yield Request(
            f"{number}",
            unique.take(entry.num_prompt_tokens) if entry.prompt is None else entry.prompt,
            SamplingView(max_tokens=entry.num_output_tokens),
            priority=entry.priority,
            tenant=entry.tenant,
            request_class=entry.request_class,
            arrival_time=entry.arrival_s - start_s,
            cache_keys=(("tenant", entry.tenant),) if entry.tenant else (),
        )


def _in_order(entries: Iterable[Entry], lines: _Lines) -> Iterator[Entry]:
    """Puts entries in order that are at most _REORDERED places away from theirs."""
    heap: list[tuple[float, int, Entry]] = []
    order, last_s = itertools.count(), -math.inf
    for entry in itertools.chain(entries, itertools.repeat(None)):
        if entry is not None:
            if entry.arrival_s < last_s:
                raise lines.error(
                    f"it came {last_s - entry.arrival_s:.3f} s before one {_REORDERED} lines above",
                    "sort the file by time",
                )
            heapq.heappush(heap, (entry.arrival_s, next(order), entry))
        elif not heap:
            return
        if entry is None or len(heap) > _REORDERED:
            last_s, _, first = heapq.heappop(heap)
            yield first


# ---- our own log ----


def _by_arrival(lines: _Lines) -> Iterator[Entry]:
    """Requests are logged as they end: one pass finds when each came, another reads them in order.

    Memory: 16 bytes per request.
    """
    times, offsets, offset = array("d"), array("q"), 0
    for line in lines:
        if line.strip():
            times.append(_own_entry(line).arrival_s)
            offsets.append(offset)
        offset += len(line.encode())
    with open(lines.path, "rb") as file:
        for i in np.argsort(np.array(times), kind="stable").tolist():
            file.seek(offsets[i])
            yield _own_entry(file.readline().decode())


def _own_entry(line: str) -> Entry:
    record = _object(line)
    num_prompt = int(record["prompt_tokens"])
    ids = record.get("prompt_token_ids")
    prompt: Any = None
    if ids is not None:
        prompt, num_prompt = np.array(ids, np.int32), len(ids)
    return Entry(
        float(record["arrival_s"]),
        num_prompt,
        int(record["output_tokens"]),
        prompt,
        str(record.get("tenant") or ""),
        str(record.get("request_class") or ""),
        int(record.get("priority") or 0),
    )


def _object(line: str) -> dict[str, Any]:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise TypeError("not a JSON object")
    return record


# ---- public traces ----


def _azure(lines: _Lines) -> Iterator[Entry]:
    for row in _rows(lines, _AZURE):
        time, num_prompt, num_output = row
        # 2023 has "2023-11-16 18:17:03.9799600", 2024 "2024-05-10 00:00:00.009930+00:00".
        moment = datetime.fromisoformat(time)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        yield Entry(moment.timestamp(), int(num_prompt), int(num_output))


def _burstgpt(lines: _Lines) -> Iterator[Entry]:
    for time, num_prompt, num_output in _rows(lines, _BURSTGPT):
        yield Entry(float(time), int(float(num_prompt)), int(float(num_output)))


def _rows(lines: _Lines, columns: Sequence[str]) -> Iterator[list[str]]:
    """Yields the named columns of each row."""
    rows = csv.reader(lines)
    header = [name.strip() for name in next(rows, [])]
    if missing := [name for name in columns if name not in header]:
        raise lines.error(f"the header lacks {', '.join(missing)}", "see --trace_format")
    at = [header.index(name) for name in columns]
    for row in rows:
        if row:
            if len(row) <= max(at):
                raise ValueError(f"{len(row)} columns")
            yield [row[i] for i in at]


def _mooncake(lines: _Lines) -> Iterator[Entry]:
    for line in lines:
        if not line.strip():
            continue
        record = _object(line)
        num_prompt, ids = int(record["input_length"]), record["hash_ids"]
        if len(ids) * MOONCAKE_BLOCK < num_prompt:
            raise ValueError(f"{len(ids)} hash_ids of {MOONCAKE_BLOCK} tokens for {num_prompt}")
        prompt = from_blocks(ids, MOONCAKE_BLOCK, num_prompt) if ids else None
        yield Entry(record["timestamp"] / 1e3, num_prompt, int(record["output_length"]), prompt)


def _checked(entries: Iterator[Entry], lines: _Lines) -> Iterator[Entry]:
    """Gives a reader's errors the place where they happened."""
    try:
        for entry in entries:
            if not math.isfinite(entry.arrival_s):
                raise ValueError(f"time {entry.arrival_s}")
            yield entry
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise lines.error(f"a bad record ({error!r})", "mend or remove the line") from error


_READERS: dict[str, Callable[[_Lines], Iterator[Entry]]] = {
    "jserve": _by_arrival,
    "azure": _azure,
    "mooncake": _mooncake,
    "burstgpt": _burstgpt,
}
FORMATS = tuple(_READERS)
