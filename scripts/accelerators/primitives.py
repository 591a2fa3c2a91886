"""The small primitives alone: pages move in place, weights in few bits are read as they are, and
thresholds are found without a sort. Mostly plain XLA does so, and needs no kernel of ours."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from accelerators.cases import MIB, Case, Found
from accelerators.hlo import collectives, instructions
from accelerators.programs import compiled, judged
from accelerators.targets import TARGETS, Target, mesh_of
from jax.sharding import NamedSharding, PartitionSpec

from jserve.runner.compile import trace_page_copies
from jserve.runner.mesh import pool_sharding
from jserve.runner.truncation import least_kept
from pallas_kernels.page_copy import copy_pages, gather_pages, scatter_pages
from pallas_kernels.quantized_matmul import quantize, quantized_matmul

PAGE = (64, 16, 128)  # p, R, W: Llama-3-8B's in bfloat16, 8 MiB in its 32 layers
NUM_LAYERS, NUM_PAGES, NUM_MOVED = 32, 512, 16
WIDTH, MLP_WIDTH, NUM_PAIRS = 4096, 14336, 3  # Llama-3-8B's: more weights than VMEM holds
GROUP_SIZE = 128
KINDS = {"w8a8": None, "int8": GROUP_SIZE, "int4": GROUP_SIZE}
NUM_ROWS, VOCABULARY = 64, 128_256
MOST_TEMP_BYTES = 48 * MIB  # of activations, and of sums per group on a GPU
SWAPPED = ("bfloat16", "int8", "float8_e4m3fn")  # pages
QUICK_TARGETS = ("v5e", "7x", "H200")
NOT_QUICK = ("512-tokens", "/int8", "/float8_e4m3fn")


def primitive_cases() -> list[Case]:
    """Every primitive on every target."""
    cases = []
    for target in TARGETS.values():
        runs = {f"pages-{name}": partial(_pages, target, name) for name in ("copy", "in", "out")}
        for dtype in SWAPPED:
            runs |= {
                f"pages-swap-{name}/{dtype}": partial(_swap, target, name, jnp.dtype(dtype))
                for name in ("in", "out")
            }
        for kind in KINDS:
            runs |= {
                f"matmul-{kind}/{T}-tokens": partial(_matmul, target, kind, T) for T in (16, 512)
            }
        runs["truncate"] = partial(_truncate, target)
        runs["weights-made-anew-are-found"] = partial(_planted, target)
        cases += [
            Case(
                f"primitive/{target.name}/{name}",
                run,
                target.name in QUICK_TARGETS and not name.endswith(NOT_QUICK),
            )
            for name, run in runs.items()
        ]
    return cases


def _compiled(target: Target, function, *arguments, donate=()):
    mesh = mesh_of(target, 1)
    sharding = NamedSharding(mesh, PartitionSpec())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )
    return compiled(
        target, mesh, lambda: jax.jit(function, donate_argnums=donate).trace(*arguments)
    )


def _pages(target: Target, name: str) -> Found:
    shape = jax.ShapeDtypeStruct
    pool = shape((NUM_LAYERS, NUM_PAGES, *PAGE), jnp.bfloat16)
    pages = shape((NUM_MOVED, NUM_LAYERS, *PAGE), jnp.bfloat16)
    ids = shape((NUM_MOVED,), jnp.int32)
    function, *arguments = {
        "copy": (copy_pages, pool, ids, ids),
        "in": (scatter_pages, pool, pages, ids),
        "out": (gather_pages, pool, ids),
    }[name]
    program = _compiled(target, function, *arguments, donate=() if name == "out" else 0)
    pool_bytes = 0 if name == "out" else 2 * pool.size
    page_bytes = 2 * pool.size // NUM_PAGES
    # `gather_pages` is one gather, which is no move: only a second one would be.
    return judged(target, program, pool_bytes, {pool.size, pages.size}, page_bytes + MIB)


def _swap(target: Target, name: str, dtype: jnp.dtype) -> Found:
    """The runner's two programs, on a pool that is split over four devices."""
    mesh = mesh_of(target, 4)
    shape = (NUM_LAYERS, NUM_PAGES, *PAGE)
    pool = jax.ShapeDtypeStruct(shape, dtype, sharding=pool_sharding(mesh))
    is_in = name == "in"
    program = compiled(target, mesh, lambda: trace_page_copies(mesh, pool)[is_in])
    part = pool.size // mesh.size
    found = judged(target, program, dtype.itemsize * part if is_in else 0, {part}, MIB)
    sent = collectives(program.text)
    found.expect(not sent, f"sends pages between devices: {dict(sent)}")
    return found


