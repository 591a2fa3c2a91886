"""Which block sizes a call runs with: measured ones where there are some, else the backend's own
choice. Knows shapes and the files in tuned/, which scripts/tune_kernels.py writes; no arrays."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from pallas_kernels.dispatch import Backend
from pallas_kernels.ragged_paged_attention.config import (
    AttentionShape,
    Config,
    gpu_config,
    tpu_config,
    xla_config,
)

log = logging.getLogger(__name__)
OP = "ragged_paged_attention"
TUNED = Path(__file__).parents[1] / "tuned"
PHASES = ("decode", "prefill")  # also what the names of a config's fields begin with
EXACT = ("page_size", "num_kv_heads", "group", "pool_rows", "width", "q_dtype", "kv_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """One entry of a tuned file: the best block sizes measured for one phase at one size.

    Attributes:
      backend: whose block sizes they are, by its name in settings.
      phase: "decode" or "prefill".
      size: rows of the step for decode, its tokens for prefill.
      shape: the fields of AttentionShape that must be equal, EXACT.
      blocks: fields of the backend's config that begin with the phase's name.
      jax, date: what it was measured with, and when.
      figures: microseconds per layer by workload, for readers.
    """

    backend: str
    phase: str
    size: int
    shape: dict[str, int | str]
    blocks: dict[str, Any]
    jax: str
    date: str
    figures: dict[str, Any]


def size_of(shape: AttentionShape, phase: str) -> int:
    return shape.num_rows if phase == "decode" else shape.num_tokens


def exact_part(shape: AttentionShape) -> dict[str, int | str]:
    return {name: getattr(shape, name) for name in EXACT}


def path_of(device_kind: str, folder: Path = TUNED) -> Path:
    """Returns where the entries of a device kind are kept, whether or not there are any."""
    return folder / device_kind.replace(" ", "_") / f"{OP}.json"


def heuristic(backend: Backend, shape: AttentionShape, device_kind: str) -> Config:
    """Returns what `backend` chooses without measurements."""
    if backend is Backend.MOSAIC_GPU:
        return gpu_config(shape, device_kind)
    if backend is Backend.MOSAIC_TPU:
        return tpu_config(shape, device_kind)
    assert backend is Backend.XLA, backend
    return xla_config(shape)


@functools.cache
def config_for(
    backend: Backend, shape: AttentionShape, device_kind: str, folder: Path = TUNED
) -> Config:
    """Returns the block sizes for a call, and logs once per shape where they come from.

    Decode and prefill are looked up apart. Of the entries for exactly these heads, dtypes and page
    size, the one of the largest size counts that is no larger than the shape's and at least half
    of it; where there is none, the backend chooses by its budgets and the roofline.

    Raises:
      ValueError: a tuned file is damaged or stale, naming the file and the field.
    """
    config = heuristic(backend, shape, device_kind)
    path, sources = path_of(device_kind, folder), []
    for phase in PHASES:
        entry = _nearest(read(path), backend, phase, shape)
        if entry is None:
            sources.append(f"{phase} chosen by roofline")
            continue
        for name in entry.blocks.keys() - {f.name for f in fields(config)}:
            raise ValueError(f"{path}: {type(config).__name__} has no {name!r} now; tune again")
        config = replace(config, **entry.blocks)
        sources.append(f"{phase} tuned at {entry.size} on {entry.date} with jax {entry.jax}")
    log.info(
        "block sizes for %d tokens and %d rows on %s: %s; %s",
        *(shape.num_tokens, shape.num_rows, device_kind, config, ", ".join(sources)),
    )
    return config


def _nearest(
    entries: Iterable[Tuned], backend: Backend, phase: str, shape: AttentionShape
) -> Tuned | None:
    size, wanted = size_of(shape, phase), (backend.value, phase, exact_part(shape))
    fitting = [
        entry
        for entry in entries
        if (entry.backend, entry.phase, entry.shape) == wanted and entry.size <= size
        if 2 * entry.size >= size
    ]
    return max(fitting, key=lambda entry: entry.size, default=None)


@functools.cache
def read(path: Path) -> tuple[Tuned, ...]:
    """Returns the entries of a tuned file, none if there is no such file.

    Raises:
      ValueError: naming the file and the field that is wrong.
    """
    if not path.exists():
        return ()
    try:
        entries = json.loads(path.read_text())
        if not isinstance(entries, list):
            raise ValueError("is no list of entries")
        for number, entry in enumerate(entries):
            _check(number, entry)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; correct it, or remove it and tune again") from None
    return tuple(Tuned(**entry) for entry in entries)


def _check(number: int, entry: Any) -> None:
    """Raises ValueError with the name of the first field that is wrong."""

    def check(is_right: bool, name: str) -> None:
        if not is_right:
            raise ValueError(f"entry {number}: {name!r} is missing, unknown or wrong")

    kinds = {"size": int, "shape": dict, "blocks": dict, "figures": dict}
    check(isinstance(entry, dict), "entry")
    for name in [f.name for f in fields(Tuned)]:
        check(isinstance(entry.get(name), kinds.pop(name, str)), name)
    for name in entry.keys() - {f.name for f in fields(Tuned)}:
        check(False, name)
    check(entry["backend"] in {backend.value for backend in Backend}, "backend")
    check(entry["phase"] in PHASES, "phase")
    for name in entry["shape"].keys() ^ set(EXACT):
        check(False, f"shape.{name}")
    for name, value in entry["blocks"].items():
        check(name.startswith(entry["phase"]) and type(value) is int and value > 0, name)


def write(entries: Iterable[Tuned], device_kind: str, folder: Path = TUNED) -> Path:
    """Writes `entries` in place of those with the same key and keeps all others; the file is
    replaced whole, so that no reader ever meets half of one. Returns its path."""
    path = path_of(device_kind, folder)
    by_key = {_key(entry): entry for entry in (*read(path), *entries)}
    lines = [json.dumps(asdict(by_key[key]), sort_keys=True) for key in sorted(by_key)]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    partial.replace(path)
    read.cache_clear()
    config_for.cache_clear()
    return path


def _key(entry: Tuned) -> tuple[str, str, str, int]:
    return entry.backend, entry.phase, json.dumps(entry.shape, sort_keys=True), entry.size
