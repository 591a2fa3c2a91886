"""The sampler's pipeline in numpy float64, one row at a time and with sorts, and rows packed for
the device. Shares no code with what it judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from jserve.runner.sampling import IN_PROMPT, MAX_COUNT, Edits
from scheduler.packer import MAX_LOGIT_BIAS, Wants

# Sums of float32 are off by so much: sets and draws this near to a bound may fall to either side.
NEAR = 2e-6


@dataclass(frozen=True)
class Row:
    """One row's logits, settings and history."""

    logits: np.ndarray  # f32[V]
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    position: int = 7
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: Sequence[int] | None = None
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()

    @property
    def wants(self) -> Wants:
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        cuts = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return (
            Wants.RANDOM * (self.temperature > 0)
            | Wants.TRUNCATION * (self.temperature > 0 and cuts)
            | Wants.PENALTIES * bool(penalties)
            | Wants.BIAS * bool(self.bias)
            | Wants.MASK * (self.allowed is not None)
        )


class Packed(NamedTuple):
    logits: np.ndarray  # f32[S, V]
    batch: dict[str, np.ndarray]
    edits: Edits


def pack(rows: Sequence[Row], wants: int = 0) -> Packed:
    """Returns what `sample` is given for these rows, row i in slot S - 1 - i, and `wants` besides
    what the rows want."""
    S, V = len(rows), len(rows[0].logits)
    dtypes = {
        **dict.fromkeys(("temperature", "top_p", "min_p"), np.float32),
        **{f"{n}_penalty": np.float32 for n in ("repetition", "presence", "frequency")},
        "top_k": np.int32,
        "seed": np.uint32,
    }
    batch = {n: np.array([getattr(row, n) for row in rows], d) for n, d in dtypes.items()}
    batch["sample_positions"] = np.array([row.position for row in rows], np.int32)
    batch["slots"] = np.arange(S, dtype=np.int32)[::-1].copy()
    for row in rows:
        wants |= row.wants
    batch["wants"] = np.array([wants], np.int32)
    edits = Edits(
        np.zeros((S + 1, V), np.int16),
        np.zeros((S, MAX_LOGIT_BIAS), np.int32),
        np.zeros((S, MAX_LOGIT_BIAS), np.float32),
        np.full((S, -(-V // 32)), 0xFFFFFFFF, np.uint32),
    )
    for i, row in enumerate(rows):
        counts = edits.counts[batch["slots"][i]]
        np.add.at(counts, np.array(row.output, int), 1)
        np.minimum(counts, MAX_COUNT, out=counts)
        counts[np.array(row.prompt, int)] += IN_PROMPT
        edits.bias_ids[i, : len(row.bias)] = list(row.bias)
        edits.bias[i, : len(row.bias)] = list(row.bias.values())
        if row.allowed is not None:
            bits = np.zeros(edits.allowed.shape[1] * 32, bool)
            bits[list(row.allowed)] = True
            edits.allowed[i] = np.packbits(bits, bitorder="little").view(np.uint32)
    return Packed(np.stack([row.logits for row in rows]), batch, edits)


def edited(row: Row) -> np.ndarray:
    """Returns the logits f64[V] that a greedy choice is made of: bias, repetition penalty, presence
    and frequency penalties, mask."""
    x = row.logits.astype(np.float64)
    for token_id, bias in row.bias.items():
        x[token_id] += bias
    for token_id in {*row.prompt, *row.output}:
        penalty = np.float64(np.float32(row.repetition_penalty))
        x[token_id] = x[token_id] / penalty if x[token_id] > 0 else x[token_id] * penalty
    for token_id in set(row.output):
        x[token_id] -= row.presence_penalty + row.frequency_penalty * row.output.count(token_id)
    if row.allowed is not None:
        x[np.setdiff1d(np.arange(len(x)), row.allowed)] = -np.inf
    return x


def scaled(row: Row) -> np.ndarray:
    """Returns what truncation works on: the edited logits by temperature, the best one at 0."""
    x = edited(row)
    return (x - x.max()) / np.float64(np.float32(row.temperature))


def kept(x: np.ndarray, top_k: int, top_p: float, min_p: float, near: float = 0.0) -> np.ndarray:
    """Returns bool[V]: what top-k, then top-p, then min-p keep of a row's x, values equal to a
    threshold included. `near` shifts the mass that top-p asks for, by that part of it."""
    x = x.astype(np.float64)
    order = np.sort(x)[::-1]
    k_threshold = order[top_k - 1] if 0 < top_k < len(x) else -np.inf
    weights = np.where(x >= k_threshold, np.exp(x), 0.0)
    p_threshold = -np.inf
    if top_p < 1:
        mass = np.cumsum(np.sort(weights)[::-1])
        enough = mass >= np.float32(top_p) * (1 + near) * mass[-1]
        p_threshold = order[np.argmax(enough) if enough.any() else -1]
    keep = (x >= k_threshold) & (x >= p_threshold)
    return keep & (x >= (np.log(np.float32(min_p)) if min_p > 0 else -np.inf))


def kept_sets(row: Row) -> list[np.ndarray]:
    """Returns the sets bool[V] that may be drawn from: one, or two where a sum is too near to what
    top-p asks for."""
    x = scaled(row)
    finite = np.isfinite(x)
    return [kept(x, row.top_k, row.top_p, row.min_p, near) & finite for near in (-NEAR, NEAR)]


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64) - x.max()
    return x - np.log(np.exp(x).sum())


def uniform(row: Row) -> float:
    """The number in [0, 1) that jax draws for a row's seed and position."""
    key = jax.random.fold_in(jax.random.key(row.seed), row.position)
    return float(jax.random.uniform(key))


def tokens_at(probabilities: np.ndarray, point: float) -> set[int]:
    """Returns which token the inverse transform gives at `point`; both where it is near a bound."""
    after = np.cumsum(probabilities)
    before = after - probabilities
    hit = (probabilities > 0) & (before - NEAR <= point) & (point <= after + NEAR)
    return set(np.flatnonzero(hit).tolist())


def rank(x: np.ndarray, token_id: int) -> int:
    return int((x > x[token_id]).sum()) + 1