def _matmul(target: Target, kind: str, num_tokens: int) -> Found:
    """MLPs without what is between their matmuls, in the loop that the platform's models have."""

    def weight(out, num_in):
        return quantize(jnp.zeros((out, num_in)), kind, group_size=KINDS[kind])

    def stack(pair):
        return jax.tree.map(lambda x: jnp.zeros((NUM_PAIRS, *x.shape), x.dtype), pair)

    def multiply(x, pair, layer=None):
        for w in pair:
            x = quantized_matmul(w, x, layer=layer, backend=target.backend)
        return x

    def looped(x, pairs):
        return jax.lax.fori_loop(0, NUM_PAIRS, lambda layer, x: x + multiply(x, pairs, layer), x)

    def unrolled(x, pairs):
        for pair in pairs:
            x = x + multiply(x, pair)
        return x

    is_gpu = target.platform == "cuda"
    pair = jax.eval_shape(lambda: (weight(MLP_WIDTH, WIDTH), weight(WIDTH, MLP_WIDTH)))
    pairs = [pair] * NUM_PAIRS if is_gpu else jax.eval_shape(lambda: stack(pair))
    x = jax.ShapeDtypeStruct((WIDTH, num_tokens), jnp.bfloat16)
    program = _compiled(target, unrolled if is_gpu else looped, x, pairs)
    weight_size = WIDTH * MLP_WIDTH
    # With many tokens a GPU makes the weights of a group kind anew, one matmul's at a time.
    made_anew = is_gpu and KINDS[kind] is not None and 2 * num_tokens >= GROUP_SIZE
    most_bytes = 2 * weight_size + MOST_TEMP_BYTES if made_anew else MOST_TEMP_BYTES
    return judged(target, program, 0, {weight_size, NUM_PAIRS * weight_size}, most_bytes)


def _planted(target: Target) -> Found:
    """Groups that do not lead, `[O, D/g, g]`: every compiler writes the weights anew, and the bound
    that holds for ours must find that."""

    def multiply(values, scales, x):
        weights = values.astype(x.dtype) * scales[..., None].astype(x.dtype)
        return weights.reshape(MLP_WIDTH, WIDTH) @ x

    values = jax.ShapeDtypeStruct((MLP_WIDTH, WIDTH // GROUP_SIZE, GROUP_SIZE), jnp.int8)
    scales = jax.ShapeDtypeStruct(values.shape[:2], jnp.float32)
    x = jax.ShapeDtypeStruct((WIDTH, 16), jnp.bfloat16)
    program = _compiled(target, multiply, values, scales, x)
    faults = judged(target, program, 0, {WIDTH * MLP_WIDTH}, MOST_TEMP_BYTES).problems
    found = Found({"what": faults[0][:120] if faults else ""})
    found.expect(bool(faults), "compiled, and the check saw nothing")
    return found


def _truncate(target: Target) -> Found:
    def of_row(dtype, *shape):
        return jax.ShapeDtypeStruct((NUM_ROWS, *shape), dtype)

    program = _compiled(
        target,
        partial(least_kept, in_blocks=False),
        of_row(jnp.float32, VOCABULARY),
        of_row(jnp.int32),
        of_row(jnp.float32),
        of_row(jnp.float32),
    )
    found = judged(target, program, 0, (), 3 * 4 * NUM_ROWS * VOCABULARY)
    sorts = sum(i.opcode == "sort" for i in instructions(program.text))
    found.expect(not sorts, f"sorts the vocabulary {sorts} times")
    return found
