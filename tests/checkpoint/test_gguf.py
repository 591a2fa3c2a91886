"""GGUF files present themselves as Hugging Face checkpoints, or are refused by name."""

from __future__ import annotations

import struct
import time

import gguf
import numpy as np
import pytest

from jserve.checkpoint.gguf import open_gguf
from jserve.checkpoint.mapping import checked_tensors
from jserve.errors import CheckpointError
from jserve.models.families import model_config_from_hf
from tests.checkpoint.builders import (
    GEMMA2,
    GEMMA3,
    LLAMA,
    QWEN2,
    QWEN3,
    permuted,
    random_tensors,
    write_gguf,
)

MHA = LLAMA | {"num_key_value_heads": 4}


def opened(path):
    """Opens a file and checks that it is a whole model."""
    checkpoint = open_gguf(path)
    config = model_config_from_hf(checkpoint.config, checkpoint.generation_config)
    checked_tensors(checkpoint, config)
    return checkpoint, config


def refusal(path) -> str:
    with pytest.raises(CheckpointError) as caught:
        opened(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("config", [MHA, LLAMA], ids=["mha", "gqa"])
def test_O81_permuted_rows_of_llama_files_are_put_back(tmp_path, config, kind):
    tensors = random_tensors(config)
    checkpoint, _ = opened(write_gguf(tmp_path / "m.gguf", config, tensors, kind=kind))
    quantised = gguf.GGMLQuantizationType[kind]
    for name, array in checkpoint.tensors():
        expected = tensors[name]
        if expected.ndim == 2:  # rows are quantised on their own, so their order is no matter
            expected = gguf.quants.dequantize(
                gguf.quants.quantize(expected, quantised), quantised
            ).reshape(expected.shape)
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, expected, err_msg=name)


@pytest.mark.parametrize(
    ("arch", "config"),
    [("qwen2", QWEN2), ("qwen3", QWEN3), ("gemma2", GEMMA2), ("gemma3", GEMMA3)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_O81_rows_of_other_files_stay_and_gemma_norms_lose_their_one(tmp_path, arch, config):
    tensors = random_tensors(config)
    settings = {"gemma2": {"gemma2.attention.sliding_window": 16}}
    settings["gemma3"] = {"gemma3.attention.sliding_window": 16}
    checkpoint, _ = opened(
        write_gguf(tmp_path / "m.gguf", config, tensors, arch, settings=settings.get(arch))
    )
    for name, array in checkpoint.tensors():
        np.testing.assert_array_equal(array, tensors[name], err_msg=name)


def test_O81_biases_of_llama_files_are_put_back_too(tmp_path):
    hf = LLAMA | {"attention_bias": True, "mlp_bias": True}
    tensors = random_tensors(hf)
    checkpoint, config = opened(write_gguf(tmp_path / "m.gguf", hf, tensors))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, True)
    for name, array in checkpoint.tensors():
        np.testing.assert_array_equal(array, tensors[name], err_msg=name)


def test_part_of_a_tensor_equals_those_rows_of_the_whole(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA), kind="Q4_0")
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"):
        tensor = open_gguf(path).entries[name]
        np.testing.assert_array_equal(tensor.read_rows(5, 41), tensor.read()[5:41])


def test_the_permutation_in_these_tests_is_the_documented_one():
    rows = np.arange(8)[:, None]  # two heads of four rows
    np.testing.assert_array_equal(permuted(rows, 2)[:, 0], [0, 2, 1, 3, 4, 6, 5, 7])


def test_a_llama_file_gives_the_config_it_was_made_from(tmp_path):
    made_from = LLAMA | {"tie_word_embeddings": True, "rope_theta": 100_000.0}
    _, config = opened(write_gguf(tmp_path / "m.gguf", made_from, random_tensors(made_from)))
    expected = model_config_from_hf(made_from)
    assert config.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    for name in expected.__slots__:
        if name != "rms_norm_eps":
            assert getattr(config, name) == getattr(expected, name), name


def test_gemma3_gets_what_its_file_does_not_name(tmp_path):
    hf = GEMMA3 | {"num_hidden_layers": 7}
    settings = {"gemma3.attention.sliding_window": 16}
    path = write_gguf(tmp_path / "m.gguf", hf, random_tensors(hf), "gemma3", settings=settings)
    _, config = opened(path)
    assert config.rope.theta == 1_000_000
    assert config.rope_local.theta == 10_000
    assert config.sliding_windows == (16, 16, 16, 16, 16, 0, 16)
    assert config.activation == "gelu_tanh"
    assert config.norm_offset == 1


def test_gemma3_scales_only_the_rope_of_global_layers(tmp_path):
    settings = {
        "gemma3.attention.sliding_window": 16,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    tensors = random_tensors(GEMMA3)
    path = write_gguf(tmp_path / "m.gguf", GEMMA3, tensors, "gemma3", settings=settings)
    _, config = opened(path)
    assert (config.rope.kind, config.rope.factor) == ("linear", 8)
    assert config.rope_local.kind == "default"


def test_gemma2_keeps_its_soft_caps(tmp_path):
    settings = {
        "gemma2.attention.sliding_window": 16,
        "gemma2.attn_logit_softcapping": 50.0,
        "gemma2.final_logit_softcapping": 30.0,
    }
    tensors = random_tensors(GEMMA2)
    path = write_gguf(tmp_path / "m.gguf", GEMMA2, tensors, "gemma2", settings=settings)
    _, config = opened(path)
    assert (config.attn_soft_cap, config.final_soft_cap) == (50, 30)
    assert config.sliding_windows == (16, 0)


def test_a_yarn_rope_is_read(tmp_path):
    settings = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 64,
    }
    tensors = random_tensors(QWEN2)
    path = write_gguf(tmp_path / "m.gguf", QWEN2, tensors, "qwen2", settings=settings)
    rope = opened(path)[1].rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4, 64)


