"""Whole steps: the product's own programs, from packed batch to chosen tokens, on meshes of devices
that are only described."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
from accelerators.cases import GIB, MIB, Case, Found
from accelerators.hlo import collectives, conditionals, products, wider
from accelerators.models import (
    DTYPE,
    EIGHT_BITS,
    MAX_MODEL_LEN,
    MODELS,
    NUM_ROWS,
    Bits,
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
EIGHT_BIT_TARGETS, EIGHT_BIT_SIZES = ("v5e", "v6e", "H200"), (1, 4)
QUICK_EIGHT_BITS = "v5e/llama3-8b-w8a8-int8-pages/tp4", "H200/llama3-8b-w8a8-fp8-pages/tp1"
MATRICES = ("qkv", "o", "gate_up", "down")


class Engine(NamedTuple):
    """What the programs of one engine are traced from."""

    target: Target
    options: StepOptions
    layout: HeadLayout
    params: Any
    state: StepState
    bits: Bits

    @property
    def num_devices(self) -> int:
        return self.options.mesh.size

    @property
    def is_w8a8(self) -> bool:
        return self.bits.quantization == "w8a8"

    @property
    def head(self) -> dict[str, Any]:
        return head_of(self.params, self.options.model)


def step_cases() -> list[Case]:
    """The programs of every model and group size on every target whose memory holds the weights,
    and those that differ where one model has weights or pages of 8 bits."""
    forward = {name: partial(_forward, bucket=bucket) for name, bucket in BUCKETS.items()}
    rate = {"choose": _choose, "score": _score}
    programs = forward | rate | {"remember": _remember, "row_sums": _row_sums}
    cases = []
    for target in TARGETS.values():
        for model in MODELS:
            cases += _cases(target, model, SIZES, Bits(), model, programs)
    for target in map(TARGETS.__getitem__, EIGHT_BIT_TARGETS):
        for name, bits in EIGHT_BITS.items():
            programs = forward | rate if name == "w8a8" else forward
            cases += _cases(
                target, "llama3-8b", EIGHT_BIT_SIZES, bits, f"llama3-8b-{name}", programs
            )
    return cases


def _cases(
    target: Target, model: str, sizes: tuple[int, ...], bits: Bits, called: str, programs
) -> Iterator[Case]:
    for size in sizes:
        if pool_budget(target, config_of(model), size, bits) <= target.spec.hbm_bytes / 20:
            continue
        name = f"{target.name}/{called}/tp{size}"
        for what, judge in programs.items():
            is_step = what in BUCKETS
            kind, quick = ("step", QUICK_STEPS) if is_step else ("sampler", QUICK_SAMPLERS)
            is_quick = name in quick and judge is not _row_sums  # as simple as they are
            is_quick |= name in QUICK_EIGHT_BITS and what == "decode"
            run = partial(_run, judge, target, model, size, bits)
            yield Case(f"{kind}/{name}/{what}", run, is_quick, limit_s=240)


def _run(judge, target: Target, name: str, size: int, bits: Bits) -> Found:
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
    params = abstract_params(model, layout, mesh, loop == "scanned", bits)
    state = abstract_state(target, options, layout, page_size, bits)
    return judge(Engine(target, options, layout, params, state, bits))


def _judged(engine: Engine, trace, alias_bytes: int, sizes: set[int], temp_bytes: int, *passed):
    """Returns the compiled program and its figures. It may copy no weight and nothing of `sizes`
    elements; besides what it is `passed`, the rest of the engine's arrays fill the devices."""
    weights = {
        size
        for _, num_elements, count in weights_of(engine.options.model, engine.layout)
        if num_elements >= SMALLEST_WEIGHT
        for size in (num_elements, num_elements * count)
    }
    sizes |= weights
    program = compiled(engine.target, engine.options.mesh, trace)
    rest = _bytes_of((engine.params, engine.state)) - _bytes_of(passed)
    found = judged(engine.target, program, alias_bytes, sizes, temp_bytes, rest)
    if engine.is_w8a8:
        made_wider = wider(program.text, weights)
        found.expect(not made_wider, f"makes weights wider: {'; '.join(made_wider[:3])}")
    return program, found


def _bytes_of(tree: Any) -> int:
    """Returns the bytes of arrays on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _forward(engine: Engine, bucket: Bucket) -> Found:
    model, pool = engine.options.model, engine.state.kv_pool
    activations = bucket.num_tokens * (model.intermediate_size * 2 + model.hidden_size * 4)
    pool_bytes = _bytes_of(pool)
    pool_size = pool_bytes // pool.dtype.itemsize
    program, found = _judged(
        engine,
        lambda: trace_forward(engine.options, bucket, engine.params, engine.state),
        pool_bytes,
        {pool_size, pool_size // model.num_layers},
        # The activations of a layer in float32; nothing that grows with layers, pool or vocabulary.
        4 * activations + 16 * MIB,
        *(engine.params, pool, engine.state.sampler.last_tokens),
    )
    times = 1 if engine.options.loop == "scanned" else model.num_layers
    _judge_products(program.text, engine, len(MATRICES) * times, found)
    # Two sums over the devices in each layer, of the residual stream's size, and one for the split
    # embedding.
    num_numbers = model.hidden_size * bucket.num_tokens
    counts = collectives(program.text)
    sums = counts.pop(("all-reduce", num_numbers), 0)
    expected = 0 if engine.num_devices == 1 else 1 + 2 * times
    if engine.is_w8a8:
        # TPUs sum the embedding's int8 in words of 32 bits, some of them half padding. A token's
        # numbers have a scale: the embedding's is summed too, and that of each other sum found.
        sums += sum(counts.pop(("all-reduce", num_numbers // n), 0) for n in (2, 4))
        scales = counts.pop(("all-reduce", bucket.num_tokens), 0)
        found.figures |= {"scales": scales}
        found.expect(scales == expected, f"sends scales {scales} times, not {expected}")
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
    if engine.is_w8a8:
        _judge_products(program.text, engine, 1, found)
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
    if engine.is_w8a8:
        _judge_products(program.text, engine, 1, found)
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


def _judge_products(text: str, engine: Engine, expected: int, found: Found) -> None:
    """Each is there once. With int8 weights it takes int8 from both sides, and another one may
    ready what is to be rounded; `wider` sees to it that no weight is among that."""
    kinds = products(text)
    count, others = kinds.total(), 0
    if engine.is_w8a8:
        count = kinds.pop("s8 s8 s32", 0)
        others = kinds.total()
        found.figures |= {"other products": others}
    found.figures |= {"products": count}
    found.expect(count == expected, f"has {count} products, not {expected}")
    found.expect(others <= expected + 1, f"has other products too: {dict(kinds)}")


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
