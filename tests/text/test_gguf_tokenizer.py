"""Tokenizers built from GGUF metadata give the ids of the original libraries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jserve.checkpoint.gguf_format import read_gguf
from jserve.errors import CheckpointError
from jserve.text.chat import chat_template_of, encode_chat
from jserve.text.gguf_pre_tokenizers import PRE_TOKENIZATIONS
from jserve.text.gguf_tokenizer import tokenizer_from_gguf
from jserve.text.sentencepiece_model import read_sentencepiece_model
from jserve.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


def tokenizer_of_file(path: Path) -> Tokenizer:
    return tokenizer_from_gguf(read_gguf(path).metadata)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf) -> Tokenizer:
    return tokenizer_of_file(smollm2_gguf)


@pytest.fixture(scope="module")
def gemma3(gemma3_gguf) -> Tokenizer:
    return tokenizer_of_file(gemma3_gguf)


def golden_cases(name: str) -> list[dict]:
    return json.loads((GOLDEN / f"{name}.json").read_text("utf-8"))["cases"]


@pytest.mark.parametrize("kind", ["byte_level", "spm"])
def test_O82_small_vocabularies_split_as_their_trainers_do(kind, request, expected):
    tokenizer = request.getfixturevalue(kind)
    assert len(expected["strings"]) >= 50
    for text, ids in zip(expected["strings"], expected[f"tiny_{kind}"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


@pytest.mark.parametrize("model", ["smollm2", pytest.param("gemma3", marks=pytest.mark.gemma)])
def test_O82_real_vocabularies_give_the_ids_of_transformers(model, request, expected):
    tokenizer = request.getfixturevalue(model)
    texts = expected["strings"] + expected["special_strings"]
    for text, ids in zip(texts, expected[model], strict=True):
        bos = [tokenizer.bos_token_id] if tokenizer.add_bos else []
        assert bos + tokenizer.encode(text, add_special_tokens=False) == ids, text


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "deepseek-v3", "gpt-4o"])
def test_O82_pre_tokenizers_split_as_the_original_files_do(pre, text_data, expected):
    rules = PRE_TOKENIZATIONS[pre]
    normalizer, pre_tokenizer = rules.normalizer(), rules.pre_tokenizer()
    splits = json.loads((text_data / "expected_splits.json").read_text("utf-8"))[pre]
    for text, pieces in zip(expected["strings"], splits, strict=True):
        text = normalizer.normalize_str(text) if normalizer else text
        assert [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("pre", PRE_TOKENIZATIONS)
def test_every_known_pre_tokenizer_loses_no_text(pre, byte_level_metadata, expected):
    tokenizer = tokenizer_from_gguf(byte_level_metadata | {"tokenizer.ggml.pre": pre})
    normalizer = PRE_TOKENIZATIONS[pre].normalizer()
    for text in expected["strings"]:
        wanted = normalizer.normalize_str(text) if normalizer else text
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == wanted


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("smollm2_135m", "smollm2"),
        pytest.param("gemma3_270m", "gemma3", marks=pytest.mark.gemma),
    ],
)
def test_golden_prompts_and_outputs_of_the_real_models(name, model, request):
    tokenizer = request.getfixturevalue(model)
    for case in golden_cases(name):
        assert tokenizer.encode(case["text"]) == case["prompt_ids"], case["name"]
        text = tokenizer.decode(case["output_ids"], skip_special_tokens=False)
        assert text == case["output_text"]


def test_golden_chats_of_the_default_model(smollm2):
    template = chat_template_of(smollm2)
    chats = [case for case in golden_cases("smollm2_135m") if case["messages"]]
    assert chats
    for case in chats:
        assert template.render(case["messages"]) == case["text"]
        assert encode_chat(smollm2, template, case["messages"]) == case["prompt_ids"]


def test_O82_bos_and_eos_flags_of_the_file_are_honoured(byte_level_metadata, spm_metadata):
    eot = byte_level_metadata | {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.eot_token_id": 1,
    }
    tokenizer = tokenizer_from_gguf(eot)
    assert tokenizer.eos_token_ids == (2, 1)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert tokenizer.encode("hello")[0] == 0
    without = tokenizer_from_gguf(spm_metadata | {"tokenizer.ggml.add_bos_token": False})
    assert without.encode("hello") == without.encode("hello", add_special_tokens=False)


def test_O82_bos_is_the_kinds_own_where_the_file_says_nothing(byte_level_metadata, spm_metadata):
    llama3 = byte_level_metadata | {"tokenizer.ggml.pre": "llama-bpe"}
    assert tokenizer_from_gguf(llama3).add_bos
    assert not tokenizer_from_gguf(byte_level_metadata).add_bos
    assert tokenizer_from_gguf(spm_metadata).add_bos


def test_O82_the_space_prefix_is_added_only_where_the_file_wants_it(spm, spm_metadata):
    without = tokenizer_from_gguf(spm_metadata | {"tokenizer.ggml.add_space_prefix": False})
    assert spm.encode("the") == without.encode(" the")
    assert without.decode(without.encode(" the")) == " the"
    assert spm.decode(spm.encode(" the")) == " the"


def test_user_defined_tokens_stay_whole_and_are_no_special_tokens(spm):
    think = spm.encode("<think>", add_special_tokens=False)[-1]
    assert think == 3
    assert think not in spm.special_token_ids
    assert spm.decode([think]) == "<think>"


def test_O07_unused_padding_tokens_decode_to_nothing(byte_level_metadata):
    padded = dict(byte_level_metadata)
    padded["tokenizer.ggml.tokens"] = [*padded["tokenizer.ggml.tokens"], "[PAD0]", "[PAD1]"]
    padded["tokenizer.ggml.token_type"] = [*padded["tokenizer.ggml.token_type"], 5, 5]
    tokenizer = tokenizer_from_gguf(padded)
    assert tokenizer.decode([tokenizer.vocab_size - 1, tokenizer.vocab_size - 2]) == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, "'rwkv' is not supported; known: gpt2, llama"),
        ({"model": None}, r"tokenizer\.ggml\.model is NoneType"),
        ({"pre": "mystery"}, "'mystery' is not supported; known: .*llama-bpe"),
        ({"token_type": [1]}, "token_type has 1"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is NoneType"),
        ({"merges": ["zq zq"]}, "merges do not fit"),
        ({"merges": ["zq"]}, "merges do not fit"),
        ({"merges": [7]}, "malformed: 'int' object"),
        ({"token_type": 7}, "malformed: object of type 'int'"),
        ({"eos_token_id": 9999}, "eos_token_id=9999 is none of"),
        ({"bos_token_id": "1"}, "bos_token_id='1' is none of"),
        ({"tokens": []}, "0 entries"),
    ],
)
def test_metadata_that_cannot_be_used_are_refused_by_name(byte_level_metadata, changes, message):
    broken = byte_level_metadata | {f"tokenizer.ggml.{key}": v for key, v in changes.items()}
    with pytest.raises(CheckpointError, match=message):
        tokenizer_from_gguf(broken)


def test_scores_that_do_not_match_the_tokens_are_refused(spm_metadata):
    with pytest.raises(CheckpointError, match="scores has 1"):
        tokenizer_from_gguf(spm_metadata | {"tokenizer.ggml.scores": [0.0]})


@pytest.mark.parametrize("damage", ["truncated", "text", "empty"])
def test_a_damaged_sentencepiece_model_is_refused(tmp_path, text_data, damage):
    data = (text_data / "tiny_spm.model").read_bytes()
    file = tmp_path / "tokenizer.model"
    file.write_bytes({"truncated": data[:-50], "text": b"hello", "empty": b""}[damage])
    with pytest.raises(CheckpointError, match=r"tokenizer\.model"):
        read_sentencepiece_model(file)
