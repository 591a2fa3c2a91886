"""Our own checkpoints restore what was written, into any layout, or are refused in one line."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.checkpoint import convert
from jserve.checkpoint.gguf import open_gguf
from jserve.checkpoint.mapping import load_params
from jserve.checkpoint.orbax import open_orbax, write_orbax
from jserve.checkpoint.resolve import open_checkpoint
from jserve.checkpoint.safetensors import open_safetensors
from jserve.errors import CheckpointError
from jserve.models.families import model_config_from_hf
from jserve.models.head_layout import head_layout
from tests.checkpoint.builders import (
    GEMMA3,
    LLAMA,
    QWEN2,
    random_tensors,
    write_folder,
    write_gguf,
)


def load(checkpoint, dtype="float32", tensor_parallel_size=1, stacked=False):
    config = model_config_from_hf(checkpoint.config, checkpoint.generation_config)
    layout = head_layout(config, tensor_parallel_size)
    return load_params(checkpoint, config, layout, dtype, stacked=stacked)


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def written(tmp_path):
    """A Hugging Face folder and the Orbax folder written from it."""
    source = open_safetensors(write_folder(tmp_path / "hf", LLAMA, random_tensors(LLAMA)))
    write_orbax(source, tmp_path / "orbax", "bfloat16")
    return source, tmp_path / "orbax"


def refusal(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(open_orbax(folder))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("config", [LLAMA, QWEN2, GEMMA3], ids=lambda c: c["model_type"])
def test_what_is_restored_equals_what_was_converted(tmp_path, config, stacked):
    source = open_safetensors(write_folder(tmp_path / "hf", config, random_tensors(config)))
    write_orbax(source, tmp_path / "orbax", "float32")
    restored = load(open_orbax(tmp_path / "orbax"), stacked=stacked)
    assert_same(restored, load(source, stacked=stacked))


def test_a_padded_layout_is_reassembled(tmp_path):
    config = QWEN2 | {"num_attention_heads": 9, "num_key_value_heads": 3}
    source = open_safetensors(write_folder(tmp_path / "hf", config, random_tensors(config)))
    write_orbax(source, tmp_path / "orbax", "float32")
    restored = load(open_orbax(tmp_path / "orbax"), tensor_parallel_size=2)
    assert_same(restored, load(source, tensor_parallel_size=2))


def test_weights_are_restored_in_the_dtype_asked_for(written):
    source, folder = written
    as_float32 = load(open_orbax(folder), "float32")
    assert as_float32["embed"].dtype == jnp.float32
    assert_same(as_float32, load(source, "float32"))  # the tests' weights are exact in bfloat16


def test_each_array_is_restored_straight_into_its_sharding(written):
    _, folder = written
    checkpoint = open_orbax(folder)
    config = model_config_from_hf(checkpoint.config)
    mesh = jax.make_mesh((1,), ("model",))
    asked = {}

    def sharding(axes):
        spec = jax.sharding.PartitionSpec(*("model" if axis else None for axis in axes))
        return asked.setdefault(axes, jax.sharding.NamedSharding(mesh, spec))

    params = load_params(checkpoint, config, head_layout(config), "bfloat16", sharding)
    assert params["embed"].sharding == asked["vocab", None]
    assert params["layers"][1]["o"].sharding == asked[None, "kv_heads"]


def test_a_gguf_keeps_its_tokenizer_metadata_and_template(tmp_path):
    settings = {"tokenizer.chat_template": "{{ x }}"}
    gguf_file = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA), settings=settings)
    source = open_gguf(gguf_file)
    write_orbax(source, tmp_path / "orbax", "float32")
    restored = open_orbax(tmp_path / "orbax")
    assert restored.gguf_metadata == source.gguf_metadata
    assert restored.tokenizer_folder is None
    assert restored.generation_config == source.generation_config
    assert_same(load(restored), load(source))


def test_tokenizer_files_come_along(tmp_path):
    folder = write_folder(tmp_path / "hf", LLAMA, random_tensors(LLAMA))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "t"}))
    write_orbax(open_safetensors(folder), tmp_path / "orbax", "float32")
    restored = open_orbax(tmp_path / "orbax")
    assert (restored.tokenizer_folder / "tokenizer.json").read_text() == "{}"
    assert "chat_template" in (restored.tokenizer_folder / "tokenizer_config.json").read_text()


def test_a_missing_piece_is_named(written):
    _, folder = written
    piece = next(path for path in (folder / "params").rglob("d/*") if path.is_file())
    piece.unlink()
    assert f"{piece}: is missing" in refusal(folder)


def test_a_cut_piece_is_named_with_both_sizes(written):
    _, folder = written
    piece = next(path for path in (folder / "params").rglob("d/*") if path.is_file())
    size = piece.stat().st_size
    piece.write_bytes(piece.read_bytes()[:-5])
    assert f"{piece}: is {size - 5:,} bytes, expected {size:,}" in refusal(folder)


def test_one_flipped_bit_is_noticed(written):
    _, folder = written
    piece = max((folder / "params").rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(piece.read_bytes())
    data[len(data) // 2] ^= 1
    piece.write_bytes(data)
    assert f"{piece}: has checksum" in refusal(folder)


def test_parameters_of_another_config_are_refused(written):
    _, folder = written
    settings = json.loads((folder / "jserve.json").read_text())
    settings["config"]["intermediate_size"] = 256
    (folder / "jserve.json").write_text(json.dumps(settings))
    assert "parameter ['layers'][0]['down'] has shape (64, 128)" in refusal(folder)


def test_a_folder_that_vanishes_after_opening_is_one_line_too(written):
    _, folder = written
    checkpoint = open_orbax(folder)
    shutil.rmtree(folder / "params")
    with pytest.raises(CheckpointError, match="embed cannot be restored") as caught:
        load(checkpoint)
    assert "\n" not in str(caught.value)


def test_another_format_is_refused(written):
    _, folder = written
    (folder / "jserve.json").write_text(json.dumps({"format": 99}))
    assert "has format 99, this version reads 1" in refusal(folder)


def test_nothing_is_left_behind_when_writing_fails(tmp_path):
    tensors = random_tensors(LLAMA)
    del tensors["lm_head.weight"]
    source = open_safetensors(write_folder(tmp_path / "hf", LLAMA, tensors))
    with pytest.raises(CheckpointError):
        write_orbax(source, tmp_path / "out" / "orbax", "float32")
    assert not list(tmp_path.glob("out/*"))


def test_an_existing_folder_is_never_overwritten(written):
    source, folder = written
    with pytest.raises(CheckpointError, match="exists already"):
        write_orbax(source, folder, "float32")
    load(open_orbax(folder))


def test_the_command_converts_a_model(tmp_path, capsys):
    folder = write_folder(tmp_path / "hf", LLAMA, random_tensors(LLAMA))
    argv = ["jserve-convert", f"--model={folder}", f"--output={tmp_path / 'out'}"]
    assert convert.main([*argv, "--dtype=float32"]) == 0
    assert "wrote" in capsys.readouterr().out
    assert open_checkpoint(str(tmp_path / "out"), str(tmp_path)).kind == "orbax"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--model=x"], 2, "output"),
        (["--model=x", "--output=y", "--dtype=int4"], 2, "int4"),
        (["--model=x", "--output=y", "extra"], 2, "extra"),
        (["--model=not-there", "--output=y"], 1, "there is no model"),
    ],
)
def test_the_command_answers_a_mistake_in_one_line(arguments, status, words, capsys):
    assert convert.main(["jserve-convert", *arguments]) == status
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
