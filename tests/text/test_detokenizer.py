"""Detokenizer: increments that join to the whole text, and stop strings however they are cut."""

from __future__ import annotations

import random
import time

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from jserve.text.detokenizer import Detokenizer
from jserve.text.tokenizer import Tokenizer

SHARED_FIXTURES = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
EMOJI = "🍕"
CJK = "".join(chr(0x4E00 + 37 * i) for i in range(200))


def words(*tokens: str, special: tuple[str, ...] = ()) -> Tokenizer:
    """A vocabulary of exactly these tokens; ids are their places, special ones come last."""
    vocab = {token: id for id, token in enumerate((*tokens, *special))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=tokens[0]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(special))
    return Tokenizer(backend)


def run(tokenizer: Tokenizer, ids: list[int], prompt: list[int] = [], **options):  # noqa: B006
    """All increments of `ids`, one id at a time, with the last one from finish()."""
    detokenizer = Detokenizer(tokenizer, prompt, **options)
    deltas = [detokenizer.add([id]) for id in ids]
    return [*deltas, detokenizer.finish()], detokenizer


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids that spell `text` byte by byte."""
    of_byte = {
        tokenizer.token_bytes(id): id
        for id in reversed(range(tokenizer.vocab_size))
        if len(tokenizer.token_bytes(id)) == 1
    }
    return [of_byte[bytes([byte])] for byte in text.encode()]


def minus(whole: str, prefix: str) -> str:
    assert whole.startswith(prefix)
    return whole[len(prefix) :]


@SHARED_FIXTURES
@given(
    prompt=st.lists(st.integers(0, 510), max_size=6),
    output=st.lists(st.integers(0, 510), max_size=40),
    skip=st.booleans(),
    cuts=st.randoms(use_true_random=False),
)
def test_joined_increments_are_what_the_output_adds_to_the_prompt(
    byte_level, spm, prompt, output, skip, cuts
):
    for tokenizer in (byte_level, spm):
        detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
        text, at = "", 0
        while at < len(output):
            size = cuts.randint(1, 4)
            text += detokenizer.add(output[at : at + size])
            at += size
        text += detokenizer.finish()
        before = tokenizer.decode(prompt, skip)
        whole = tokenizer.decode(prompt + output, skip)
        if whole.startswith(before):
            assert text == minus(whole, before)
        else:  # the output completed a character that the prompt had begun
            assert text == whole[len(before.removesuffix("\ufffd")) :]


@SHARED_FIXTURES
@given(
    output=st.lists(st.integers(0, 499), max_size=30),
    stop=st.lists(st.text("aeht .\n", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
@example(output=[], stop=["a"], include=False)
def test_the_text_ends_where_the_first_stop_string_is_complete(byte_level, output, stop, include):
    whole = byte_level.decode(output)
    ends = [(whole.find(s) + len(s), -len(s), s) for s in stop if s in whole]
    deltas, detokenizer = run(byte_level, output, stop=tuple(stop), include_stop_str=include)
    if not ends:
        assert ("".join(deltas), detokenizer.stop_hit) == (whole, None)
        return
    end, _, hit = min(ends)
    assert detokenizer.stop_hit == hit
    assert "".join(deltas) == whole[: end if include else end - len(hit)]
    at = detokenizer.num_tokens_at_stop
    assert hit in byte_level.decode(output[:at])
    assert not any(s in byte_level.decode(output[: at - 1]) for s in stop)


def test_O01_a_character_spread_over_ids_never_shows_as_replacement(tokenizer):
    ids = byte_ids(tokenizer, f"ab {EMOJI} cd")
    streams = [Detokenizer(tokenizer, byte_ids(tokenizer, "x")) for _ in range(8)]
    texts = [""] * 8
    for id in ids:
        for index, stream in enumerate(streams):
            delta = stream.add([id])
            assert "\ufffd" not in delta
            texts[index] += delta
    assert [text + s.finish() for text, s in zip(texts, streams, strict=True)] == (
        [f"ab {EMOJI} cd"] * 8
    )


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_O02_a_prompt_that_ends_inside_a_character_is_not_repeated(tokenizer, cut):
    emoji = byte_ids(tokenizer, EMOJI)
    prompt = byte_ids(tokenizer, "Hello world ") + emoji[:cut]
    deltas, _ = run(tokenizer, emoji[cut:] + byte_ids(tokenizer, " ok"), prompt)
    assert "".join(deltas) == f"{EMOJI} ok"
    deltas, _ = run(tokenizer, byte_ids(tokenizer, "five"), prompt)
    assert "".join(deltas) == "five"


@pytest.mark.parametrize(("skip", "text"), [(True, "AB"), (False, "A<special>B")])
def test_O03_the_skip_special_flag_holds_for_single_ids_as_for_the_whole(skip, text):
    tokenizer = words("A", "B", special=("<special>",))
    deltas, _ = run(tokenizer, [0, 2, 1], skip_special_tokens=skip)
    assert "".join(deltas) == tokenizer.decode([0, 2, 1], skip) == text


@pytest.mark.parametrize("prompt", [[], [1], "hello", " "])
def test_O04_leading_spaces_are_those_of_the_whole_text(spm, prompt):
    prompt = spm.encode(prompt) if isinstance(prompt, str) else prompt
    output = spm.encode("the of", add_special_tokens=False)
    deltas, _ = run(spm, output, prompt)
    assert "".join(deltas) == minus(spm.decode(prompt + output), spm.decode(prompt))
    assert "".join(deltas) == ("the of" if prompt in ([], [1]) else " the of")


def test_O04_byte_level_chunks_keep_their_leading_spaces(byte_level):
    ids = [*byte_level.encode(" the"), *byte_level.encode(" of")]
    deltas, _ = run(byte_level, ids, byte_level.encode("hello"))
    assert [delta for delta in deltas if delta] == [" the", " of"]


def test_O06_cjk_characters_cut_in_any_way_are_all_delivered(tokenizer):
    rng = random.Random(6)
    ids = byte_ids(tokenizer, CJK)
    detokenizer = Detokenizer(tokenizer, byte_ids(tokenizer, "x"))
    text, at = "", 0
    while at < len(ids):
        size = rng.randint(1, 7)
        text += detokenizer.add(ids[at : at + size])
        at += size
    assert text + detokenizer.finish() == CJK


def test_O07_ids_beyond_the_vocabulary_add_no_text_and_break_nothing(tokenizer):
    ids = byte_ids(tokenizer, EMOJI)
    padded = [ids[0], tokenizer.vocab_size + 5, *ids[1:], 2**31 - 1]
    deltas, _ = run(tokenizer, padded, byte_ids(tokenizer, "x"), stop=("stop",))
    assert "".join(deltas) == EMOJI


def test_O08_stop_string_spread_over_tokens_is_never_sent():
    tokenizer = words("ABC", "DEF", "G", "HI", "J", "X")
    deltas, detokenizer = run(tokenizer, [0, 1, 2, 3, 4, 5], stop=("DEFGHIJ",))
    assert deltas == ["ABC", "", "", "", "", "", ""]
    assert (detokenizer.stop_hit, detokenizer.num_tokens_at_stop) == ("DEFGHIJ", 5)


def test_O08_a_near_miss_of_a_stop_string_is_delivered_in_full():
    tokenizer = words("ABC", "DEF", "G", "HI", "J", "X")
    deltas, detokenizer = run(tokenizer, [0, 1, 2, 3, 5], stop=("DEFGHIJ",))
    assert deltas == ["ABC", "", "", "", "DEFGHIX", ""]
    assert detokenizer.stop_hit is None


def test_O09_a_stop_string_that_ends_inside_a_token_ends_the_text():
    tokenizer = words("ABC", "DEF", "GHI")
    detokenizer = Detokenizer(tokenizer, [], stop=("DE",))
    assert detokenizer.add([0, 1, 2]) == "ABC"
    assert (detokenizer.stop_hit, detokenizer.num_tokens_at_stop) == ("DE", 2)
    assert detokenizer.add([2]) == detokenizer.finish() == ""


def test_O10_a_stop_string_with_spaces_over_three_tokens_is_found():
    tokenizer = words("x", " O", " P", " Q")
    deltas, detokenizer = run(tokenizer, [0, 1, 2, 3], stop=("O P Q",))
    assert "".join(deltas) == "x "
    assert detokenizer.stop_hit == "O P Q"


def test_O11_text_held_back_is_delivered_when_generation_ends_otherwise():
    tokenizer = words("ABC", "DEF")
    deltas, detokenizer = run(tokenizer, [0, 1], stop=("DEFG", "CDEFX"))
    assert deltas == ["AB", "", "CDEF"]
    assert detokenizer.stop_hit is None


def test_O11_an_incomplete_character_is_delivered_as_replacement_at_the_end(tokenizer):
    deltas, _ = run(tokenizer, byte_ids(tokenizer, EMOJI)[:3], byte_ids(tokenizer, "x"))
    assert deltas == ["", "", "", "\ufffd"]


@pytest.mark.parametrize(("include", "text"), [(False, "56"), (True, "567")])
def test_O14_the_stop_text_is_left_out_or_kept_once_at_the_end(include, text):
    tokenizer = words(*"0123456789")
    deltas, _ = run(tokenizer, [5, 6, 7, 8], stop=("7",), include_stop_str=include)
    assert "".join(deltas) == text


@pytest.mark.parametrize("skip", [True, False])
def test_O15_a_special_tokens_text_stops_even_if_special_tokens_are_skipped(skip):
    tokenizer = words("a", "b", "c", special=("<|im_end|>",))
    deltas, detokenizer = run(
        tokenizer, [0, 1, 2, 3, 0], stop=("<|im_end|>",), skip_special_tokens=skip
    )
    assert "".join(deltas) == "abc"
    assert (detokenizer.stop_hit, detokenizer.num_tokens_at_stop) == ("<|im_end|>", 4)


def test_O15_a_stop_string_may_join_special_and_ordinary_text():
    tokenizer = words("a", "\n", "user", special=("<|end|>", "<|start|>"))
    stop = ("<|end|>\n<|start|>user",)
    deltas, detokenizer = run(tokenizer, [0, 3, 1, 4, 2, 0], stop=stop)
    assert ("".join(deltas), detokenizer.num_tokens_at_stop) == ("a", 5)
    deltas, _ = run(tokenizer, [0, 3, 1, 4, 0], stop=stop)
    assert "".join(deltas) == "a\na"


def test_O15_a_special_token_from_within_a_stop_string_shows_nothing_where_it_stands_alone():
    tokenizer = words("a", "b", "c", special=("<|end|>",))
    for min_tokens in (0, 3):
        deltas, detokenizer = run(tokenizer, [0, 3, 2], stop=("b<|end|>c",), min_tokens=min_tokens)
        assert ("".join(deltas), detokenizer.stop_hit) == ("ac", None)


def test_O15_a_special_tokens_text_stops_when_ordinary_tokens_spell_it():
    tokenizer = words("a", "<|", "end", "|>", special=("<|end|>",))
    deltas, detokenizer = run(tokenizer, [0, 1, 2, 3, 0], stop=("<|end|>",))
    assert ("".join(deltas), detokenizer.stop_hit) == ("a", "<|end|>")


def test_a_replacement_character_that_the_model_writes_is_kept(tokenizer):
    deltas, _ = run(tokenizer, byte_ids(tokenizer, "a\ufffdb"), byte_ids(tokenizer, "x"))
    assert "".join(deltas) == "a\ufffdb"


def test_a_token_costs_the_same_however_long_the_text_is(byte_level):
    rng = random.Random(0)
    ids = [rng.randrange(byte_level.vocab_size) for _ in range(40_000)]

    def seconds(detokenizer: Detokenizer, part: list[int]) -> float:
        start = time.process_time()
        for id in part:
            detokenizer.add([id])
        return time.process_time() - start

    detokenizer = Detokenizer(byte_level, [], stop=("\n\nQuestion:", "stop here"))
    first = seconds(detokenizer, ids[:10_000])
    seconds(detokenizer, ids[10_000:30_000])
    last = seconds(detokenizer, ids[30_000:])
    assert last < 3 * first + 0.05
    assert detokenizer.stop_hit is None


def test_a_special_token_that_is_kept_is_shown_and_can_be_part_of_a_stop_string():
    tokenizer = words("a", "b", special=("<call>", "<end>"))
    shown, _ = run(tokenizer, [0, 2, 1, 3], keep=frozenset({2}))
    assert "".join(shown) == "a<call>b"
    shown, stopped = run(tokenizer, [0, 2, 1, 3], keep=frozenset({2}), stop=("<call>b",))
    assert ("".join(shown), stopped.stop_hit) == ("a", "<call>b")
