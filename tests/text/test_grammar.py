"""Masks against brute force over every token, for small languages and every vocabulary we read."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from jserve.errors import InvalidRequest
from jserve.structured import GrammarKind, StructuredOutput
from jserve.text.grammar import GrammarCompiler, Matcher

PADDING = 64  # ids that the model has and the tokenizer has not

LANGUAGES = {
    StructuredOutput.of_choice(["yes", "no", "not now", "été", '"\\"', "😀 "]): None,
    StructuredOutput(GrammarKind.REGEX, "^(ab|a[0-9]c?)$"): ["ab"]
    + [f"a{i}{c}" for i in range(10) for c in ("", "c")],
    StructuredOutput(GrammarKind.REGEX, "(the|than|a)( cat)?"): [
        a + b for a in ("the", "than", "a") for b in ("", " cat")
    ],
    StructuredOutput(GrammarKind.LARK, 'start: "a" rest | "to"\nrest: "" | "n" "d"?'): [
        *("a", "an", "and", "to")
    ],
}


@pytest.fixture
def compiler(tokenizer) -> GrammarCompiler:
    eos = [*tokenizer.eos_token_ids, tokenizer.bos_token_id]  # two ids that end an output
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + PADDING, eos)


def allowed_by(matcher: Matcher, vocab_size: int) -> set[int] | None:
    """Ids that a mask allows; None where `fill` says that there are none."""
    words = np.full((vocab_size + 31) // 32, 0xFFFFFFFF, np.uint32)
    if not matcher.fill(words):
        assert not words.any()
        return None
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")))


def follow(matcher: Matcher, compiler: GrammarCompiler, text: str) -> bool:
    """Whether `matcher` allows `text`, by the longest token of text allowed at each place."""
    rest = text.encode()
    spelling = compiler._tokenizer.token_bytes
    while rest:
        allowed = allowed_by(matcher, compiler.vocab_size) or set()
        allowed -= compiler._tokenizer.special_token_ids
        fitting = [id for id in allowed if spelling(id) and rest.startswith(spelling(id))]
        if not fitting:
            return False
        id = max(fitting, key=lambda id: len(spelling(id)))
        if not matcher.accept(id):
            return False
        rest = rest[len(spelling(id)) :]
    return True


@pytest.mark.parametrize("spec", LANGUAGES, ids=lambda spec: spec.value)
def test_a_mask_allows_exactly_the_tokens_that_some_output_goes_on_with(compiler, tokenizer, spec):
    """O07 too: no id beyond the tokenizer's is ever allowed. Where one byte only can come, the mask
    is the one token that the tokenizer would write."""
    texts = LANGUAGES[spec] or json.loads(spec.value)
    language = [text.encode() for text in texts]
    special = tokenizer.special_token_ids
    spellings = {id: tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)}
    waiting, seen = [(b"", compiler.compile(spec).matcher())], set()
    num_exact = 0
    while waiting:
        out, matcher = waiting.pop()
        seen.add(out)
        fitting = {
            id
            for id, spelling in spellings.items()
            if spelling
            and id not in special
            and any(t.startswith(out + spelling) for t in language)
        }
        expected = fitting | (set(compiler._eos_token_ids) if out in language else set())
        found = allowed_by(matcher, compiler.vocab_size)
        next_bytes = {t[len(out)] for t in language if t.startswith(out) and t != out}
        if len(next_bytes) == 1 and out not in language:
            assert found is not None
            assert len(found) >= 1
            assert found <= expected
        else:
            assert found == expected
            num_exact += 1
        assert matcher.is_finished == (expected == set(compiler._eos_token_ids))
        for id in found & fitting:
            after = matcher.copy()
            assert after.accept(id)
            if out + spellings[id] not in seen:
                waiting.append((out + spellings[id], after))
    assert set(language) <= seen
    assert num_exact > 1


def test_a_token_that_does_not_fit_is_not_accepted_and_moves_nothing(compiler, tokenizer):
    matcher = compiler.compile(StructuredOutput.of_choice(["yes", "no"])).matcher()
    before = allowed_by(matcher, compiler.vocab_size)
    wrong = [*tokenizer.encode_plain("x"), *tokenizer.eos_token_ids, -1, compiler.vocab_size]
    assert [matcher.accept(id) for id in wrong] == [False] * len(wrong)
    assert allowed_by(matcher, compiler.vocab_size) == before


def test_every_eos_id_ends_an_output_and_none_before_its_end(compiler):
    eos = set(compiler._eos_token_ids)
    assert len(eos) == 2
    grammar = compiler.compile(StructuredOutput.of_choice(["no", "none"]))
    for id in eos:
        matcher = grammar.matcher()
        assert not eos & allowed_by(matcher, compiler.vocab_size)
        assert not matcher.accept(id)
        assert follow(matcher, compiler, "no")
        assert allowed_by(matcher, compiler.vocab_size) > eos
        assert not matcher.is_finished
        assert matcher.accept(id)
        assert matcher.is_finished
        assert allowed_by(matcher, compiler.vocab_size) == eos


def test_a_copy_and_its_original_go_on_apart(compiler):
    one = compiler.compile(StructuredOutput.of_choice(["abc", "abd"])).matcher()
    assert follow(one, compiler, "ab")
    other = one.copy()
    assert follow(one, compiler, "c")
    assert one.is_finished
    assert not other.is_finished
    assert follow(other, compiler, "d")


def test_forced_tokens_are_what_the_masks_allow_one_by_one_and_what_the_tokenizer_writes(compiler):
    schema = {"type": "object", "properties": {"the name": {"type": "null"}}}
    schema |= {"required": ["the name"], "additionalProperties": False}
    matcher = compiler.compile(StructuredOutput.of_json_schema(schema)).matcher()
    written = b""
    while not matcher.is_finished:
        forced = matcher.forced_tokens()
        assert forced
        assert allowed_by(matcher, compiler.vocab_size) == {forced[0]}
        for id in forced:
            assert matcher.accept(id)
        written += b"".join(compiler._tokenizer.token_bytes(id) for id in forced)
    assert written == b'{"the name": null}'
    assert matcher.forced_tokens() == []


def test_a_long_forced_text_is_forced_in_parts_that_the_tokenizer_writes(compiler):
    """Each mask asks how the rest is written, so that must not cost the whole length each time."""
    text = "lorem ipsum dolor sit amet " * 400
    matcher = compiler.compile(StructuredOutput.of_choice([text])).matcher()
    whole = compiler._tokenizer.encode_plain(text)
    written: list[int] = []
    while not matcher.is_finished:
        forced = matcher.forced_tokens()
        assert 0 < len(forced) < len(whole) / 4
        assert allowed_by(matcher, compiler.vocab_size) == {forced[0]}
        assert all(matcher.accept(id) for id in forced)
        written += forced
    assert compiler._tokenizer.decode(written) == text
    assert sum(a != b for a, b in zip(written[::-1], whole[::-1], strict=False)) <= 3


def test_o72_a_special_tokens_text_is_spelled_and_its_id_is_no_text(compiler, tokenizer):
    special = tokenizer.eos_token
    ids = tokenizer.special_token_ids
    assert special
    for spec in (
        StructuredOutput.of_choice([special]),
        StructuredOutput(GrammarKind.REGEX, r"(.|\n)*"),
        StructuredOutput.of_json_schema({"const": special}),
        StructuredOutput(GrammarKind.LARK, f"start: {json.dumps(special)}"),
    ):
        matcher = compiler.compile(spec).matcher()
        allowed = allowed_by(matcher, compiler.vocab_size)
        assert not allowed & (ids - set(compiler._eos_token_ids))
        assert set(compiler._eos_token_ids).isdisjoint(allowed) or ".|" in spec.value
        text = json.dumps(special) if spec.kind == GrammarKind.JSON_SCHEMA else special
        assert follow(matcher, compiler, text)


def test_a_vocabulary_that_cannot_spell_the_output_ends_with_an_error(byte_level):
    class Poor(type(byte_level)):
        def token_bytes(self, token_id: int) -> bytes:  # as if no token had a digit
            spelling = super().token_bytes(token_id)
            return b"" if any(chr(b).isdigit() for b in spelling) else spelling

    poor = Poor(byte_level._backend, eos_token_ids=byte_level.eos_token_ids)
    compiler = GrammarCompiler(poor, poor.vocab_size, poor.eos_token_ids)
    spec = StructuredOutput(GrammarKind.REGEX, "(a|b)[0-9]")
    grammar = compiler.compile(spec)
    matcher = grammar.matcher()
    assert follow(matcher, compiler, "a")
    assert allowed_by(matcher, compiler.vocab_size) is None
    assert "no token" in matcher.error
    assert not matcher.is_finished
    assert matcher.forced_tokens() == []
    assert not matcher.accept(poor.eos_token_ids[0])
    with pytest.raises(InvalidRequest, match="no token"):
        compiler.compile(StructuredOutput(GrammarKind.REGEX, "[0-9]"))


def test_a_limit_met_in_use_ends_that_output_and_the_grammar_is_compiled_anew(compiler):
    spec = StructuredOutput(GrammarKind.REGEX, "x?(a{1000}){1000}")
    grammar = compiler.compile(spec)
    matcher = grammar.matcher()
    while allowed_by(matcher, compiler.vocab_size) is not None:
        assert follow(matcher, compiler, "a") or matcher.error
    assert "too many" in matcher.error
    assert "\n" not in matcher.error
    assert not matcher.is_finished
    assert not matcher.accept(compiler._tokenizer.encode_plain("a")[-1])
    again = compiler.compile(spec)
    assert again is not grammar
    assert allowed_by(again.matcher(), compiler.vocab_size)


def test_grammars_are_kept_by_what_was_asked_and_the_oldest_goes_first(tokenizer):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [2], cache_size=2)
    a, b, c = (StructuredOutput.of_choice([text]) for text in "abc")
    first, second = compiler.compile(a), compiler.compile(b)
    assert compiler.compile(StructuredOutput.of_choice(["a"])) is first
    compiler.compile(c)  # b, not used since, goes
    assert compiler.compile(a) is first
    assert compiler.compile(b) is not second


def test_many_threads_compile_and_match_at_once(tokenizer):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [2])
    done = []

    def work(number: int) -> None:
        spec = StructuredOutput.of_choice([f"same {number % 2}", "other"])
        for _ in range(5):
            matcher = compiler.compile(spec).matcher()
            assert follow(matcher, compiler, f"same {number % 2}")
            assert matcher.is_finished
        done.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(8))
    assert threading.stack_size() == 0


def test_a_model_without_eos_is_refused(tokenizer):
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [])
    with pytest.raises(InvalidRequest, match="EOS"):
        compiler.compile(StructuredOutput(GrammarKind.JSON_OBJECT))
