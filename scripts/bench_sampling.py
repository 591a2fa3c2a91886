#!/usr/bin/env python
"""Times the sampler: what its existence costs a batch that asks for nothing, and what each feature
costs a batch that asks for it.

    nice -n -19 python scripts/bench_sampling.py --rows=1,16,32 --heads=576x49152,640x262144

The first table has the whole program behind a forward pass (logits of a random table, then a token)
beside one of logits and argmax alone, which is what a runtime without any settings would run; a
small width, as in 8x262144, leaves the sampler's part. The others have the sampler alone, beside
one that sorts. Programs run in turns; medians in milliseconds, `more` of each turn's difference.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jserve.models.decoder import logits
from jserve.runner.compile import keep_freed_memory
from jserve.runner.mesh import make_mesh
from jserve.runner.sampling import Edits, argmax, sample
from jserve.runner.step import make_choose, make_sampler_state
from scheduler.packer import MAX_LOGIT_BIAS, Wants, num_words, sampling_fields, views

_ROWS = flags.DEFINE_list("rows", ["1", "16", "32"], "Numbers of rows.")
_HEADS = flags.DEFINE_list("heads", ["576x49152", "640x262144"], "Widths x vocabularies.")
_ROUNDS = flags.DEFINE_integer("rounds", 41, "Timed calls of each program.", lower_bound=3)

MODEL = SimpleNamespace(final_soft_cap=None)
RANDOM = {"temperature": 0.8}
FEATURES: dict[str, tuple[Wants, dict[str, float]]] = {
    "nothing": (Wants(0), {}),
    "random": (Wants.RANDOM, RANDOM),
    "top-k 50": (Wants.RANDOM | Wants.TRUNCATION, {**RANDOM, "top_k": 50}),
    "top-p 0.95": (Wants.RANDOM | Wants.TRUNCATION, {**RANDOM, "top_p": 0.95}),
    "min-p 0.05": (Wants.RANDOM | Wants.TRUNCATION, {**RANDOM, "min_p": 0.05}),
    "k 64, p 0.95": (Wants.RANDOM | Wants.TRUNCATION, {**RANDOM, "top_k": 64, "top_p": 0.95}),
    "all three": (
        Wants.RANDOM | Wants.TRUNCATION,
        {**RANDOM, "top_k": 50, "top_p": 0.95, "min_p": 0.05},
    ),
    "penalties": (
        Wants.PENALTIES,
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    ),
    "bias": (Wants.BIAS, {}),
    "mask": (Wants.MASK, {}),
    "logprobs": (Wants.LOGPROBS, {}),
}


def times_of(programs: Mapping[str, Callable[[], object]]) -> dict[str, np.ndarray]:
    """Returns each program's milliseconds f64[rounds], the programs called in turns."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for program in programs.values():
        jax.block_until_ready(program())
    for _ in range(_ROUNDS.value):
        for name, program in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(program())
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: np.array(found) for name, found in times.items()}


def batch_of(num_rows: int, wants: Wants, settings: Mapping[str, float]) -> np.ndarray:
    """Returns the packed sampling buffer i32[words] of rows that all have these settings."""
    fields = sampling_fields(num_rows)
    buffer = np.zeros(num_words(fields), np.int32)
    batch = views(buffer, fields)
    batch["slots"][:] = batch["seed"][:] = np.arange(num_rows)
    batch["top_p"][:] = batch["repetition_penalty"][:] = 1
    for name, value in settings.items():
        batch[name][:] = value
    batch["wants"][:] = wants
    return buffer


