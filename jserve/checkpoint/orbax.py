"""Writes and reads our own checkpoint: parameters in Orbax, settings and tokenizer beside them.

A folder holds jserve.json (config; size and checksum of every other file), params/ (an Orbax tree
with the names of `models/params.py`, layers unrolled, heads as the model has them), and
tokenizer/ or gguf_metadata.json. Orbax is imported when first needed: that takes most of a second.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jserve.checkpoint.mapping import (
    TOP_TENSORS,
    default_sharding,
    expected_tensors,
    gather_layers,
    layer_tensors,
    load_params,
)
from jserve.checkpoint.source import Checkpoint, Tensor, read_json
from jserve.errors import CheckpointError
from jserve.models.config import ModelConfig
from jserve.models.families import model_config_from_hf
from jserve.models.head_layout import HeadLayout, head_layout
from jserve.models.params import ParamShape, is_norm, layer_shapes, param_shapes, top_shapes
from jserve.models.quantize import Quantization, ShardingOf, loaded_dtype, quantized

FORMAT = 1
SETTINGS_FILE = "jserve.json"
GGUF_METADATA_FILE = "gguf_metadata.json"
PARAMS_FOLDER = "params"
TOKENIZER_FOLDER = "tokenizer"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)


def write_orbax(checkpoint: Checkpoint, output: Path, dtype: str) -> None:
    """Writes `checkpoint` to the new folder `output`, with weights in `dtype`.

    The folder appears under its name only once it is whole. Holds the whole model in memory.

    Raises:
      CheckpointError: `output` exists, or `checkpoint` is not a whole supported model.
    """
    if output.exists():
        raise CheckpointError(f"{output}: exists already; remove it or name another folder")
    config = model_config_from_hf(checkpoint.config, checkpoint.generation_config)
    params = load_params(checkpoint, config, head_layout(config), dtype)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial_folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        _orbax().save((partial_folder / PARAMS_FOLDER).absolute(), params)
        _write_tokenizer(checkpoint, partial_folder)
        files = {
            str(path.relative_to(partial_folder)): [path.stat().st_size, _crc32(path)]
            for path in sorted(partial_folder.rglob("*"))
            if path.is_file()
        }
        settings = {
            "format": FORMAT,
            "dtype": dtype,
            "config": checkpoint.config,
            "generation_config": checkpoint.generation_config,
            "files": files,
        }
        (partial_folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=1))
        partial_folder.chmod(0o755)  # mkdtemp makes folders private
        os.rename(partial_folder, output)
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)


def _write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    if checkpoint.gguf_metadata is not None:
        text = json.dumps(checkpoint.gguf_metadata)
        (folder / GGUF_METADATA_FILE).write_text(text, encoding="utf-8")
    elif checkpoint.tokenizer_folder is not None:
        (folder / TOKENIZER_FOLDER).mkdir()
        for name in TOKENIZER_FILES:
            if (checkpoint.tokenizer_folder / name).is_file():
                shutil.copy(checkpoint.tokenizer_folder / name, folder / TOKENIZER_FOLDER / name)


def open_orbax(folder: Path) -> Checkpoint:
    """Opens a folder that `write_orbax` made.

    Raises:
      CheckpointError: another format, or a file that is missing or was changed.
    """
    settings = read_json(folder / SETTINGS_FILE)
    if settings.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder}: has format {settings.get('format')!r}, this version reads {FORMAT}; "
            "convert the model again"
        )
    _check_files(folder, settings["files"])
    hf_config, generation_config = settings["config"], settings["generation_config"]
    config = model_config_from_hf(hf_config, generation_config)
    _check_shapes(folder, config)
    metadata_file, tokenizer = folder / GGUF_METADATA_FILE, folder / TOKENIZER_FOLDER
    metadata = read_json(metadata_file) if metadata_file.is_file() else None
    return Checkpoint(
        kind="orbax",
        source=folder,
        config=hf_config,
        generation_config=generation_config,
        entries=_entries(folder, config),
        tokenizer_folder=tokenizer if tokenizer.is_dir() else None,
        gguf_metadata=metadata,
        restore=partial(restore_params, folder),
    )


def _check_files(folder: Path, files: Mapping[str, Sequence[int]]) -> None:
    """Compares every file with its recorded size and checksum, which Orbax does not keep."""
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing; convert the model again")
        if path.stat().st_size != size:
            raise CheckpointError(
                f"{path}: is {path.stat().st_size:,} bytes, expected {size:,}; "
                "convert the model again"
            )
    with ThreadPoolExecutor() as pool:
        checksums = pool.map(_crc32, (folder / name for name in files))
        for (name, (_, expected)), checksum in zip(files.items(), checksums, strict=True):
            if checksum != expected:
                raise CheckpointError(
                    f"{folder / name}: has checksum {checksum:08x}, expected {expected:08x}; "
                    "convert the model again"
                )


def _check_shapes(folder: Path, config: ModelConfig) -> None:
    """Compares what Orbax holds with what the config asks for."""
    stored = _orbax().metadata((folder / PARAMS_FOLDER).absolute()).item_metadata.tree
    found = {jax.tree_util.keystr(k): a.shape for k, a in jax.tree.leaves_with_path(stored)}
    is_shape = lambda node: isinstance(node, ParamShape)  # noqa: E731
    wanted = param_shapes(config, head_layout(config))
    expected = {
        jax.tree_util.keystr(k): s.shape
        for k, s in jax.tree.leaves_with_path(wanted, is_leaf=is_shape)
    }
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise CheckpointError(
                f"{folder}: parameter {name} has shape {found.get(name)}, the config asks for "
                f"{expected.get(name)}; convert the model again"
            )


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as stream:
        while block := stream.read(2**20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def restore_params(
    folder: Path,
    config: ModelConfig,
    layout: HeadLayout,
    dtype: Any,
    sharding: ShardingOf | None = None,
    stacked: bool = False,
    quantization: Quantization = "none",
) -> dict[str, Any]:
    """Restores the parameters straight into their shardings, one layer at a time.

    The same contract as `mapping.load_params`, for a `layout` that is the model's own.
    """
    assert layout.is_identity, "a padded layout is assembled by load_params"
    dtype, sharding = jnp.dtype(dtype), sharding or default_sharding

    def restored(shapes: Mapping[str, ParamShape], layer: int | None) -> Iterator[tuple[str, Any]]:
        wanted = {
            leaf: jax.ShapeDtypeStruct(
                shape.shape,
                loaded_dtype(leaf, dtype, quantization),
                sharding=sharding(shape.logical_axes),
            )
            for leaf, shape in shapes.items()
        }
        arrays = _restore(folder, config, wanted, layer)
        for leaf, shape in shapes.items():
            axes = shape.logical_axes
            yield leaf, quantized(leaf, arrays.pop(leaf), axes, quantization, sharding)

    params: dict[str, Any] = {}
    for leaf, shape in top_shapes(config, layout).items():
        params |= restored({leaf: shape}, None)
    shapes = layer_shapes(config, layout)
    layers = (
        (layer, leaf, param)
        for layer in range(config.num_layers)
        for leaf, param in restored(shapes, layer)
    )
    return params | {"layers": gather_layers(layers, config, layout, sharding, stacked)}


def _orbax() -> Any:
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointer()


def _restore(
    folder: Path, config: ModelConfig, wanted: dict[str, Any], layer: int | None
) -> dict[str, Any]:
    """Restores the leaves in `wanted` (abstract arrays) of one layer, or from outside the layers.

    An abstract array without a sharding comes back as a numpy array.
    """
    import orbax.checkpoint as ocp

    tree = jax.tree.map(
        lambda _: ocp.PLACEHOLDER,
        param_shapes(config, head_layout(config)),
        is_leaf=lambda node: isinstance(node, ParamShape),
    )
    (tree if layer is None else tree["layers"][layer]).update(wanted)
    try:
        args = ocp.args.PyTreeRestore(
            item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree)
        )
        restored = _orbax().restore((folder / PARAMS_FOLDER).absolute(), args=args)
    except Exception as error:  # Orbax, tensorstore and the file system each have their own
        place = "" if layer is None else f"layers.{layer}."
        raise CheckpointError(
            f"{folder}: {place}{', '.join(wanted)} cannot be restored "
            f"({str(error).splitlines()[0]:.200}); convert the model again"
        ) from error
    part = restored if layer is None else restored["layers"][layer]
    return {leaf: jax.block_until_ready(part[leaf]) for leaf in wanted}


def _entries(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Returns the Hugging Face tensors of our parameters, for layouts that need reassembly."""
    shapes, layout = expected_tensors(config), head_layout(config)

    @lru_cache(maxsize=1)  # a parameter's tensors are read one after the other
    def whole(leaf: str, shape: ParamShape, layer: int | None) -> np.ndarray:
        host = np.zeros(shape.shape, np.float32)  # float32 holds either dtype exactly
        return _restore(folder, config, {leaf: host}, layer)[leaf]

    def rows(
        leaf: str, shape: ParamShape, layer: int | None, index: int, start: int, stop: int
    ) -> np.ndarray:
        array, num_row_axes = _unfused(leaf, whole(leaf, shape, layer), index, config)
        at = np.unravel_index(np.arange(start, stop), array.shape[:num_row_axes])
        return array[at]  # copies these rows only

    entries = {}

    def add(name: str, leaf: str, shape: ParamShape, layer: int | None, index: int) -> None:
        read = partial(rows, leaf, shape, layer, index)
        entries[name] = Tensor(name, shapes[name], folder / PARAMS_FOLDER, read)

    for leaf, shape in top_shapes(config, layout).items():
        add(TOP_TENSORS[leaf], leaf, shape, None, 0)
    for layer in range(config.num_layers):
        for leaf, shape in layer_shapes(config, layout).items():
            for index, part in enumerate(layer_tensors(config)[leaf]):
                add(f"model.layers.{layer}.{part}", leaf, shape, layer, index)
    return entries


def _unfused(
    leaf: str, array: np.ndarray, index: int, config: ModelConfig
) -> tuple[np.ndarray, int]:
    """Returns a view of the tensor at `index` among those that make `leaf` (see `layer_tensors`),
    and how many of its leading axes are, flattened, the rows of the Hugging Face tensor."""
    G = config.group_size
    if leaf in ("qkv", "qkv_bias"):
        return ((array[:, :G], 3), (array[:, G], 2), (array[:, G + 1], 2))[index]
    if leaf in ("gate_up", "gate_up_bias"):
        return array[index], 1
    return (array - np.float32(config.norm_offset) if is_norm(leaf) else array), 1
