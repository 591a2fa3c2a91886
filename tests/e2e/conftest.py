"""Models of tests/data/models that an engine can serve."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jserve.text.tokenizer import BYTE_ALPHABET
from tests.models.reference import FOLDER

NUM_ASCII = 128


def write_servable(name: str, folder: Path) -> Path:
    """Copies a reference model of tests/data/models and gives it a tokenizer: ASCII bytes."""
    folder.mkdir(parents=True)
    for part in ("config.json", "model.safetensors"):
        shutil.copy(FOLDER / name / part, folder / part)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Adds a byte-level tokenizer of ASCII, each id the byte's value, to a model's folder."""
    vocab = {char: byte for char, byte in BYTE_ALPHABET.items() if byte < NUM_ASCII}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({}))


@pytest.fixture(scope="session")
def servable(tmp_path_factory):
    """servable(name): the folder of a reference model with a tokenizer, made once."""
    made: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in made:
            made[name] = write_servable(name, tmp_path_factory.mktemp("models") / name)
        return made[name]

    return folder_of
