"""What every kind of checkpoint looks like to the rest: a Hugging Face config and named tensors.

Knows no file format, no parameter layout and no device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jserve.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Tensor:
    """One named tensor of a file, read on demand.

    Attributes:
      shape: as Hugging Face stores it, [out, in] for weights.
      file: where it is, for messages.
      read_rows: (start, stop) -> rows of the first axis, as a float array of any width. Reading
        few rows at a time is what bounds host memory.
    """

    name: str
    shape: tuple[int, ...]
    file: Path
    read_rows: Callable[[int, int], np.ndarray]

    def read(self) -> np.ndarray:
        """Returns the whole tensor."""
        return self.read_rows(0, self.shape[0] if self.shape else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An opened model. Its files were checked to be whole; its tensors are still on disk.

    Attributes:
      kind: "safetensors", "gguf" or "orbax".
      source: the file or folder it came from.
      config: as in a Hugging Face config.json; `generation_config` likewise, None if absent.
      entries: tensors by Hugging Face name ("model.layers.0.self_attn.q_proj.weight").
      tokenizer_folder: folder with Hugging Face tokenizer files, or None.
      gguf_metadata: key-value pairs of a GGUF file as plain Python values, or None.
      restore: places all parameters at once (arguments of `mapping.load_params` after the
        checkpoint), where the layout of heads is the model's own; None where only `entries` can.
    """

    kind: str
    source: Path
    config: dict[str, Any]
    generation_config: dict[str, Any] | None = None
    entries: Mapping[str, Tensor]
    tokenizer_folder: Path | None = None
    gguf_metadata: dict[str, Any] | None = None
    restore: Callable[..., dict[str, Any]] | None = None

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields every tensor whole, one at a time."""
        for name, tensor in self.entries.items():
            yield name, tensor.read()


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; raises CheckpointError if it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, expected a JSON object")
    return value


def read_json_if_present(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None
