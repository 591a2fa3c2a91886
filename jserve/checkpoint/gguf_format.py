"""Parses the GGUF file format. Knows bytes, keys and tensor extents, not what any of them mean.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf package's own reader
takes many seconds for a vocabulary of 262,144 strings; this one, a fraction of a second.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jserve.errors import CheckpointError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

_SCALARS = dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?")))
_SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. `shape` has the slowest axis first: [out, in] for weights."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    metadata: dict[str, Any]  # plain Python values, keys as in the file
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Parses a GGUF file's header and checks that every tensor lies within the file.

    Raises:
      CheckpointError: not GGUF, a version or tensor type that is not supported, or a cut file.
    """
    size = path.stat().st_size
    if size < 24:
        raise CheckpointError(f"{path}: is {size} bytes, too short for a GGUF file")
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _check_version(path, data)
        cursor = _Cursor(path, data, size, position=8)
        num_tensors, num_keys = cursor.number("<Q"), cursor.number("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.number("<I"), key)
        infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{path}: general.alignment={alignment!r} is not a positive integer")
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, kind, shape, offset in infos:
        if name in tensors:
            raise CheckpointError(f"{path}: tensor {name} is there twice")
        tensors[name] = _located(path, name, kind, shape, data_start + offset)
    expected = max((t.offset + t.num_bytes for t in tensors.values()), default=0)
    if expected > size:
        raise CheckpointError(
            f"{path}: is {size:,} bytes, its header says {expected:,} or more; the file is cut "
            "short, fetch it again"
        )
    return GgufFile(path, metadata, tensors)


def read_rows(
    file: GgufFile, tensor: GgufTensor, order: np.ndarray | None, start: int, stop: int
) -> np.ndarray:
    """Returns rows [start, stop) of a tensor as float32; `order` says where each row lies."""
    mapped = np.memmap(file.path, np.uint8, mode="r", offset=tensor.offset, shape=tensor.num_bytes)
    raw = np.asarray(mapped)  # slicing a memmap object costs ten times as much
    if len(tensor.shape) == 1:  # its elements are the rows
        values = dequantize(raw, tensor.kind)
        return values[start:stop] if order is None else values[order[start:stop]]
    rows = raw.reshape(tensor.shape[0], -1)  # quantised blocks never cross a row
    chosen = rows[start:stop] if order is None else rows[order[start:stop]]
    return dequantize(chosen, tensor.kind).reshape(stop - start, *tensor.shape[1:])


@cache
def can_dequantise(kind: GGMLQuantizationType) -> bool:
    """True if the gguf package turns this tensor type into float32."""
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except (KeyError, NotImplementedError):
        return False
    return True


def _supported_types() -> str:
    return ", ".join(kind.name for kind in GGMLQuantizationType if can_dequantise(kind))


def _check_version(path: Path, data: mmap.mmap) -> None:
    if data[:4] != MAGIC:
        raise CheckpointError(f"{path}: begins with {bytes(data[:4])!r}, not with {MAGIC!r}")
    (version,) = struct.unpack_from("<I", data, 4)
    if version not in SUPPORTED_VERSIONS:
        kind = "a big-endian file" if version & 0xFFFF == 0 else f"GGUF version {version}"
        raise CheckpointError(
            f"{path}: is {kind}; supported: little-endian, versions "
            f"{', '.join(map(str, SUPPORTED_VERSIONS))}"
        )


def _tensor_info(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    name = cursor.string()
    num_dims = cursor.number("<I")
    if not 1 <= num_dims <= MAX_DIMENSIONS:
        raise CheckpointError(f"{cursor.path}: tensor {name} has {num_dims} dimensions")
    shape = tuple(cursor.number("<Q") for _ in range(num_dims))[::-1]
    return name, cursor.number("<I"), shape, cursor.number("<Q")


def _located(path: Path, name: str, raw: int, shape: tuple[int, ...], offset: int) -> GgufTensor:
    known = raw in GGMLQuantizationType._value2member_map_
    kind = GGMLQuantizationType(raw) if known else None
    if kind is None or not can_dequantise(kind):
        raise CheckpointError(
            f"{path}: tensor {name} has type {kind.name if kind else raw}, which is not "
            f"supported; supported: {_supported_types()}"
        )
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % block:
        raise CheckpointError(f"{path}: tensor {name} cannot be {kind.name} of {list(shape)}")
    return GgufTensor(name, kind, shape, offset, math.prod(shape) // block * block_bytes)


class _Cursor:
    """Reads values one after the other; running past the end of the file is a CheckpointError."""

    def __init__(self, path: Path, data: mmap.mmap, size: int, position: int) -> None:
        self.path, self.position = path, position
        self._data, self._size = data, size

    def _take(self, length: int) -> int:
        start = self.position
        self.position += length
        if self.position > self._size:
            raise CheckpointError(
                f"{self.path}: is {self._size:,} bytes and ends within its header; the file is "
                "cut short, fetch it again"
            )
        return start

    def number(self, code: str) -> Any:
        start = self._take(struct.calcsize(code))
        return struct.unpack_from(code, self._data, start)[0]

    def string(self) -> str:
        length = self.number("<Q")
        start = self._take(length)
        try:
            return str(self._data[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: a string in its header is not UTF-8") from error

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(key)
        return self._numbers(kind, 1, key)[0]

    def _array(self, key: str) -> list[Any]:
        kind, count = self.number("<I"), self.number("<Q")
        if kind == _STRING:
            self._check_count(count, 8)
            return [self.string() for _ in range(count)]
        if kind == _ARRAY:
            self._check_count(count, 12)
            return [self._array(key) for _ in range(count)]
        return self._numbers(kind, count, key)

    def _check_count(self, count: int, least_bytes: int) -> None:
        """Refuses a count that cannot fit, before a loop of that many rounds."""
        self._take(count * least_bytes)
        self.position -= count * least_bytes

    def _numbers(self, kind: int, count: int, key: str) -> list[Any]:
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path}: key {key} has unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        start = self._take(count * dtype.itemsize)
        return np.frombuffer(self._data[start : self.position], dtype).tolist()
