"""Loading a model never unpickles: not by any line of the code, nor for any file that asks to."""

from __future__ import annotations

import ast
import contextlib
import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from jserve.build import _tokenizer_of
from jserve.checkpoint.orbax import SETTINGS_FILE, _crc32, write_orbax
from jserve.checkpoint.resolve import open_checkpoint
from jserve.checkpoint.safetensors import open_safetensors
from jserve.errors import CheckpointError
from tests.checkpoint.builders import LLAMA, random_tensors, write_folder
from tests.checkpoint.test_orbax import load
from tests.e2e.conftest import write_tokenizer

ROOT = Path(__file__).parents[2]
# Modules that unpickle, or whose loaders do when they meet the wrong file.
FORBIDDEN = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
FORBIDDEN += ("torch", "keras", "tensorflow", "msgpack")


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def unpicklers(tree: ast.AST) -> list[str]:
    """What a module does that may run code from a file."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in FORBIDDEN]
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in FORBIDDEN:
                found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if any(word.arg in ("allow_pickle", "trust_remote_code") for word in node.keywords):
                found.append(name)
            if name in ("eval", "exec", "__import__", "np.load", "numpy.load"):
                found.append(name)
    return found


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from torch import load",
        "import numpy as np\nnp.load(path)",
        "f(x, allow_pickle=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "eval(text)",
    ],
)
def test_an_unpickler_would_be_found(code: str):
    assert unpicklers(ast.parse(code))


def test_no_module_of_the_runtime_unpickles():
    found = {
        str(path.relative_to(ROOT)): names
        for package in ("jserve", "scheduler", "pallas_kernels")
        for path in (ROOT / package).rglob("*.py")
        if (names := unpicklers(ast.parse(path.read_text())))
    }
    assert found == {}


@pytest.fixture
def bomb(tmp_path: Path) -> tuple[Bomb, bytes]:
    """What leaves a mark when it is unpickled, and its pickle: which does work."""
    bomb = Bomb(tmp_path / "mark")
    data = pickle.dumps(bomb)
    pickle.loads(data)
    assert bomb.mark.exists()
    bomb.mark.unlink()
    return bomb, data


def load_all(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder), "")
    load(checkpoint)
    _tokenizer_of(checkpoint, "")


def test_files_that_ask_to_be_unpickled_are_passed_over_beside_a_good_model(tmp_path, bomb):
    """As are the Python files that some models bring."""
    bomb, data = bomb
    config = LLAMA | {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Model"}}
    folder = write_folder(tmp_path / "model", config, random_tensors(LLAMA))
    write_tokenizer(folder)
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:  # as torch writes them
        archive.writestr("archive/data.pkl", data)
    for name in ("model.bin", "model.pt", "tokenizer.pkl", "training_args.bin"):
        (folder / name).write_bytes(data)
    np.save(folder / "weights.npy", np.array([bomb], dtype=object), allow_pickle=True)
    for name in ("modeling_evil.py", "tokenization_evil.py", "conftest.py", "__init__.py"):
        (folder / name).write_text(f"import pathlib; pathlib.Path({str(bomb.mark)!r}).touch()")
    load_all(folder)
    assert not bomb.mark.exists()


@pytest.mark.parametrize("name", ["model.gguf", "model.bin", "model.pt", "model.safetensors"])
def test_a_pickle_that_is_named_as_the_model_is_refused(tmp_path, bomb, name: str):
    bomb, data = bomb
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(str(tmp_path / name), "")
    assert not bomb.mark.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pickle_in_the_place_of_a_models_file_is_refused(tmp_path, bomb, name: str):
    bomb, data = bomb
    folder = write_folder(tmp_path / "model", LLAMA, random_tensors(LLAMA))
    write_tokenizer(folder)
    (folder / name).write_bytes(data)
    with pytest.raises(CheckpointError):
        load_all(folder)
    assert not bomb.mark.exists()


def test_a_folder_with_nothing_but_pickled_weights_is_refused(tmp_path, bomb):
    bomb, data = bomb
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(CheckpointError, match="safetensors"):
        open_checkpoint(str(folder), "")
    assert not bomb.mark.exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's threads
def test_a_pickle_in_the_place_of_any_orbax_file_is_not_unpickled(tmp_path, bomb):
    """Checksums are no defence here: who writes the files writes those, too."""
    bomb, data = bomb
    source = open_safetensors(write_folder(tmp_path / "hf", LLAMA, random_tensors(LLAMA)))
    folder = tmp_path / "orbax"
    write_orbax(source, folder, "bfloat16")
    settings = json.loads((folder / SETTINGS_FILE).read_text())
    assert settings["files"]
    for name in settings["files"]:
        path = folder / name
        whole = path.read_bytes()
        path.write_bytes(data)
        forged = settings["files"] | {name: [len(data), _crc32(path)]}
        (folder / SETTINGS_FILE).write_text(json.dumps(settings | {"files": forged}))
        with contextlib.suppress(Exception):  # some files are not needed, others are refused
            load(open_checkpoint(str(folder), ""))
        assert not bomb.mark.exists(), name
        path.write_bytes(whole)