def llama3_divisors(factor: float, head_dim: int, theta: float) -> np.ndarray:
    """One divisor per frequency, as llama.cpp's converter writes them for Llama 3.1 and later."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_rope_divisors_become_llama3_scaling(tmp_path):
    hf = LLAMA | {"rope_theta": 500_000.0}
    extra = {"rope_freqs.weight": llama3_divisors(32.0, 32, 500_000.0)}
    path = write_gguf(tmp_path / "m.gguf", hf, random_tensors(hf), extra=extra)
    rope = opened(path)[1].rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("llama3", 32, 8192)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1, 4)


def test_other_rope_divisors_are_refused_by_name(tmp_path):
    extra = {"rope_freqs.weight": np.linspace(1, 9, 16, dtype=np.float32)}
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA), extra=extra)
    assert "rope_freqs.weight is not a llama3 scaling" in refusal(path)


def test_end_of_turn_and_message_ids_are_eos_too(tmp_path):
    settings = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 8}
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA), settings=settings)
    assert opened(path)[1].eos_token_ids == (2, 7, 8)


def test_metadata_are_plain_python_values_under_the_keys_of_the_file(tmp_path):
    settings = {"tokenizer.chat_template": "{{ messages }}", "x.flags": [True, False]}
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA), settings=settings)
    checkpoint, _ = opened(path)
    metadata = checkpoint.gguf_metadata
    assert metadata["tokenizer.ggml.tokens"] == ["a", "b", "é"]
    assert metadata["tokenizer.ggml.scores"] == [0.0, -1.5, -2.0]
    assert metadata["x.flags"] == [True, False]
    assert type(metadata["llama.block_count"]) is int
    assert metadata["tokenizer.chat_template"] == "{{ messages }}"
    assert checkpoint.tokenizer_folder is None


def test_O83_an_unknown_architecture_is_named_with_those_supported(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    message = refusal(path)
    assert "'mamba'" in message
    assert "llama, qwen2, qwen3, gemma2, gemma3" in message


def retyped(path, name: str, kind: int) -> None:
    """Changes the type number of one tensor in a file's header."""
    data = bytearray(path.read_bytes())
    at = data.index(name.encode()) + len(name)
    (num_dims,) = struct.unpack_from("<I", data, at)
    struct.pack_into("<I", data, at + 4 + 8 * num_dims, kind)
    path.write_bytes(data)


@pytest.mark.parametrize(("kind", "called"), [(4, "type 4"), (250, "type 250"), (24, "type I8")])
def test_O83_an_unknown_tensor_type_is_named_with_those_supported(tmp_path, kind, called):
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA))
    retyped(path, "blk.1.ffn_up.weight", kind)
    message = refusal(path)
    assert f"blk.1.ffn_up.weight has {called}" in message
    assert "Q4_K" in message


@pytest.mark.parametrize(
    ("version", "words"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")]
)
def test_O83_another_version_is_refused(tmp_path, version, words):
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA))
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 4, version)
    path.write_bytes(data)
    assert words in refusal(path)


def test_O83_a_file_cut_in_its_data_is_refused_with_both_sizes(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA))
    data = path.read_bytes()
    path.write_bytes(data[:-1024])
    message = refusal(path)
    assert f"is {len(data) - 1024:,} bytes" in message
    assert "cut short" in message


def test_O83_a_file_cut_anywhere_in_its_header_is_refused_quickly(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA))
    data = path.read_bytes()
    header_end = data.index(b"output.weight")
    for keep in range(0, header_end, 37):
        path.write_bytes(data[:keep])
        started = time.monotonic()
        refusal(path)
        assert time.monotonic() - started < 1


def test_a_count_larger_than_the_file_is_refused_quickly(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA))
    data = bytearray(path.read_bytes())
    at = data.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    struct.pack_into("<Q", data, at, 2**60)
    path.write_bytes(data)
    assert "cut short" in refusal(path)


def test_something_else_is_not_taken_for_gguf(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + b"\0" * 60)
    assert "not with b'GGUF'" in refusal(path)


def test_an_unknown_tensor_is_refused_by_name(tmp_path):
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((4, 64), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA), extra=extra)
    assert "blk.0.ffn_gate_inp.weight is no part of a supported llama model" in refusal(path)


def test_one_part_of_a_split_file_is_refused(tmp_path):
    settings = {"split.count": 3}
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_tensors(LLAMA), settings=settings)
    assert "one of 3 parts" in refusal(path)


def test_smollm2_opens_quickly_and_whole(smollm2_gguf):
    started = time.monotonic()
    checkpoint, config = opened(smollm2_gguf)
    assert time.monotonic() - started < 5
    assert (config.num_layers, config.hidden_size, config.num_heads) == (30, 576, 9)
    assert (config.num_kv_heads, config.head_dim, config.vocab_size) == (3, 64, 49_152)
    assert config.rope.theta == 100_000
    assert config.tie_word_embeddings
    assert "<|im_start|>" in checkpoint.gguf_metadata["tokenizer.chat_template"]


@pytest.mark.gemma
def test_gemma3_opens_quickly_and_whole(gemma3_gguf):
    started = time.monotonic()
    checkpoint, config = opened(gemma3_gguf)
    assert time.monotonic() - started < 5
    assert (config.num_layers, config.vocab_size, config.head_dim) == (18, 262_144, 256)
    assert config.sliding_windows == ((512,) * 5 + (0,)) * 3
    assert len(checkpoint.gguf_metadata["tokenizer.ggml.tokens"]) == 262_144
