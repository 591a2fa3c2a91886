"""Finds in compilers' texts what costs memory or time. Knows their formats, no device or model."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

# Instructions that give a value that exists already another place, shape, type or order.
_MOVES = {
    *("copy", "copy-start", "transpose", "convert", "reshape", "slice", "dynamic-slice", "pad"),
    *("concatenate", "reverse", "all-gather", "all-gather-start", "all-to-all"),
}
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "copy-done"}
_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
_PRODUCTS = ("dot", "convolution")
_8_BITS = ("s8", "u8")
_HOST = {"send", "recv", "infeed", "outfeed"}
_HOST_MEMORY = "S(5)"

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"[})\]] ([a-z][\w\-]*)\(")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_OPERANDS = re.compile(r"%([\w.\-]+)")
_CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")


class Instruction(NamedTuple):
    computation: str
    name: str
    opcode: str
    result: str  # its type as written
    calls: str | None  # the computation of a fusion
    operands: tuple[str, ...]

    @property
    def num_elements(self) -> int:
        """Of its largest array."""
        return max((size for _, size, _ in self._arrays()), default=0)

    @property
    def dtype(self) -> str:
        """Of its first array."""
        return next((dtype for dtype, _, _ in self._arrays()), "")

    @property
    def num_elements_in_hbm(self) -> int:
        """Of its largest array outside a TPU's VMEM, where weights are prefetched to."""
        return max((size for _, size in self.arrays_in_hbm()), default=0)

    def arrays_in_hbm(self) -> Iterator[tuple[str, int]]:
        """Yields their dtypes and elements."""
        return ((dtype, size) for dtype, size, layout in self._arrays() if "S(1)" not in layout)

    def _arrays(self) -> Iterator[tuple[str, int, str]]:
        arrays = _SHAPE.findall(self.result)
        if self.opcode == "copy-start":  # (target, source, context)
            arrays = arrays[:1]
        for dtype, dims, layout in arrays:
            yield dtype, math.prod(int(d) for d in dims.split(",") if d), layout


def instructions(text: str) -> Iterator[Instruction]:
    """Yields every instruction of an optimised HLO module's text."""
    computation = ""
    for line in text.splitlines():
        found = _INSTRUCTION.match(line)
        if not found:
            opens = _COMPUTATION.match(line)
            computation = opens[1] if opens else computation
            continue
        name, rest = found.groups()
        opcode = _OPCODE.search(rest)
        if opcode:
            calls = _CALLS.search(rest)
            operands = _OPERANDS.findall(rest[opcode.end() :].split(")", 1)[0])
            yield Instruction(
                *(computation, name, opcode[1], rest[: opcode.start() + 1]),
                calls and calls[1],
                tuple(operands),
            )


def copies(text: str, sizes: Collection[int]) -> list[str]:
    """Returns the instructions that only move data and write an array in HBM of as many elements as
    one of `sizes`, whatever its shape and type: copies, transposes, conversions, slices.

    A fusion counts if all it does is move. What a fusion holds inside is no array, so that a slice
    that a product reads in place is none of these.
    """
    computations, fused = _computations(text)

    def moves(instruction: Instruction) -> bool:
        if instruction.opcode == "fusion":
            # Index arithmetic is on few elements.
            body = [i for i in computations[str(instruction.calls)] if i.num_elements > 64]
            return all(moves(i) or i.opcode in _FREE for i in body)
        return instruction.opcode in _MOVES

    return [
        f"{i.name} = {i.result} {i.opcode}"
        for name, body in computations.items()
        if name not in fused
        for i in body
        if i.num_elements_in_hbm in sizes and moves(i)
    ]


def _computations(text: str) -> tuple[dict[str, list[Instruction]], set[str | None]]:
    """Returns the instructions of each computation, and the names of those that a fusion calls."""
    computations: dict[str, list[Instruction]] = {}
    for instruction in instructions(text):
        computations.setdefault(instruction.computation, []).append(instruction)
    fused = {i.calls for body in computations.values() for i in body if i.opcode == "fusion"}
    return computations, fused


def wider(text: str, sizes: Collection[int]) -> list[str]:
    """Returns the instructions that give an array in HBM of as many elements as one of `sizes` and
    of more than 8 bits each, as weights in int8 would be that are made wider before a product."""
    computations, fused = _computations(text)
    return [
        f"{i.name} = {i.result} {i.opcode}"
        for name, body in computations.items()
        if name not in fused
        for i in body
        if any(size in sizes and dtype not in _8_BITS for dtype, size in i.arrays_in_hbm())
    ]


def products(text: str) -> Counter[str]:
    """Returns how often there is a matmul of which dtypes, as "s8 s8 s32"; in a loop's body once. A
    TPU's are convolutions. Those of Pallas kernels are not in the text."""
    body = list(instructions(text))
    dtypes = {i.name: i.dtype for i in body}
    return Counter(
        " ".join([*(dtypes[name] for name in i.operands), i.dtype])
        for i in body
        if i.opcode in _PRODUCTS
    )


def collectives(text: str) -> Counter[tuple[str, int]]:
    """Returns how often each collective of how many elements stands in the text; in a loop's body
    once. An asynchronous one counts once, where it starts."""
    return Counter(
        (opcode, i.num_elements)
        for i in instructions(text)
        if (opcode := i.opcode.removesuffix("-start")) in _COLLECTIVES
    )


def conditionals(text: str) -> tuple[int, int]:
    """Returns how many conditionals are met if no branch meets one, and how many there are."""
    entry = re.search(r"^ENTRY %?([\w.\-]+) ", text, re.MULTILINE)
    found = [i.computation for i in instructions(text) if i.opcode == "conditional"]
    return found.count(entry[1] if entry else ""), len(found)


def host_transfers(text: str) -> list[str]:
    """Returns the instructions by which a step would wait for the host, or read its memory."""
    return [
        f"{i.name} = {i.result} {i.opcode}"
        for i in instructions(text)
        if i.opcode.removesuffix("-start") in _HOST or _HOST_MEMORY in i.result
    ]


class PtxasReport(NamedTuple):
    """What ptxas says of one kernel: registers of a thread, bytes spilled to memory."""

    kernel: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int


_PTXAS = re.compile(
    r"Function properties for (\S+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)


def ptxas_reports(output: str) -> list[PtxasReport]:
    """Returns the reports in what a compilation printed with MOSAIC_GPU_DUMP_PTXAS=1."""
    return [
        PtxasReport(kernel, int(registers), int(stores), int(loads))
        for kernel, stores, loads, registers in _PTXAS.findall(output)
    ]


def wgmma_counts(output: str) -> dict[str, int]:
    """Returns by kernel how many tensor core products its PTX has, in what a compilation printed
    with MOSAIC_GPU_DUMP_PTX=1."""
    kernels = (text.split("(", 1) for text in output.split(".visible .entry ")[1:])
    return {name: body.count("wgmma.mma_async") for name, body in kernels}
