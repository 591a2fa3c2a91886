"""The events that updates make, of updates written down here."""

from __future__ import annotations

import json

import pytest

from jserve.messages import RequestUpdate, TokenLogprobs, Usage
from jserve.openai_format import Endpoint
from jserve.openai_http import read_http_body
from jserve.openai_stream import ChunkWriter
from jserve.text.output_formats import OutputFormats, ToolCallFormat
from jserve.text.tool_calls import output_parser
from tests.fake_engine import FakeTokenizer

TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
USAGE = Usage(2, 3, 0)


def new_parser(request, prompt_ids):
    formats = OutputFormats(ToolCallFormat.HERMES, None)
    return output_parser(formats, tools=request.tools, tool_choice=request.tool_choice)


def writer_of(endpoint=Endpoint.COMPLETIONS, **fields) -> ChunkWriter:
    needed = {"prompt": "ab"}
    if endpoint == Endpoint.CHAT:
        needed = {"messages": [{"role": "user", "content": "x"}]}
    body = read_http_body(endpoint, {**needed, "stream": True, **fields})
    return ChunkWriter(
        body,
        body.requests[0],
        head={"id": "r"},
        tokenizer=FakeTokenizer(),
        new_parser=new_parser,
    )


def choices_of(text: str) -> list[dict]:
    events = [json.loads(e.removeprefix("data: ")) for e in text.split("\n\n") if e]
    return [choice for event in events for choice in event["choices"]]


def update(index=0, text="", ids=(), prompt=(), **fields) -> RequestUpdate:
    entries = tuple(TokenLogprobs(i, -1.0, ()) for i in ids)
    return RequestUpdate(
        request_id="r",
        index=index,
        text=text,
        token_ids=tuple(ids),
        logprobs=entries,
        prompt_token_ids=prompt,
        **fields,
    )


@pytest.mark.parametrize("parallel", [True, False])
def test_without_parallel_calls_only_the_first_one_is_streamed(parallel):
    writer = writer_of(Endpoint.CHAT, tools=TOOLS, parallel_tool_calls=parallel)
    text = writer.take(update(text=CALL[:30], prompt=(1, 2)))
    text += writer.take(update(text=CALL[30:] + CALL, finish_reason="stop", usage=USAGE))
    choices = choices_of(text)
    pieces = [p for c in choices for p in c["delta"].get("tool_calls", ())]
    assert {piece["index"] for piece in pieces} == ({0, 1} if parallel else {0})
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_an_echoing_choice_waits_for_the_prompts_logprobs_which_come_with_the_first_one():
    writer = writer_of(echo=True, logprobs=0, n=2)
    assert writer.take(update(1, "x", [120], (97, 98))) == ""
    first = update(0, "y", [121], (97, 98), prompt_logprobs=(None, TokenLogprobs(98, -2.0, ())))
    choices = choices_of(writer.take(first))
    assert [c["index"] for c in choices] == [0, 0, 1, 1]
    assert [c["text"] for c in choices] == ["ab", "y", "ab", "x"]
    assert choices[2]["logprobs"]["token_logprobs"] == [None, -2.0]
    assert choices[3]["logprobs"]["text_offset"] == [2]


def test_tokens_whose_text_is_held_back_come_with_the_text_and_none_is_lost():
    writer = writer_of(logprobs=0)
    assert writer.take(update(ids=[97], prompt=(1, 2))) == ""
    [one] = choices_of(writer.take(update(text="ab", ids=[98])))
    assert one["logprobs"]["tokens"] == ["a", "b"]
    assert one["logprobs"]["text_offset"] == [0, 1]


def test_o36_no_offset_lies_beyond_a_text_that_a_stop_string_cut():
    writer = writer_of(logprobs=0, stop="cd")
    events = writer.take(update(text="a", ids=[97], prompt=(1, 2)))
    events += writer.take(update(ids=[99]))
    events += writer.take(update(ids=[100], finish_reason="stop", stop_reason="cd", usage=USAGE))
    last = choices_of(events)[-1]
    assert last["logprobs"]["text_offset"] == [1, 1]
    assert (last["text"], last["stop_reason"]) == ("", "cd")


def test_text_of_any_kind_is_one_line_of_ascii():
    [choice] = choices_of(text := writer_of().take(update(text="a\r\n\u2028é😀", prompt=(1,))))
    assert text.isascii()
    assert len(text.splitlines()) == 2
    assert choice["text"] == "a\r\n\u2028é😀"
