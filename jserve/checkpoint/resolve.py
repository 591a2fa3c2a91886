"""Finds the model that a user names, whatever form it has. Knows names and paths, not contents."""

from __future__ import annotations

import re
from pathlib import Path

from jserve.checkpoint.fetch import KNOWN_MODELS, fetch_known
from jserve.checkpoint.gguf import open_gguf
from jserve.checkpoint.safetensors import open_safetensors
from jserve.checkpoint.source import Checkpoint
from jserve.errors import CheckpointError

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]
_ACCEPTED = (
    f"a known name ({', '.join(KNOWN_MODELS)}), a Hugging Face folder with safetensors, "
    "a .gguf file, a folder written by jserve-convert, or a hub name (organisation/model)"
)


def open_checkpoint(model: str, cache_dir: str) -> Checkpoint:
    """Opens the model that `model` names; known and hub models are fetched into `cache_dir`.

    Raises:
      CheckpointError: nothing of that name, a kind that is not supported, a failed download, or
        a damaged file.
    """
    if model in KNOWN_MODELS:
        return open_gguf(fetch_known(model, Path(cache_dir).expanduser()))
    path = Path(model).expanduser()
    if path.is_dir():
        return _open_folder(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path}: is not a .gguf file; use {_ACCEPTED}")
        return open_gguf(path)
    if _HUB_NAME.fullmatch(model):
        return open_safetensors(_fetch_from_hub(model, Path(cache_dir).expanduser()))
    raise CheckpointError(f"there is no model {model!r}; use {_ACCEPTED}")


def _open_folder(folder: Path) -> Checkpoint:
    if (folder / "jserve.json").is_file():
        from jserve.checkpoint.orbax import open_orbax  # brings jax

        return open_orbax(folder)
    if (folder / "config.json").is_file():
        return open_safetensors(folder)
    files = sorted(folder.glob("*.gguf"))
    hint = f"; name the file itself: {files[0]}" if files else f"; use {_ACCEPTED}"
    raise CheckpointError(f"{folder}: has neither config.json nor jserve.json{hint}")


def _fetch_from_hub(name: str, cache_dir: Path) -> Path:
    import huggingface_hub  # most of a second, and only hub names need it

    try:
        folder = huggingface_hub.snapshot_download(
            name,
            cache_dir=cache_dir / "hub",
            allow_patterns=_HUB_PATTERNS,
            ignore_patterns=["consolidated*"],
        )
    except Exception as error:  # the hub's errors, those of its HTTP library, the file system's
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{name}: there is no such local path, and fetching it from the Hugging Face hub "
            f"failed ({reason:.200}); when offline, give a local folder or .gguf file"
        ) from error
    return Path(folder)
