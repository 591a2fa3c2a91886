"""Grammars of tool calls: what they force can be parsed back, and nothing else fits them."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers

from jserve.errors import InvalidRequest
from jserve.structured import GrammarKind
from jserve.text.grammar import GrammarCompiler, Matcher
from jserve.text.output_formats import OutputFormats, ToolCallFormat
from jserve.text.tokenizer import Tokenizer
from jserve.text.tool_calls import output_parser
from jserve.text.tool_grammar import tool_grammar
from jserve.text.tools import MAX_TOOLS

HERMES, LLAMA3 = ToolCallFormat.HERMES, ToolCallFormat.LLAMA3
MISTRAL, MISTRAL_ARGS = ToolCallFormat.MISTRAL, ToolCallFormat.MISTRAL_ARGS
THINK = ("<think>", "</think>")
SPECIALS = ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]
SCHEMA = {
    "type": "object",
    "properties": {"description": {"$ref": "#/$defs/text"}, "n": {"type": "integer"}},
    "required": ["description"],
    "additionalProperties": False,
    "description": "x" * 2**15,
    "$defs": {"text": {"type": "string", "maxLength": 3}},
}


def function(name, schema=None, strict=None):
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


TOOLS = [function("f", SCHEMA), function("clock")]
STRICT = [function("f", SCHEMA, strict=True), function("clock")]
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def vocabulary(byte_level):
    """The tiny vocabulary with Mistral's markers as special tokens."""
    backend = tokenizers.Tokenizer.from_str(byte_level._backend.to_str())
    backend.add_special_tokens(SPECIALS)
    return Tokenizer(backend, eos_token_ids=byte_level.eos_token_ids)


@pytest.fixture(scope="module")
def compiler(vocabulary):
    return GrammarCompiler(vocabulary, vocabulary.vocab_size, vocabulary.eos_token_ids)


@pytest.fixture
def judge(vocabulary, compiler):
    """judge(tools, choice, format, text): whether the grammar takes `text` as a whole output."""

    def fits(tools, choice, format, text, reasoning=None, special=True, **options):
        ids = [(s, vocabulary.encode(s)[0]) for s in SPECIALS]
        formats = OutputFormats(format, reasoning, tuple(ids) if special else ())
        spec = tool_grammar(tools, choice, formats, **options)
        assert spec.kind == GrammarKind.LARK
        return accepts(compiler.compile(spec).matcher(), vocabulary, text)

    return fits


