"""Tokenizers read from Hugging Face folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from jserve.errors import CheckpointError
from jserve.text.tokenizer import load_tokenizer


def folder_with(tmp_path: Path, **files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return tmp_path


@pytest.fixture
def folder(tmp_path, text_data) -> Path:
    shutil.copy(text_data / "tiny_byte_level.json", tmp_path / "tokenizer.json")
    return folder_with(
        tmp_path,
        tokenizer_config={
            "bos_token": {"__type": "AddedToken", "content": "<|im_start|>", "special": True},
            "eos_token": "<|im_end|>",
            "chat_template": "{{ messages[0].content }}",
        },
    )


def test_a_folder_gives_the_ids_of_transformers(folder, expected):
    import transformers  # a second to import

    judge = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == len(judge)
    for text in expected["strings"]:
        assert tokenizer.encode(text) == judge.encode(text), text


def test_special_tokens_and_the_template_come_from_the_config(folder):
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    assert not tokenizer.add_bos


def test_O12_eos_ids_are_the_tokenizers_own_and_those_of_generation_config(folder):
    folder_with(folder, generation_config={"eos_token_id": [0, 2]}, config={"eos_token_id": 7})
    assert load_tokenizer(folder).eos_token_ids == (2, 0)


def test_eos_ids_come_from_config_where_generation_config_has_none(folder):
    folder_with(folder, config={"eos_token_id": 7})
    assert load_tokenizer(folder).eos_token_ids == (2, 7)


def test_an_eos_id_of_minus_one_is_none(folder):
    folder_with(folder, tokenizer_config={}, generation_config={"eos_token_id": -1})
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_token_ids, tokenizer.eos_token) == ((), "")


@pytest.mark.parametrize(("flag", "wanted"), [(True, True), (False, False), (None, True)])
def test_O70_bos_is_added_as_the_config_or_else_the_post_processor_says(folder, flag, wanted):
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    if flag is not None:
        config["add_bos_token"] = flag
    tokenizer = load_tokenizer(folder_with(folder, tokenizer_config=config))
    assert tokenizer.encode("hello").count(1) == int(wanted)
    assert tokenizer.encode("<|im_start|>hello").count(1) == 1


def test_truncation_and_padding_settings_of_the_file_have_no_effect(folder):
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("hello the world")) == "hello the world"


def test_a_template_file_goes_before_the_configs_and_named_ones_give_the_default(folder):
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    folder_with(folder, tokenizer_config={"chat_template": named})
    assert load_tokenizer(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("J", "utf-8")
    assert load_tokenizer(folder).chat_template == "J"


def test_O82_a_bare_sentencepiece_model_gives_the_ids_of_sentencepiece(
    tmp_path, text_data, expected
):
    shutil.copy(text_data / "tiny_spm.model", tmp_path / "tokenizer.model")
    folder_with(tmp_path, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer = load_tokenizer(tmp_path)
    for text, ids in zip(expected["strings"], expected["tiny_spm"], strict=True):
        assert tokenizer.encode(text) == [1, *ids], text
    assert tokenizer.eos_token_ids == (2,)


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_config", "generation_config"])
def test_a_damaged_file_is_refused_by_name(folder, name):
    (folder / f"{name}.json").write_text('{"a": ', "utf-8")
    with pytest.raises(CheckpointError, match=rf"{name}\.json"):
        load_tokenizer(folder)
