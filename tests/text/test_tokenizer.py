"""Tokenizer: ids, BOS, bytes, and what it does with ids and text that do not belong."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from jserve.errors import CheckpointError, InvalidRequest
from jserve.text.tokenizer import Tokenizer

SHARED_FIXTURES = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@SHARED_FIXTURES
@given(text=st.text(max_size=60))
def test_any_text_survives_encoding_and_decoding(byte_level, spm, text):
    for tokenizer in (byte_level, spm):
        ids = tokenizer.encode(text, add_special_tokens=False)
        # U+2581 is how SentencePiece spells a space, so it cannot survive there.
        wanted = text.replace("▁", " ") if tokenizer is spm else text
        assert tokenizer.decode(ids, skip_special_tokens=False) == wanted


@SHARED_FIXTURES
@given(ids=st.lists(st.integers(0, 499), max_size=30), skip=st.booleans())
def test_byte_level_decoding_equals_the_rust_librarys_for_any_ids(byte_level, backends, ids, skip):
    judge = backends["byte_level"].decode(ids, skip_special_tokens=skip)
    assert byte_level.decode(ids, skip) == judge


@SHARED_FIXTURES
@given(ids=st.lists(st.integers(0, 499), max_size=30), skip=st.booleans())
def test_spm_decoding_equals_the_rust_librarys_wherever_the_bytes_are_text(
    spm, backends, ids, skip
):
    judge = backends["spm"].decode(ids, skip_special_tokens=skip)
    # Malformed runs of bytes: the library gives up the whole run, we only what is malformed.
    if "\ufffd" not in judge:
        assert spm.decode(ids, skip) == judge


def test_O07_ids_beyond_the_vocabulary_decode_to_nothing(tokenizer):
    ids = tokenizer.encode("hello", add_special_tokens=False)
    beyond = [tokenizer.vocab_size, tokenizer.vocab_size + 63, 2**40, -1]
    assert tokenizer.decode([*beyond, *ids, *beyond]) == "hello"
    assert [tokenizer.token_bytes(id) for id in beyond] == [b""] * 4


def test_bos_is_added_only_where_the_model_wants_one(byte_level, spm):
    assert not byte_level.add_bos
    assert byte_level.encode("hello") == byte_level.encode("hello", add_special_tokens=False)
    assert spm.encode("hello") == [1, *spm.encode("hello", add_special_tokens=False)]


def test_O70_a_raw_prompt_that_begins_with_bos_text_gets_bos_once(spm):
    ids = spm.encode("<s>hello")
    assert ids.count(spm.bos_token_id) == 1
    assert ids == spm.encode("hello")


def test_special_token_text_in_a_raw_prompt_becomes_its_id(byte_level):
    assert byte_level.encode("<|im_start|>x<|im_end|>")[::2] == [1, 2]


def test_plain_encoding_never_yields_a_special_id(tokenizer):
    for token_id in tokenizer.special_token_ids:
        text = tokenizer._backend.id_to_token(token_id)
        ids = tokenizer.encode_plain(text)
        assert tokenizer.special_token_ids.isdisjoint(ids)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_plain_encoding_spells_a_special_token_that_merging_would_form():
    vocab = {"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("<", "s"), ("<s", ">")]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<s>"])
    assert Tokenizer(backend).encode_plain("<s>") == [0, 1, 2]


def test_special_spans_tell_where_special_text_stands(byte_level):
    assert byte_level.special_spans("ünï <|im_end|>é<|im_start|>") == [(2, 4, 14), (1, 15, 27)]
    assert byte_level.special_spans("plain <text>") == []


def test_text_with_half_a_surrogate_pair_is_an_invalid_request(tokenizer):
    with pytest.raises(InvalidRequest, match="valid Unicode"):
        tokenizer.encode("a\ud800b")


def test_a_long_text_gets_the_same_ids_and_others_run_while_it_is_encoded(byte_level, backends):
    text = "the cat sat on a mat <|im_end|> and said: 🌊? " * 10_000
    num_turns, is_over = 0, False

    def others() -> None:
        nonlocal num_turns
        while not is_over:
            num_turns += 1
            time.sleep(0.001)

    with ThreadPoolExecutor() as pool:
        pool.submit(others)
        began, before = time.monotonic(), num_turns
        ids, offsets = byte_level.encode_with_offsets(text)
        after, seconds = num_turns, time.monotonic() - began
        is_over = True
    judge = backends["byte_level"].encode(text, add_special_tokens=False)
    assert (ids, offsets) == (judge.ids, judge.offsets)
    assert after - before > 20, f"{after - before} turns of 1 ms in {seconds:.2f} s"


def test_a_decoder_that_is_not_understood_is_refused_by_name():
    backend = tokenizers.Tokenizer(models.BPE())
    with pytest.raises(CheckpointError, match="no decoder"):
        Tokenizer(backend)
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="WordPiece"):
        Tokenizer(backend)


def test_threads_sharing_a_tokenizer_get_the_same_ids_and_texts(tokenizer, expected):
    texts = expected["strings"]

    def round_trip(_: int) -> list[str]:
        return [tokenizer.decode(tokenizer.encode(text)) for text in texts]

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(round_trip, range(8)))
    assert all(result == results[0] for result in results)