def accepts(matcher: Matcher, vocabulary: Tokenizer, text: str) -> bool:
    at, words = 0, np.zeros((vocabulary.vocab_size + 31) // 32, np.uint32)
    spans = [(start, end, id) for id, start, end in vocabulary.special_spans(text)]
    for start, end, id in [*spans, (len(text), len(text), None)]:
        rest = text[at:start].encode()
        while rest:  # by the longest token that is allowed
            matcher.fill(words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            spelled = {i: vocabulary.token_bytes(i) for i in map(int, allowed)}
            fitting = [i for i, data in spelled.items() if data and rest.startswith(data)]
            plain = [i for i in fitting if i not in vocabulary.special_token_ids]
            if not plain:
                return False
            best = max(plain, key=lambda i: len(spelled[i]))
            assert matcher.accept(best)
            rest = rest[len(spelled[best]) :]
        if id is not None and not matcher.accept(id):
            return False
        at = end
    return matcher.fill(words) and matcher.accept(vocabulary.eos_token_ids[0])


F = '{"name": "f", "arguments": {"description": "hi", "n": 3}}'
CLOCK = '{"name": "clock", "arguments": {}}'
CALLS = {
    HERMES: "<tool_call>\n" + F + "\n</tool_call>",
    LLAMA3: F.replace("arguments", "parameters"),
    MISTRAL: f"[TOOL_CALLS][{F}]",
    MISTRAL_ARGS: '[TOOL_CALLS]f[ARGS]{"description": "hi", "n": 3}',
}
SEVERAL = {
    HERMES: f"{CALLS[HERMES]}\n<tool_call>\n{CLOCK}\n</tool_call>",
    MISTRAL: f"[TOOL_CALLS] [{F}, {CLOCK}]",
    MISTRAL_ARGS: CALLS[MISTRAL_ARGS] + "[TOOL_CALLS]clock[ARGS]{}",
}


@pytest.mark.parametrize("format", CALLS)
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_has_the_models_own_format_and_parses_back(judge, format, choice):
    text = CALLS[format]
    assert judge(TOOLS, choice, format, text)
    assert not judge(TOOLS, choice, format, "Hello")
    assert not judge(TOOLS, choice, format, "")
    assert not judge(TOOLS, choice, format, text[:-1])
    assert not judge(TOOLS, choice, format, text.replace('"hi"', '"longer"'))
    assert not judge(TOOLS, choice, format, text.replace("f", "g"))
    parser = output_parser(OutputFormats(format), tools=TOOLS, tool_choice=choice)
    [call] = parser.feed(text).tool_calls
    assert (call.name, call.arguments) == ("f", '{"description": "hi", "n": 3}')
    assert parser.finish().content == ""
    assert parser.has_calls


@pytest.mark.parametrize("format", SEVERAL)
def test_required_allows_several_calls_and_a_named_function_one(judge, format):
    assert judge(TOOLS, "required", format, SEVERAL[format])
    assert not judge(TOOLS, NAMED, format, SEVERAL[format])
    parser = output_parser(OutputFormats(format), tools=TOOLS, tool_choice="required")
    names = [call.name for call in parser.feed(SEVERAL[format]).tool_calls]
    assert names == ["f", "clock"]


def test_a_named_function_is_no_other(judge):
    clock = CALLS[HERMES].replace(F, CLOCK)
    assert judge(TOOLS, "required", HERMES, clock)
    assert not judge(TOOLS, NAMED, HERMES, clock)


def test_markers_are_text_where_they_are_no_special_tokens(judge):
    assert not judge(TOOLS, "required", MISTRAL, CALLS[MISTRAL], special=False)
    assert judge(TOOLS, "required", HERMES, CALLS[HERMES], special=False)


@pytest.mark.parametrize(
    "reasoning", [THINK, ("[THINK]", "[/THINK]")], ids=["text markers", "special markers"]
)
@pytest.mark.parametrize("tools", [TOOLS, STRICT])
def test_reasoning_may_precede_calls_and_must_end_where_it_began(judge, reasoning, tools):
    start, end = reasoning
    choice = "required" if tools is TOOLS else "auto"
    options = {"reasoning": reasoning}
    text = f"Hm, <tool_call>.{end}\n\n" + CALLS[HERMES]
    assert judge(tools, choice, HERMES, start + text, **options)
    assert judge(tools, choice, HERMES, CALLS[HERMES], **options)
    assert judge(tools, choice, HERMES, text, inside_reasoning=True, **options)
    assert not judge(tools, choice, HERMES, "Hm", inside_reasoning=True, **options)


@pytest.mark.parametrize("format", CALLS)
def test_strict_functions_constrain_calls_and_leave_text_free(judge, format):
    text = CALLS[format]
    assert judge(STRICT, "auto", format, "Hello, a < b.\n")
    assert judge(STRICT, "auto", format, "")
    assert judge(STRICT, "auto", format, text)
    assert not judge(STRICT, "auto", format, text.replace('"hi"', '"longer"'))
    assert not judge(STRICT, "auto", format, text[:-3])
    if format != LLAMA3:
        assert judge(STRICT, None, format, f"I look. {text} {SEVERAL[format]} Done.")
        assert not judge(STRICT, None, format, "I look. " + text.replace("f", "g"))


@pytest.mark.parametrize(
    ("tools", "choice"), [(TOOLS, "auto"), (TOOLS, None), (STRICT, "none"), (None, "auto")]
)
def test_a_free_choice_needs_no_grammar(tools, choice):
    assert tool_grammar(tools, choice, OutputFormats()) is None


@pytest.mark.parametrize(
    ("tools", "choice", "formats", "fault"),
    [
        (None, "required", OutputFormats(HERMES), "tool_choice='required' needs tools"),
        (TOOLS, "always", OutputFormats(HERMES), "tool_choice='always' is not"),
        (TOOLS, {"type": "allowed_tools"}, OutputFormats(HERMES), "is not"),
        (TOOLS, {"function": {"name": "g"}}, OutputFormats(HERMES), "'g', which is not in tools"),
        (TOOLS, "required", OutputFormats(), "writes tool calls in a known form"),
        (STRICT, "auto", OutputFormats(), "writes tool calls in a known form"),
        (
            [function("f", {"not": {"pattern": "a"}}, strict=True)],
            "auto",
            OutputFormats(HERMES),
            "'not'",
        ),
    ],
)
def test_a_choice_that_cannot_be_kept_is_refused(tools, choice, formats, fault):
    with pytest.raises(InvalidRequest, match=fault):
        tool_grammar(tools, choice, formats)


def test_as_many_functions_as_may_be_offered_can_be_forced(judge):
    names = [f"argument_{i}" for i in range(10)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    tools = [function(f"do_this_and_that_{i}", schema) for i in range(MAX_TOOLS)]
    call = '<tool_call>\n{"name": "%s", "arguments": {"argument_0": "x"}}\n</tool_call>'
    assert judge(tools, "required", HERMES, call % "do_this_and_that_127")
    assert not judge(tools, "required", HERMES, call % "do_this_and_that_128")
    too_many = function("f", {"properties": {name * 300: {} for name in names}})
    with pytest.raises(InvalidRequest, match="offer fewer"):
        tool_grammar([too_many] * 6, "required", OutputFormats(HERMES))


def test_patterns_of_all_functions_count_together(judge):
    patterns = {"type": "object", "properties": {"a": {"pattern": "a" * 1000}}}
    tools = [function(f"f{i}", patterns) for i in range(5)]
    with pytest.raises(InvalidRequest, match="4096 characters in all"):
        judge(tools, "required", HERMES, "")


def test_a_strict_functions_schema_is_kept_where_it_is_written_in_other_words(judge):
    schema = SCHEMA | {"not": {"required": ["n"]}}
    tools = [function("f", schema, strict=True)]
    text = CALLS[HERMES]
    assert judge([function("f", SCHEMA, strict=True)], "auto", HERMES, text)
    assert not judge(tools, "auto", HERMES, text)


def test_words_of_a_schema_that_are_unknown_are_passed_over_unless_strict(judge):
    tools = [function("f", SCHEMA | {"unevaluatedProperties": False})]
    assert judge(tools, "required", HERMES, CALLS[HERMES])
