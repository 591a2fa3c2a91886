"""Helpers of the end-to-end tests: one built engine in many arrangements."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
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


def rearranged(built, *, overlap: bool = True, **limits):
    """Returns an LLM with its own scheduler, queue and metrics over the compiled steps and the
    pages of the engine `built`, which must not run meanwhile. `limits` are SchedulerConfig's; they
    can only shrink, as the steps hold any smaller number of rows, tokens and pages.
    """
    from jserve.engine.engine import Engine
    from jserve.engine.metrics import EngineMetrics
    from jserve.llm import LLM
    from scheduler.packer import Packer
    from scheduler.scheduler import Scheduler

    base = built.scheduler.config
    config = dataclasses.replace(base, **limits)
    for name, limit in limits.items():
        assert limit <= getattr(base, name), f"{name}={limit} is more than {getattr(base, name)}"
    engine = Engine(
        processor=built.processor,
        scheduler=Scheduler(config),
        packer=Packer(config, built._packer.buckets),
        runner=built._runner,
        metrics=EngineMetrics(),
        overlap=overlap,
        clock=time.monotonic,
    )
    return LLM.from_engine(engine)