def edits_of(num_rows: int, V: int) -> Edits:
    rng = np.random.default_rng(0)
    bias_ids = rng.integers(0, V, (num_rows, MAX_LOGIT_BIAS), np.int32)
    return Edits(
        jnp.asarray(rng.integers(0, 3, (num_rows + 1, V), np.int16)),
        jnp.asarray(bias_ids),
        jnp.ones(bias_ids.shape, jnp.float32),
        jnp.asarray(rng.integers(0, 2**32, (num_rows, -(-V // 32)), np.uint32)),
    )


def cost_of_existence(D: int, V: int) -> None:
    """Prints choose() with nothing asked for beside logits and argmax."""
    head = {"table": jax.random.normal(jax.random.key(0), (V, D))}
    for num_rows in map(int, _ROWS.value):
        hidden = jax.random.normal(jax.random.key(1), (D, num_rows))
        options = SimpleNamespace(model=MODEL, mesh=make_mesh(1), processed_logprobs=False)
        choose = jax.jit(make_choose(options, num_rows), donate_argnums=1)
        bare = jax.jit(lambda head, rows: argmax(logits(head, MODEL, rows).T, axis=0))
        state = [make_sampler_state(num_rows, V)]
        edits = edits_of(num_rows, V)
        buffer = jnp.asarray(batch_of(num_rows, Wants(0), {}))

        def whole(choose=choose, state=state, hidden=hidden, edits=edits, buffer=buffer):
            bias = (edits.bias_ids, edits.bias)
            state[0], sampled = choose(head, state[0], hidden, buffer, bias, edits.allowed)
            return sampled.token_ids

        found = times_of({"bare": partial(bare, head, hidden), "choose": whole})
        more = np.median(found["choose"] - found["bare"])
        cells = " | ".join(f"{np.median(found[name]):.2f}" for name in found)
        print(f"| {D} x {V}, {num_rows} rows | {cells} | {more:+.2f} |", flush=True)


def sorted_sample(x: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
    """The same draw by a sort of each row."""
    S, V = x.shape
    x = x / batch["temperature"][:, None]
    ids = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    x, ids = jax.lax.sort((-x, ids), num_keys=1)
    weights = jax.nn.softmax(-x, axis=1)
    place = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    keep = place < jnp.where(batch["top_k"] > 0, batch["top_k"], V)[:, None]
    weights = jnp.where(keep, weights, 0)
    before = jnp.cumsum(weights, axis=1) - weights
    keep &= before < (batch["top_p"] * weights.sum(axis=1))[:, None]
    keep &= weights >= batch["min_p"][:, None] * weights[:, :1]
    after = jnp.cumsum(jnp.where(keep, weights, 0), axis=1)
    point = jax.random.uniform(jax.random.key(0), (S, 1)) * after[:, -1:]
    return jnp.take_along_axis(ids, (after > point).argmax(axis=1)[:, None], axis=1)[:, 0]


def cost_of_features(V: int) -> None:
    """Prints the sampler alone under each feature, and the sorting one."""
    names = [*FEATURES, "all three, by a sort"]
    print(f"\n| sampler, V = {V} | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    # From logits as the head leaves them, a row per token.
    sampler = jax.jit(lambda columns, batch, edits: sample(columns.T, batch, edits))
    sorting = jax.jit(sorted_sample)
    for num_rows in map(int, _ROWS.value):
        columns = 3 * jax.random.normal(jax.random.key(2), (V, num_rows))
        x = columns.T
        edits, fields = edits_of(num_rows, V), sampling_fields(num_rows)
        batches = {
            name: jax.device_put(views(batch_of(num_rows, *asked), fields))
            for name, asked in FEATURES.items()
        }
        programs = {
            name: partial(sampler, columns, batch, edits) for name, batch in batches.items()
        }
        programs["sort"] = partial(sorting, x, batches["all three"])
        cells = " | ".join(f"{np.median(found):.2f}" for found in times_of(programs).values())
        print(f"| {num_rows} rows | {cells} |", flush=True)


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"{argv[1:]} are no flags")
    keep_freed_memory()  # as the server does
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    heads = [tuple(map(int, head.split("x"))) for head in _HEADS.value]
    print("| ms | logits and argmax | choose, nothing asked | more |\n|---|---|---|---|")
    for head in heads:
        cost_of_existence(*head)
    for _, V in heads:
        cost_of_features(V)


if __name__ == "__main__":
    app.run(main)
