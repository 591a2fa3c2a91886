"""Programs with a planted fault: each must be refused or found, or the other checks prove nothing.
Knows compilers' limits, not our kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from accelerators.cases import GIB, Case, Found
from accelerators.hlo import copies, host_transfers, ptxas_reports
from accelerators.programs import Program, compiled
from accelerators.targets import TARGETS, Target, mesh_of
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

TPUS = ("v4", "v5e", "v5p", "v6e", "7x")


def negative_cases() -> list[Case]:
    def cases(targets, faults: dict[str, Callable[[Target], Found]]):
        return [
            Case(f"refused/{name}/{fault.replace('_', ' ')}", partial(run, TARGETS[name]), True)
            for name in targets
            for fault, run in faults.items()
        ]

    return [
        *cases(TPUS, {"VMEM": _vmem, "SMEM": _smem, "unaligned_slice": _unaligned}),
        *cases(TPUS, {"pool_rows_that_fill_no_tile": _pool_rows}),
        *cases(["H200"], {"shared_memory": _shared_memory, "swizzle": _swizzle}),
        *cases(["H200"], {"spilled_registers": _spill, "sliced_weights": _sliced_weights}),
        *cases(["v5e", "7x", "H200"], {"pool_not_donated": _undonated_pool}),
        *cases(["v5e"], {"callback": _callback}),
    ]


def _compiled(target: Target, function, *args: tuple, **jit_options) -> Program:
    """Compiles `function` for arguments given as (dtype, *shape)."""
    mesh = mesh_of(target, 1)
    whole = NamedSharding(mesh, PartitionSpec())
    shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for dtype, *shape in args]
    return compiled(target, mesh, lambda: jax.jit(function, **jit_options).trace(*shapes))


def _refused(says: str, target: Target, function, *args: tuple) -> Found:
    """Expects an error that says so."""
    try:
        _compiled(target, function, *args)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        place = text.lower().find(says.lower())
        found = Found({"what": text[max(place - 40, 0) : place + 80]})
        found.expect(place >= 0, f"another error than one with {says!r}: {text[:200]}")
        return found
    return Found(problems=["compiled without complaint"])


def _seen(what: list) -> Found:
    """Expects a detector to have seen something."""
    found = Found({"what": str(what[0])[:120] if what else ""})
    found.expect(bool(what), "compiled, and the check saw nothing")
    return found


def _tpu_call(kernel, dtype, shape, scratch=(), **options):
    return pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(shape, dtype), scratch_shapes=scratch, **options
    )


def _vmem(target: Target) -> Found:
    """A buffer of twice the VMEM of the device."""

    def kernel(x_ref, out_ref, buffer):
        buffer[:8] = x_ref[...]
        out_ref[...] = buffer[:8]

    scratch = [pltpu.VMEM((target.spec.on_chip_bytes // 256, 128), jnp.float32)]
    call = _tpu_call(kernel, jnp.float32, (8, 128), scratch)
    return _refused("vmem", target, call, (jnp.float32, 8, 128))


def _smem(target: Target) -> Found:
    """A page table of the size of all SMEM, prefetched."""
    words = target.spec.scalar_bytes // 4

    def kernel(pages_ref, x_ref, out_ref):
        out_ref[...] = x_ref[...] + pages_ref[0]

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(1,),
        in_specs=[pl.BlockSpec((8, 128), lambda i, pages: (0, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i, pages: (0, 0)),
    )
    call = pl.pallas_call(
        kernel, grid_spec=grid, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.int32)
    )
    return _refused("smem", target, call, (jnp.int32, words), (jnp.int32, 8, 128))


def _unaligned(target: Target) -> Found:
    """A slice of lanes that starts anywhere."""

    def kernel(start_ref, x_ref, out_ref):
        out_ref[...] = x_ref[:, pl.ds(start_ref[0], 128)]

    in_specs = [pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.VMEM)]
    call = _tpu_call(kernel, jnp.float32, (8, 128), in_specs=in_specs)
    return _refused("align", target, call, (jnp.int32, 1), (jnp.float32, 8, 512))


def _pool_rows(target: Target) -> Found:
    """One token written into a donated pool: with 6 rows a token, XLA lays all of it out anew; with
    8 it must not."""

    def write(page_ref, rows_ref, pool_ref, out_ref, sem):
        del pool_ref
        copy = pltpu.make_async_copy(rows_ref, out_ref.at[page_ref[0], 3], sem)
        copy.start()
        copy.wait()

    def copies_of_pool(num_rows: int) -> list[str]:
        shape = (GIB // (16 * 8 * 128 * 2), 16, num_rows, 128)

        def step(page, rows, pool):
            hbm, smem = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.SMEM)
            return pl.pallas_call(
                write,
                in_specs=[smem, pl.BlockSpec(memory_space=pltpu.VMEM), hbm],
                out_specs=hbm,
                out_shape=jax.ShapeDtypeStruct(shape, jnp.bfloat16),
                input_output_aliases={2: 0},
                scratch_shapes=[pltpu.SemaphoreType.DMA],
            )(page, rows, pool)

        arguments = (jnp.int32, 1), (jnp.bfloat16, num_rows, 128), (jnp.bfloat16, *shape)
        program = _compiled(target, step, *arguments, donate_argnums=2)
        return copies(program.text, {shape[0] * 16 * num_rows * 128})

    found = _seen(copies_of_pool(6))
    found.expect(not copies_of_pool(8), "a pool with 8 rows a token is copied too")
    return found


def _shared_memory(target: Target) -> Found:
    """A kernel with more shared memory than a thread block can have."""

    def kernel(x_ref, out_ref, buffer):
        buffer[0, :] = x_ref[...]
        out_ref[...] = buffer[0, :]

    rows = target.spec.on_chip_bytes // 512 + 1
    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[plgpu.SMEM((rows, 128), jnp.float32)],
    )
    return _refused("shared memory", target, call, (jnp.float32, 128))


def _swizzle(target: Target) -> Found:
    """An operand of 96 lanes in the tiles of 64 that the widest swizzle wants; one of 128 is fine.

    The refusal is an assertion without a text.
    """
    _compiled(target, _swizzled_copy(128), (jnp.bfloat16, 64, 128))
    return _refused("AssertionError", target, _swizzled_copy(96), (jnp.bfloat16, 64, 96))


def _swizzled_copy(lanes: int):
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def kernel(x_ref, out_ref, buffer, barrier):
        plgpu.copy_gmem_to_smem(x_ref, buffer, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(buffer, out_ref)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((64, lanes), jnp.bfloat16),
        scratch_types=[
            plgpu.SMEM((64, lanes), jnp.bfloat16, transforms=transforms),
            plgpu.Barrier(),
        ],
    )


def _spill(target: Target) -> Found:
    """A kernel that holds more values at a time than a thread has registers."""

    def kernel(x_ref, out_ref):
        x = x_ref[...]
        total = jax.lax.fori_loop(0, x_ref.shape[0], lambda _, y: y * x + jnp.sqrt(x), x)
        out_ref[...] = total

    call = plgpu.kernel(kernel, out_type=jax.ShapeDtypeStruct((512, 128), jnp.float32))
    program = _compiled(target, call, (jnp.float32, 512, 128))
    return _seen([r for r in ptxas_reports(program.output) if r.spill_store_bytes])


def _sliced_weights(target: Target) -> Found:
    """A scan over stacked weights, which on this GPU copies each layer's: why it is unrolled."""

    def step(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(w @ x), None), x, weights)[0]

    program = _compiled(target, step, (jnp.bfloat16, 8, 4096, 4096), (jnp.bfloat16, 4096, 64))
    return _seen(copies(program.text, {4096 * 4096}))


def _undonated_pool(target: Target) -> Found:
    """An update of a pool that the caller keeps."""

    def step(pool, page, rows):
        return pool.at[page].set(rows)

    shape = (GIB // (16 * 8 * 128 * 2), 16, 8, 128)
    arguments = (jnp.bfloat16, *shape), (jnp.int32,), (jnp.bfloat16, *shape[1:])
    return _seen(copies(_compiled(target, step, *arguments).text, {GIB // 2}))


def _callback(target: Target) -> Found:
    """A step that asks Python for a value."""

    def step(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1

    return _seen(host_transfers(_compiled(target, step, (jnp.float32, 8, 128)).text))
