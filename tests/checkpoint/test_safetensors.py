"""Folders of safetensors files are read whole and right, or refused with the file's name."""

from __future__ import annotations

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jserve.checkpoint.safetensors import open_safetensors, read_tensors
from jserve.errors import CheckpointError
from tests.checkpoint.builders import LLAMA, random_tensors, write_folder


def refusal(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_safetensors(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("num_shards", [1, 3])
def test_tensors_read_back_as_written(tmp_path, num_shards):
    tensors = random_tensors(LLAMA)
    checkpoint = open_safetensors(write_folder(tmp_path, LLAMA, tensors, num_shards))
    assert set(checkpoint.entries) == set(tensors)
    for name, array in checkpoint.tensors():
        np.testing.assert_array_equal(array, tensors[name])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_each_float_type_is_read(tmp_path, dtype):
    array = np.arange(12, dtype=np.float32).reshape(4, 3).astype(dtype)
    save_file({"w": array}, tmp_path / "x.safetensors")
    tensor = read_tensors(tmp_path / "x.safetensors")["w"]
    np.testing.assert_array_equal(tensor.read().astype(np.float32), array.astype(np.float32))
    np.testing.assert_array_equal(tensor.read_rows(1, 3), array[1:3])


def test_a_header_of_any_length_is_read(tmp_path):
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    header += b" " * (8 - len(header) % 8 + 1)  # data at an odd offset
    data = np.array([1.5, -2], ml_dtypes.bfloat16).tobytes()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    values = read_tensors(tmp_path / "x.safetensors")["w"].read()
    np.testing.assert_array_equal(values.astype(np.float32), [1.5, -2])


def test_O75_a_shard_that_was_cut_short_is_named_with_both_sizes(tmp_path):
    folder = write_folder(tmp_path, LLAMA, random_tensors(LLAMA), num_shards=3)
    shard = folder / "model-00002-of-00003.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1024])
    message = refusal(folder)
    assert str(shard) in message
    assert f"{len(data) - 1024:,} bytes" in message
    assert f"{len(data):,}" in message


@pytest.mark.parametrize("keep", [0, 7, 8, 40])
def test_O75_a_file_cut_within_its_header_is_refused(tmp_path, keep):
    folder = write_folder(tmp_path, LLAMA, random_tensors(LLAMA))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert str(file) in refusal(folder)


def test_bytes_after_the_last_tensor_are_refused(tmp_path):
    folder = write_folder(tmp_path, LLAMA, random_tensors(LLAMA))
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0" * 16)
    assert "its header says" in refusal(folder)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 15]}, "cannot lie in bytes 0:15"),
        ({"dtype": "F32", "shape": [-2, 2], "data_offsets": [0, 16]}, "cannot lie"),
        ({"dtype": "F8_E4M3", "shape": [16], "data_offsets": [0, 16]}, "dtype F8_E4M3; supported"),
        ({"dtype": "F32", "shape": [4]}, "is damaged"),
        (7, "is damaged"),
    ],
)
def test_a_damaged_header_entry_is_refused_by_name(tmp_path, entry, words):
    header = json.dumps({"the.tensor": entry}).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 16)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_tensors(file)
    assert "the.tensor" in str(caught.value)


def test_O76_only_indexed_files_are_used(tmp_path):
    tensors = random_tensors(LLAMA)
    folder = write_folder(tmp_path, LLAMA, tensors, num_shards=2)
    save_file({"tok_embeddings.weight": np.ones((2, 2))}, folder / "consolidated.safetensors")
    save_file({"lm_head.weight": np.ones((2, 2))}, folder / "model.safetensors")
    checkpoint = open_safetensors(folder)
    assert set(checkpoint.entries) == set(tensors)
    np.testing.assert_array_equal(
        checkpoint.entries["lm_head.weight"].read(), tensors["lm_head.weight"]
    )


def test_O76_only_the_single_file_is_used_where_there_is_no_index(tmp_path):
    tensors = random_tensors(LLAMA)
    folder = write_folder(tmp_path, LLAMA, tensors)
    save_file({"other": np.ones((2, 2))}, folder / "consolidated.safetensors")
    assert set(open_safetensors(folder).entries) == set(tensors)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    tensors = random_tensors(LLAMA)
    folder = write_folder(tmp_path, LLAMA, tensors, num_shards=2)
    save_file(tensors, folder / "model-00002-of-00002.safetensors")
    assert "is also in" in refusal(folder)


def test_a_missing_shard_is_named(tmp_path):
    folder = write_folder(tmp_path, LLAMA, random_tensors(LLAMA), num_shards=2)
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert "model-00001-of-00002.safetensors: does not exist" in refusal(folder)


def test_a_tensor_that_the_index_promises_must_be_in_its_shard(tmp_path):
    tensors = random_tensors(LLAMA)
    folder = write_folder(tmp_path, LLAMA, tensors, num_shards=2)
    save_file(
        {"lm_head.weight": tensors["lm_head.weight"]}, folder / "model-00001-of-00002.safetensors"
    )
    assert "is missing; the index has it" in refusal(folder)


def test_an_index_cannot_name_files_outside_its_folder(tmp_path):
    folder = write_folder(tmp_path, LLAMA, random_tensors(LLAMA), num_shards=2)
    index = {"weight_map": {"lm_head.weight": "../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "is not a file name" in refusal(folder)


def test_a_folder_of_pickles_is_refused_by_name_and_nothing_is_unpickled(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    # a pickle that would create a file if anything loaded it
    payload = b"cbuiltins\nopen\n(V" + str(tmp_path / "proof").encode() + b"\nVw\ntR."
    (tmp_path / "pytorch_model.bin").write_bytes(payload)
    assert "pytorch_model.bin is a pickle, which is never loaded" in refusal(tmp_path)
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"'])
def test_a_damaged_config_is_named(tmp_path, text):
    folder = write_folder(tmp_path, LLAMA, random_tensors(LLAMA))
    (folder / "config.json").write_text(text)
    assert str(folder / "config.json") in refusal(folder)
