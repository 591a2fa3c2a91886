"""Compiles a traced program for a target and reads what the compiler says of it. Knows no models
and no kernels."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from accelerators.cases import MIB, Found
from accelerators.hlo import copies, host_transfers, ptxas_reports, wgmma_counts
from accelerators.targets import Target
from jax.experimental.mosaic.gpu import core as mosaic_gpu
from jax.sharding import Mesh

from jserve.runner.platform import compiler_options

WITHOUT_PRODUCTS = ("decode_attention_join",)  # Mosaic GPU kernels that only add


class Program(NamedTuple):
    """A compiled program: its optimised HLO, its bytes per device, what its compilers printed."""

    text: str
    memory: Any
    output: str
    shared_bytes: int  # the most that a Mosaic GPU kernel asks for
    seconds: float


@contextmanager
def printed_by_compilers() -> Iterator[list[str]]:
    """Collects what C++ writes to this process's streams, as one text, once the block ends."""
    collected: list[str] = []
    saved = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        try:
            yield collected
        finally:
            for stream, copy in enumerate(saved, start=1):
                os.dup2(copy, stream)
                os.close(copy)
            file.seek(0)
            collected.append(file.read().decode(errors="replace"))


@contextmanager
def shared_memory() -> Iterator[list[int]]:
    """Collects the bytes of shared memory that Mosaic GPU kernels ask for: jax sums them up and no
    compiler prints them."""
    sizes = [0]
    sum_of = mosaic_gpu._smem_tree_size

    def recorded(buffers):
        sizes.append(sum_of(buffers))
        return sizes[-1]

    mosaic_gpu._smem_tree_size = recorded
    try:
        yield sizes
    finally:
        mosaic_gpu._smem_tree_size = sum_of


def compiled(target: Target, mesh: Mesh, trace) -> Program:
    """Compiles what `trace()` returns, a jax.stages.Traced whose arguments are on `mesh`."""
    begin = time.perf_counter()
    # Pallas asks the mesh in use which device it lowers for.
    with (
        printed_by_compilers() as output,
        shared_memory() as sizes,
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
    ):
        lowered = trace().lower(lowering_platforms=(target.platform,))
        program = lowered.compile(compiler_options(target.platform))
    seconds = time.perf_counter() - begin
    jax.clear_caches()  # or an equal kernel of the next case would not be lowered, and say nothing
    return Program(program.as_text(), program.memory_analysis(), output[0], max(sizes), seconds)


def judged(
    target: Target,
    program: Program,
    alias_bytes: int,
    sizes: Collection[int],
    temp_bytes: int,
    other_bytes: int = 0,
) -> Found:
    """Returns the figures of a program whose donated arrays have `alias_bytes`, that may write
    nothing of one of `sizes` elements by moving it, and may use `temp_bytes` more, on a device that
    holds `other_bytes` besides."""
    memory = program.memory
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes + other_bytes
    moved = copies(program.text, sizes)
    waits = host_transfers(program.text)
    found = Found(
        {
            "seconds": round(program.seconds, 1),
            "alias MiB": round(memory.alias_size_in_bytes / MIB, 1),
            "temp MiB": round(memory.temp_size_in_bytes / MIB, 1),
            "used GiB": round(used / 2**30, 2),
            "copies": len(moved),
        }
    )
    found.expect(
        # A TPU's small arrays fill whole tiles.
        0 <= memory.alias_size_in_bytes - alias_bytes < 4096,
        f"{memory.alias_size_in_bytes} bytes are updated in place, not {alias_bytes}",
    )
    found.expect(not moved, f"copies {len(moved)} large arrays: {'; '.join(moved[:3])}")
    found.expect(not waits, f"waits for the host: {'; '.join(waits[:3])}")
    found.expect(
        memory.temp_size_in_bytes <= temp_bytes,
        f"takes {memory.temp_size_in_bytes / MIB:.1f} MiB of temporary memory, more than "
        f"{temp_bytes / MIB:.1f}",
    )
    found.expect(
        used <= target.spec.hbm_bytes,
        f"takes {used / 2**30:.2f} GiB of {target.spec.hbm_bytes / 2**30:.2f}",
    )
    return found


def judge_gpu_kernels(program: Program, found: Found) -> None:
    """Adds what ptxas reports of the Mosaic kernels in `program`: none may spill, and each that has
    products must have the tensor cores do them."""
    reports, wgmma = ptxas_reports(program.output), wgmma_counts(program.output)
    multiply = [name for name in wgmma if not name.startswith(WITHOUT_PRODUCTS)]
    spilled = sum(report.spill_store_bytes + report.spill_load_bytes for report in reports)
    found.figures |= {
        "registers": _by_kernel({report.kernel: report.registers for report in reports}),
        "spilled bytes": spilled,
        "shared KiB": round(program.shared_bytes / 1024, 1),
        "wgmma": _by_kernel({name: wgmma[name] for name in multiply}),
    }
    found.expect(len(reports) == len(wgmma) > 0, "ptxas did not report on every kernel")
    found.expect(not spilled, f"spills {spilled} bytes of registers")
    without = [name for name in multiply if not wgmma[name]]
    found.expect(not without, f"no wgmma in the PTX of {without}")


def _by_kernel(figures: Mapping[str, int]) -> str:
    return ", ".join(
        f"{name.removesuffix('_mosaic_gpu_kernel')} {figure}" for name, figure in figures.items()
    )
