"""Whole steps: the product's own programs, from packed batch to chosen tokens, on meshes of devices
that are only described."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
from accelerators.cases import GIB, MIB, Case, Found
from accelerators.hlo import collectives, conditionals
from accelerators.models import (
    DTYPE,
    MAX_MODEL_LEN,
    MODELS,
    NUM_ROWS,
    abstract_params,
    abstract_state,
    config_of,
    pool_budget,
    weights_of,
)
from accelerators.programs import compiled, judge_gpu_kernels, judged
from accelerators.targets import TARGETS, Target, mesh_of

from jserve.models.decoder import BEST_LOOP, head_of
from jserve.models.head_layout import HeadLayout, head_layout
from jserve.runner.compile import (
    trace_choose,
    trace_forward,
    trace_remember,
    trace_row_sums,
    trace_score,
)
from jserve.runner.kv_cache import DEFAULT_PAGE_SIZE
from jserve.runner.step import SCORED_TOKENS, StepOptions, StepState
from pallas_kernels.dispatch import Backend
from scheduler.bucket import Bucket

# 384 tokens: with a power of two, some activations have as many elements as some weights.
BUCKETS = {"decode": Bucket(64, NUM_ROWS, True), "mixed": Bucket(384, NUM_ROWS, False)}
SIZES = (1, 4, 8)  # of the tensor-parallel group
MOST_COLLECTIVES, MOST_CONDITIONALS = 32, 9  # of choosing tokens
MOST_SENT = 2**17  # elements: 64 rows of blocks' sums, of a vocabulary of 500,000
SMALLEST_WEIGHT = MIB // 2  # elements; smaller ones are of no account

QUICK_SAMPLERS = "v5e/llama3-8b/tp4", "7x/qwen3-32b/tp8", "H200/llama3-8b/tp1", "H200/qwen3-32b/tp8"
QUICK_STEPS = *QUICK_SAMPLERS, "v6e/llama3-8b/tp1", "v5p/gemma3-27b/tp4"


class Engine(NamedTuple):
    """What the programs of one engine are traced from."""

    target: Target
    options: StepOptions
    layout: HeadLayout
    params: Any
    state: StepState

    @property
    def num_devices(self) -> int:
        return self.options.mesh.size

    @property
    def head(self) -> dict[str, Any]:
        return head_of(self.params, self.options.model)


def step_cases() -> list[Case]:
    """The programs of every model and group size on every target whose memory holds the weights."""
    programs = {name: partial(_forward, bucket=bucket) for name, bucket in BUCKETS.items()}
    programs |= {"choose": _choose, "score": _score, "remember": _remember, "row_sums": _row_sums}
    cases = []
    for target in TARGETS.values():
        for model, size in _sizes_that_fit(target):
            name = f"{target.name}/{model}/tp{size}"
            for what, judge in programs.items():
                is_step = what in BUCKETS
                kind, quick = ("step", QUICK_STEPS) if is_step else ("sampler", QUICK_SAMPLERS)
                run = partial(_run, judge, target, model, size)
                is_quick = name in quick and judge is not _row_sums  # as simple as they are
                cases.append(Case(f"{kind}/{name}/{what}", run, is_quick, limit_s=240))
    return cases


def _sizes_that_fit(target: Target) -> Iterator[tuple[str, int]]:
    for model in MODELS:
        for size in SIZES:
            if pool_budget(target, config_of(model), size) > target.spec.hbm_bytes / 20:
                yield model, size


def _run(judge, target: Target, name: str, size: int) -> Found:
    model = config_of(name)
    layout = head_layout(model, size)
    mesh = mesh_of(target, size)
    loop = BEST_LOOP[target.spec.platform]
    page_size = DEFAULT_PAGE_SIZE[target.spec.platform]
    options = StepOptions(
        *(model, mesh, target.backend, loop, MAX_MODEL_LEN // page_size),
        max_tokens=max(bucket.num_tokens for bucket in BUCKETS.values()),
        dtype=DTYPE,
    )
    params = abstract_params(model, layout, mesh, stacked=loop == "scanned")
    state = abstract_state(target, options, layout, page_size)
    return judge(Engine(target, options, layout, params, state))


def _judged(engine: Engine, trace, alias_bytes: int, sizes: set[int], temp_bytes: int, *passed):
    """Returns the compiled program and its figures. It may copy no weight and nothing of `sizes`
    elements; besides what it is `passed`, the rest of the engine's arrays fill the devices."""
    for _, num_elements, count in weights_of(engine.options.model, engine.layout):
        if num_elements >= SMALLEST_WEIGHT:
            sizes |= {num_elements, num_elements * count}
    program = compiled(engine.target, engine.options.mesh, trace)
    rest = _bytes_of((engine.params, engine.state)) - _bytes_of(passed)
    return program, judged(engine.target, program, alias_bytes, sizes, temp_bytes, rest)


