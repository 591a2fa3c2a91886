"""Reads folders of safetensors files. Knows the file format and Hugging Face's shard index only.

Format: https://github.com/huggingface/safetensors#format (an 8-byte little-endian header length,
a JSON header, then the data). Headers and sizes are checked before anything is used.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jserve.checkpoint.source import (
    Checkpoint,
    Tensor,
    read_json,
    read_json_if_present,
)
from jserve.errors import CheckpointError

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
MAX_HEADER_BYTES = 100 * 2**20
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def open_safetensors(folder: Path) -> Checkpoint:
    """Opens a Hugging Face model folder: model.safetensors, or the shards its index lists.

    Other files in the folder (consolidated.safetensors, pickles) are never opened.

    Raises:
      CheckpointError: a missing, truncated or corrupt file, or a tensor in two shards.
    """
    config = read_json(folder / "config.json")
    entries: dict[str, Tensor] = {}
    for file, names in _shards(folder).items():
        found = read_tensors(file)
        if names is not None:
            missing = sorted(names - found.keys())
            if missing:
                raise CheckpointError(f"{file}: tensor {missing[0]} is missing; the index has it")
        for name, tensor in found.items():
            if name in entries:
                raise CheckpointError(f"{file}: tensor {name} is also in {entries[name].file}")
            entries[name] = tensor
    return Checkpoint(
        kind="safetensors",
        source=folder,
        config=config,
        generation_config=read_json_if_present(folder / "generation_config.json"),
        entries=entries,
        tokenizer_folder=folder,
    )


def _shards(folder: Path) -> dict[Path, set[str] | None]:
    """Returns the files to read, each with the tensor names that the index promises in it."""
    index_file, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if index_file.is_file():
        weight_map = read_json(index_file).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index_file}: has no weight_map")
        shards: dict[Path, set[str] | None] = {}
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise CheckpointError(f"{index_file}: {shard!r} is not a file name")
            shards.setdefault(folder / shard, set()).add(name)  # type: ignore[union-attr]
        return shards
    if single.is_file():
        return {single: None}
    others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".pkl"))
    hint = f"; {others[0]} is a pickle, which is never loaded: convert it" if others else ""
    raise CheckpointError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Returns the tensors of one safetensors file, after checking its header and its size."""
    header, data_start = _read_header(file)
    tensors: dict[str, Tensor] = {}
    end = 0
    for name, info in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, start, stop = _entry(file, name, info)
        end = max(end, stop)
        read = partial(_read_rows, file, dtype, shape, data_start + start)
        tensors[name] = Tensor(name, shape, file, read)
    expected, size = data_start + end, file.stat().st_size
    if size != expected:
        raise CheckpointError(
            f"{file}: is {size:,} bytes, its header says {expected:,}; the file is "
            f"{'cut short' if size < expected else 'damaged'}, fetch it again"
        )
    return tensors


def _read_header(file: Path) -> tuple[Mapping[str, Any], int]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= MAX_HEADER_BYTES or 8 + length > size:
                raise CheckpointError(
                    f"{file}: is {size:,} bytes and begins with a header length of {length:,}; "
                    "it is cut short or not a safetensors file"
                )
            header = json.loads(stream.read(length))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: does not exist; the index lists it") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: its header cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: its header is not a JSON object")
    return header, 8 + length


def _entry(file: Path, name: str, info: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """Returns (dtype, shape, start, stop) of a header entry, bytes relative to the data."""
    try:
        kind, shape = info["dtype"], tuple(info["shape"])
        start, stop = info["data_offsets"]
        if kind not in DTYPES:
            raise CheckpointError(
                f"{file}: tensor {name} has dtype {kind}; supported: {', '.join(DTYPES)}"
            )
        whole = all(isinstance(n, int) and n > 0 for n in shape) and 0 <= start <= stop
        if not whole or stop - start != math.prod(shape) * DTYPES[kind].itemsize:
            raise CheckpointError(
                f"{file}: tensor {name} of {kind}{list(shape)} cannot lie in bytes {start}:{stop}"
            )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: the header of tensor {name} is damaged") from error
    return DTYPES[kind], shape, start, stop


def _read_rows(
    file: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int, start: int, stop: int
) -> np.ndarray:
    """Maps rows [start, stop) of a tensor; the pages leave memory with the returned array."""
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    rows = (stop - start, *shape[1:])
    return np.asarray(
        np.memmap(file, dtype, mode="r", offset=offset + start * row_bytes, shape=rows)
    )
