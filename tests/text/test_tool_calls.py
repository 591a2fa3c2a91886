"""Calls, content and reasoning are told apart in every format, at once, however the text is cut."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jserve.text.output_formats import OutputFormats, ToolCallFormat
from jserve.text.tool_calls import output_parser

FIXED = settings(deadline=None, derandomize=True, max_examples=400)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "get_weather")]
HERMES, LLAMA3 = ToolCallFormat.HERMES, ToolCallFormat.LLAMA3
MISTRAL, MISTRAL_ARGS = ToolCallFormat.MISTRAL, ToolCallFormat.MISTRAL_ARGS
THINK = ("<think>", "</think>")

ARGS = '{"a": "}\\"</tool_call>", "b": [1.5e3, null]}'
F = ("f", ARGS)
WEATHER = ("get_weather", '{"city":"Zürich"}')


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name, arguments):
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def deltas_of(pieces, format, tool_choice="auto", **options):
    formats = OutputFormats(format, options.pop("reasoning", None))
    parser = output_parser(formats, tools=TOOLS, tool_choice=tool_choice, **options)
    return [*map(parser.feed, pieces), parser.finish()], parser


def parse(pieces, format, **options):
    """(content, reasoning, [(name, arguments)], has_calls), and O69 on the way."""
    deltas, parser = deltas_of(pieces, format, **options)
    names, arguments = {}, {}
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        is_first = piece.index not in names
        assert (piece.id is not None, piece.name is not None) == (is_first, is_first)
        if is_first:
            assert piece.index == len(names)
            names[piece.index], arguments[piece.index] = piece.name, ""
        arguments[piece.index] += piece.arguments
    content = "".join(delta.content for delta in deltas)
    reasoning = "".join(delta.reasoning for delta in deltas)
    calls = [(name, arguments[index]) for index, name in names.items()]
    return content, reasoning, calls, parser.has_calls


CASES = [
    (HERMES, hermes(*F), "", [F]),
    (HERMES, "I look.\n" + hermes(*F) + "\n" + hermes(*WEATHER) + "\n", "I look.", [F, WEATHER]),
    (HERMES, hermes(*F) + " done ", " done ", [F]),
    (HERMES, '<tool_call>{"name": "f"}', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "f"}', "", [("f", '{"x": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}', "", [("f", '{"x": 1}')]),
    (HERMES, "<tool_call>" + hermes(*F), "<tool_call>", [F]),
    (LLAMA3, llama(*F), "", [F]),
    (LLAMA3, "\n<|python_tag|>" + llama(*F), "", [F]),
    (LLAMA3, llama(*F) + "; " + llama(*WEATHER) + ";" + llama(*F), "", [F, WEATHER, F]),
    (LLAMA3, llama(*F) + "\n" + llama(*WEATHER), "", [F, WEATHER]),
    (LLAMA3, '{"type": "function", ' + llama(*F)[1:], "", [F]),
    (LLAMA3, "I look. <|python_tag|>" + llama(*F), "I look.", [F]),
    (MISTRAL, f"[TOOL_CALLS][{llama(*F)}, {llama(*WEATHER)}]", "", [F, WEATHER]),
    (MISTRAL, f"I look. [TOOL_CALLS] [{llama(*F)}]", "I look.", [F]),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "a"}]', "", [("f", "{}")]),
    (MISTRAL_ARGS, f"[TOOL_CALLS]f[ARGS]{ARGS}", "", [F]),
    (
        MISTRAL_ARGS,
        f"[TOOL_CALLS]f{ARGS}[TOOL_CALLS]get_weather[ARGS]" + '{"city":"Zürich"}',
        "",
        [F, WEATHER],
    ),
    (MISTRAL_ARGS, f"I look.[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{ARGS}", "I look.", [F]),
]


@pytest.mark.parametrize(("format", "text", "content", "calls"), CASES)
def test_calls_and_content_by_hand(format, text, content, calls):
    expected = (content, "", calls, True)
    assert parse([text], format) == expected
    assert parse(text, format) == expected


NO_CALLS = [
    (HERMES, "Use <tool_call> tags. a < b"),
    (HERMES, hermes("unknown", "{}") + "\n"),
    (HERMES, hermes("f", "{'a': 1}")),
    (HERMES, hermes("f", "[1]")),
    (HERMES, "<tool_call>{not json}</tool_call>"),
    (HERMES, "ends in a marker <tool_ca"),
    (LLAMA3, '{"answer": 42}'),
    (LLAMA3, 'Like {"name": "f", "parameters": {}}'),
    (LLAMA3, "<|python_tag|>print(1)"),
    (LLAMA3, llama("unknown", "{}")),
    (MISTRAL, "[TOOL_CALLS] [oops]"),
    (MISTRAL, "[TOOL_CALLS]"),
    (MISTRAL, "[TOOL] x"),
    (MISTRAL_ARGS, "[TOOL_CALLS]unknown[ARGS]{}"),
    (MISTRAL_ARGS, "[TOOL_CALLS]f or " + "g" * 1000 + "{}"),
    (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS] "),
    (None, hermes(*F)),
]


@pytest.mark.parametrize(("format", "text"), NO_CALLS)
def test_what_is_no_call_of_an_offered_function_is_content_as_it_stands(format, text):
    assert parse([text], format) == (text, "", [], False)
    assert parse(text, format) == (text, "", [], False)


def test_arguments_that_are_no_unicode_are_content_and_escapes_in_them_stay():
    text = r'<tool_call>{"name": "f", "arguments": "{\"x\": \"\ud800\"}"}</tool_call>'
    assert parse(text, HERMES) == (text, "", [], False)
    arguments = r'{"x": "\ud800"}'
    assert parse(hermes("f", arguments), HERMES) == ("", "", [("f", arguments)], True)


def test_a_call_after_one_that_was_none_is_still_found():
    text = hermes("unknown", "{}") + hermes(*F)
    assert parse(text, HERMES) == (hermes("unknown", "{}"), "", [F], True)


def test_json_that_breaks_within_the_arguments_ends_the_call_there():
    text = '<tool_call>{"name": "f", "arguments": {"a": 1 2}}'
    assert parse(text, HERMES) == ("2}}", "", [("f", '{"a": 1 ')], False)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, hermes(*F)),
        (LLAMA3, llama(*F)),
        (MISTRAL, f"[TOOL_CALLS][{llama(*F)}]"),
        (MISTRAL_ARGS, f"[TOOL_CALLS]f[ARGS]{ARGS}"),
    ],
)
def test_O67_a_call_cut_anywhere_is_no_complete_call(format, text):
    whole = text.rindex("}") + 1
    for end in range(len(text) + 1):
        content, _, calls, has_calls = parse(text[:end], format)
        assert has_calls == (end >= whole)
        assert bool(content) != bool(calls) or end == 0  # not lost, and not in both
        assert all(ARGS.startswith(arguments) for _, arguments in calls)


def test_O67_a_complete_call_and_a_cut_one_are_cut():
    text = hermes(*F) + hermes(*WEATHER)
    cut = text[: text.rindex('"city"')]
    assert parse(cut, HERMES)[3] is False
    assert parse(text, HERMES)[3] is True


@pytest.mark.parametrize(("format", "text"), [case[:2] for case in CASES])
def test_O68_tool_choice_none_and_no_tools_give_content_only(format, text):
    assert parse(text, format, tool_choice="none") == (text, "", [], False)
    parser = output_parser(OutputFormats(format))
    deltas = [*map(parser.feed, text), parser.finish()]
    assert "".join(delta.content for delta in deltas) == text
    assert not any(delta.tool_calls for delta in deltas)
    assert not parser.has_calls


def test_O68_reasoning_is_split_off_without_tools_too():
    text = "<think>x</think>" + hermes(*F)
    expected = (hermes(*F), "x", [], False)
    assert parse(text, HERMES, tool_choice="none", reasoning=THINK) == expected


@pytest.mark.parametrize(
    ("format", "pattern"), [(HERMES, "call_[A-Za-z0-9]{24}"), (MISTRAL, "[A-Za-z0-9]{9}")]
)
def test_O69_ids_are_of_the_form_that_the_models_template_takes(format, pattern):
    text = {HERMES: hermes(*F) * 2, MISTRAL: f"[TOOL_CALLS][{llama(*F)},{llama(*F)}]"}[format]
    deltas, _ = deltas_of(text, format)
    ids = [piece.id for delta in deltas for piece in delta.tool_calls if piece.id]
    assert len(set(ids)) == 2
    assert all(re.fullmatch(pattern, id) for id in ids)


def test_O69_arguments_come_piece_by_piece_as_the_model_writes_them():
    deltas, _ = deltas_of(['<tool_call>{"name": "f", "arguments": {"a', '": 1', "}}"], HERMES)
    pieces = [delta.tool_calls for delta in deltas]
    assert [[(p.index, p.name, p.arguments) for p in piece] for piece in pieces] == [
        [(0, "f", '{"a')],
        [(0, None, '": 1')],
        [(0, None, "}")],
        [],
    ]


def test_content_is_given_out_at_once_but_for_what_may_begin_a_call():
    deltas, _ = deltas_of(["Hello wor", "ld \n<", "b> <tool_", "box"], HERMES)
    contents = [delta.content for delta in deltas]
    assert contents == ["Hello wor", "ld", " \n<b>", " <tool_box", ""]


def test_reasoning_may_speak_of_calls():
    text = "<think>\nI could <tool_call>{\n</think>\n\n" + hermes(*F)
    expected = ("", "I could <tool_call>{", [F], True)
    assert parse(text, HERMES, reasoning=THINK) == expected
    inside = parse(text.removeprefix("<think>"), HERMES, reasoning=THINK, inside_reasoning=True)
    assert inside == expected


WORDS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", *THINK),
    *('{"name": "f", "arguments": {"a": 1}}', '{"name": "f"', '"parameters": ', '{"x": [', "}"),
    *("f", "get_weather", "{", "[", "]", ",", ";", '"', "\\", " ", "\n", "<", "1", "tool", ": "),
]


@FIXED
@given(
    st.sampled_from(list(ToolCallFormat)),
    st.lists(st.sampled_from(WORDS), max_size=25),
    st.lists(st.integers(1, 9), max_size=30),
    st.sampled_from([None, THINK]),
    st.booleans(),
)
def test_however_the_text_is_cut_the_result_is_the_same(format, words, sizes, reasoning, inside):
    text = "".join(words)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    options = {"reasoning": reasoning, "inside_reasoning": inside}
    whole = parse([text], format, **options)
    assert parse([*pieces, text[at:]], format, **options) == whole
    assert parse(text, format, **options) == whole
    assert reasoning or whole[2] or whole[0] == text  # without calls nothing is lost


@FIXED
@given(
    st.sampled_from([HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS]),
    st.lists(
        st.tuples(
            st.sampled_from(["f", "get_weather"]),
            st.dictionaries(st.text(max_size=5), st.text(max_size=9) | st.integers(), max_size=3),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_whatever_arguments_are_written_come_back(format, calls):
    written = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    text = {
        HERMES: "\n".join(hermes(*call) for call in written),
        LLAMA3: "; ".join(llama(*call) for call in written),
        MISTRAL: f"[TOOL_CALLS][{', '.join(llama(*call) for call in written)}]",
        MISTRAL_ARGS: "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in written),
    }[format]
    assert parse(text, format) == ("", "", written, True)


@pytest.mark.parametrize("text", ["<tool_call>" * 5000, '<tool_call>{"a' * 5000, "\n" * 50_000])
def test_text_full_of_beginnings_is_content(text):
    assert parse([text], HERMES) == (text, "", [], False)