def _bytes_of(tree: Any) -> int:
    """Returns the bytes of arrays on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _forward(engine: Engine, bucket: Bucket) -> Found:
    model, pool = engine.options.model, engine.state.kv_pool
    activations = bucket.num_tokens * (model.intermediate_size * 2 + model.hidden_size * 4)
    pool_bytes = _bytes_of(pool)
    pool_size = pool_bytes // DTYPE.itemsize
    program, found = _judged(
        engine,
        lambda: trace_forward(engine.options, bucket, engine.params, engine.state),
        pool_bytes,
        {pool_size, pool_size // model.num_layers},
        # The activations of a layer in float32; nothing that grows with layers, pool or vocabulary.
        4 * activations + 16 * MIB,
        *(engine.params, pool, engine.state.sampler.last_tokens),
    )
    # Two sums over the devices in each layer, of the residual stream's size, and one for the split
    # embedding.
    counts = collectives(program.text)
    sums = counts.pop(("all-reduce", model.hidden_size * bucket.num_tokens), 0)
    times = 1 if engine.options.loop == "scanned" else model.num_layers
    expected = 0 if engine.num_devices == 1 else 1 + 2 * times
    found.figures |= {"sums of x": sums}
    found.expect(sums == expected, f"sums x over devices {sums} times, not {expected}")
    found.expect(not counts, f"has other collectives too: {dict(counts)}")
    if engine.target.backend is Backend.MOSAIC_GPU:
        judge_gpu_kernels(program, found)
    found.figures["pool GiB"] = round(pool_bytes / GIB, 2)
    return found


def _choose(engine: Engine) -> Found:
    """The counts are whole on each device, and not copied: split as the logits are, they would need
    one more sum over the devices in every step."""
    options, sampler = engine.options, engine.state.sampler
    program, found = _judged(
        engine,
        lambda: trace_choose(options, NUM_ROWS, engine.head, engine.state),
        _in_tiles(engine.target, sampler.counts) + _bytes_of(sampler.last_tokens),
        {sampler.counts.size},
        _sampler_bytes(engine, NUM_ROWS),
        *(engine.head, sampler),
    )
    _judge_collectives(program.text, engine, MOST_COLLECTIVES, found)
    greedy, total = conditionals(program.text)
    found.figures |= {"conditionals": total, "greedy": greedy}
    found.expect(greedy == 1, f"a greedy batch meets {greedy} conditionals, not 1")
    found.expect(total <= MOST_CONDITIONALS, f"{total} conditionals, not {MOST_CONDITIONALS}")
    return found


def _score(engine: Engine) -> Found:
    program, found = _judged(
        engine,
        lambda: trace_score(engine.options, engine.head),
        0,
        set(),
        _sampler_bytes(engine, SCORED_TOKENS),
        engine.head,
    )
    _judge_collectives(program.text, engine, MOST_COLLECTIVES, found)
    return found


def _row_sums(engine: Engine) -> Found:
    """Besides its states, a step's tokens are there once more, with zeros for what is no number."""
    model, num_tokens = engine.options.model, engine.options.max_tokens
    program, found = _judged(
        engine,
        lambda: trace_row_sums(engine.options, NUM_ROWS),
        0,
        set(),
        2 * DTYPE.itemsize * model.hidden_size * num_tokens + 16 * MIB,
    )
    _judge_collectives(program.text, engine, 0, found)
    return found


def _remember(engine: Engine) -> Found:
    counts = engine.state.sampler.counts
    program, found = _judged(
        engine,
        lambda: trace_remember(engine.options, engine.state),
        _in_tiles(engine.target, counts),
        {counts.size},
        MIB,
        counts,
    )
    _judge_collectives(program.text, engine, 0, found)
    return found


def _in_tiles(target: Target, counts: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of the counts, which on a TPU fill tiles of 8 x 128."""
    rows, columns = counts.shape
    if target.platform == "tpu":
        rows, columns = -(-rows // 8) * 8, -(-columns // 128) * 128
    return rows * columns * counts.dtype.itemsize


def _sampler_bytes(engine: Engine, num_rows: int) -> int:
    """Returns seven times a device's part of the logits in float32, and some; on a TPU 64 rows take
    the room of 128 where they are the last axis."""
    model, num_parts = engine.options.model, engine.num_devices
    rows = -(-num_rows // 128) * 128 if engine.target.platform == "tpu" else num_rows
    return 7 * 4 * rows * (model.vocab_size // num_parts) + 16 * MIB


def _judge_collectives(text: str, engine: Engine, most: int, found: Found) -> None:
    """All of them are over the split vocabulary, and none is of all logits."""
    counts = collectives(text)
    largest = max((size for _, size in counts), default=0)
    found.figures |= {"collectives": counts.total(), "largest": largest}
    most = 0 if engine.num_devices == 1 else most
    found.expect(counts.total() <= most, f"has more than {most} collectives: {dict(counts)}")
    found.expect(largest <= MOST_SENT, f"has a collective of {largest} elements: {dict(counts)}")
