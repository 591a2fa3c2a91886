"""OpenAI response bodies, of outputs written down here."""

from __future__ import annotations

import pytest

from jserve.messages import TokenLogprobs, Usage
from jserve.offline import CompletionOutput, RequestOutput
from jserve.openai_format import Endpoint, parse_body
from jserve.openai_response import response_body
from jserve.text.output_formats import OutputFormats, ToolCallFormat
from jserve.text.tokenizer import load_tokenizer
from jserve.text.tool_calls import output_parser
from tests.e2e.chain_model import write_chain_model

END_OF_TURN = "<|im_end|>"
CHAT, COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A token for each byte, and the special END_OF_TURN."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_chain_model(folder, [("A", END_OF_TURN)], special=[END_OF_TURN])
    return load_tokenizer(folder)


def logprobs_of(ids, count=0):
    top = tuple((100 + i, -0.5 - i) for i in range(count))
    return [TokenLogprobs(token_id, -1.5, top, 7) for token_id in ids]


def output_of(texts_and_ids, prompt=None, prompt_ids=(1, 2), count=None, prompt_count=None):
    """One choice for each (text, token ids); log-probabilities with `count` alternatives."""
    return RequestOutput(
        request_id="r",
        prompt=prompt,
        prompt_token_ids=list(prompt_ids),
        outputs=[
            CompletionOutput(
                index=i,
                text=text,
                token_ids=list(ids),
                finish_reason="stop" if i else "length",
                stop_reason=None,
                logprobs=None if count is None else logprobs_of(ids, count),
            )
            for i, (text, ids) in enumerate(texts_and_ids)
        ],
        prompt_logprobs=None
        if prompt_count is None
        else [None, *logprobs_of(list(prompt_ids)[1:], prompt_count)],
        usage=Usage(len(prompt_ids), sum(len(ids) for _, ids in texts_and_ids), 1),
        metrics=None,
    )


def new_parser(request, prompt_ids):
    formats = OutputFormats(ToolCallFormat.HERMES, ("<think>", "</think>"))
    return output_parser(formats, tools=request.tools, tool_choice=request.tool_choice)


def body_of(endpoint, output, tokenizer, **fields):
    prompt = {"messages": [{"role": "user", "content": "x"}]} if endpoint == CHAT else {}
    prompt = prompt or {"prompt": "x"}
    call = parse_body(endpoint, prompt | fields)
    return response_body(
        call, output, model="m", created=5, tokenizer=tokenizer, new_parser=new_parser
    )


@pytest.mark.parametrize(("endpoint", "key"), [(CHAT, "message"), (COMPLETIONS, "text")])
def test_o31_every_choice_is_there_and_usage_counts_the_prompt_once(tokenizer, endpoint, key):
    output = output_of([("ab", [97, 98]), ("c", [99]), ("", [])])
    body = body_of(endpoint, output, tokenizer, n=3)
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert [c["finish_reason"] for c in body["choices"]] == ["length", "stop", "stop"]
    texts = [c[key]["content"] if key == "message" else c[key] for c in body["choices"]]
    assert texts == ["ab", "c", ""]
    usage = {name: body["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")}
    assert usage == {"prompt": 2, "completion": 3, "total": 5}
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_o34_logprobs_of_0_has_an_entry_per_token_and_no_alternatives(tokenizer):
    (choice,) = body_of(COMPLETIONS, output_of([("ab", [97, 98])], count=0), tokenizer, logprobs=0)[
        "choices"
    ]
    assert choice["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-1.5, -1.5],
        "top_logprobs": [{}, {}],
        "text_offset": [0, 1],
    }
    (choice,) = body_of(COMPLETIONS, output_of([("ab", [97, 98])]), tokenizer)["choices"]
    assert choice["logprobs"] is None


def test_o35_chat_logprobs_have_token_bytes_and_an_empty_list_of_alternatives(tokenizer):
    (choice,) = body_of(CHAT, output_of([("a", [97, 0xF0])], count=0), tokenizer, logprobs=True)[
        "choices"
    ]
    assert choice["logprobs"]["content"] == [
        {"token": "a", "logprob": -1.5, "bytes": [97], "top_logprobs": []},
        {"token": "bytes:\\xf0", "logprob": -1.5, "bytes": [0xF0], "top_logprobs": []},
    ]


def test_o36_echoed_tokens_join_to_the_text_and_offsets_are_the_sums_of_lengths(tokenizer):
    output = output_of([(" yes", b" yes")], "Is ABC", b"Is ABC", 1, 1)
    fields = {"echo": True, "logprobs": 1, "prompt": "Is ABC"}
    (choice,) = body_of(COMPLETIONS, output, tokenizer, **fields)["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "".join(logprobs["tokens"]) == "Is ABC yes"
    lengths = [len(token) for token in logprobs["tokens"]]
    assert logprobs["text_offset"] == [sum(lengths[:i]) for i in range(len(lengths))]
    assert logprobs["token_logprobs"] == [None] + [-1.5] * 9
    assert logprobs["top_logprobs"][:2] == [None, {"d": -0.5}]
    assert len({len(column) for column in logprobs.values()}) == 1


def test_o36_offsets_hold_for_split_characters_and_tokens_that_are_not_shown(tokenizer):
    (end,) = tokenizer.special_token_ids
    emoji = "😀".encode()
    prompt_ids = [end, *emoji[:2]]  # the output completes what the prompt began
    output = output_of([("😀b", [*emoji[2:], end, 98])], None, prompt_ids, 0, 0)
    fields = {"echo": True, "logprobs": 0, "prompt": prompt_ids}
    (choice,) = body_of(COMPLETIONS, output, tokenizer, **fields)["choices"]
    shown = len(choice["text"]) - 2  # what stands for the beginning of a character
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, shown, shown, shown + 1, shown + 1]


def test_o36_a_special_token_that_the_prompt_s_text_spells_takes_its_room(tokenizer):
    ids = tokenizer.encode(f"a{END_OF_TURN}b")
    output = output_of([("c", [99])], f"a{END_OF_TURN}b", ids, 0, 0)
    fields = {"echo": True, "logprobs": 0, "prompt": output.prompt}
    (choice,) = body_of(COMPLETIONS, output, tokenizer, **fields)["choices"]
    assert choice["text"] == f"a{END_OF_TURN}bc"
    end = 1 + len(END_OF_TURN)
    assert choice["logprobs"]["text_offset"] == [0, 1, end, end + 1]


def test_echo_puts_the_prompt_before_every_choice_and_alone_gives_no_logprobs(tokenizer):
    output = output_of([("b", [98]), ("c", [99])], "a", [97])
    body = body_of(COMPLETIONS, output, tokenizer, echo=True, n=2, prompt="a")
    assert [(c["text"], c["logprobs"]) for c in body["choices"]] == [("ab", None), ("ac", None)]
    ids_only = output_of([("b", [98])], None, [97])
    body = body_of(COMPLETIONS, ids_only, tokenizer, echo=True, prompt=[97])
    assert body["choices"][0]["text"] == "ab"


def test_a_text_offset_never_lies_beyond_a_text_that_a_stop_string_cut(tokenizer):
    output = output_of([("a", b"abcd")], count=0)
    (choice,) = body_of(COMPLETIONS, output, tokenizer, logprobs=0)["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1]


@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_o33_prompt_logprobs_are_one_entry_per_prompt_token_the_first_none(tokenizer, endpoint):
    output = output_of([("c", [99])], None, [97, 98], prompt_count=2)
    body = body_of(endpoint, output, tokenizer, prompt_logprobs=2)
    assert body["prompt_logprobs"] == [
        None,
        {
            "100": {"logprob": -0.5, "rank": 1, "decoded_token": "d"},
            "101": {"logprob": -1.5, "rank": 2, "decoded_token": "e"},
            "98": {"logprob": -1.5, "rank": 7, "decoded_token": "b"},
        },
    ]
    assert "prompt_logprobs" not in body_of(endpoint, output_of([("c", [99])]), tokenizer)


def test_token_ids_come_only_where_they_are_asked_for(tokenizer):
    output = output_of([("c", [99])])
    body = body_of(COMPLETIONS, output, tokenizer, return_token_ids=True)
    assert (body["prompt_token_ids"], body["choices"][0]["token_ids"]) == ([1, 2], [99])
    body = body_of(COMPLETIONS, output, tokenizer)
    assert "prompt_token_ids" not in body
    assert "token_ids" not in body["choices"][0]


TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def chat_choices(tokenizer, *texts, **fields):
    output = output_of([(text, []) for text in texts])
    return body_of(CHAT, output, tokenizer, tools=TOOLS, **fields)["choices"]


def test_o69_calls_of_tools_are_parsed_choice_by_choice(tokenizer):
    _, one, two = chat_choices(tokenizer, "no", CALL, f"Two:{CALL}{CALL}", n=3)
    assert one["finish_reason"] == two["finish_reason"] == "tool_calls"
    assert one["message"]["content"] is None
    assert two["message"]["content"] == "Two:"
    calls = one["message"]["tool_calls"] + two["message"]["tool_calls"]
    assert [call["type"] for call in calls] == ["function"] * 3
    assert [call["function"] for call in calls] == [{"name": "add", "arguments": '{"a": 1}'}] * 3
    assert len({call["id"] for call in calls}) == 3
    assert all(call["id"] for call in calls)


def test_o67_a_call_cut_by_the_limit_keeps_the_finish_reason_length(tokenizer):
    for end in range(len(CALL)):
        (choice,) = chat_choices(tokenizer, CALL[:end])  # choice 0 ends with "length"
        assert choice["finish_reason"] == "length"


def test_o68_without_a_choice_of_tools_a_call_is_content(tokenizer):
    _, choice = chat_choices(tokenizer, "", CALL, n=2, tool_choice="none")
    assert choice["message"] == {"role": "assistant", "content": CALL}
    assert choice["finish_reason"] == "stop"


def test_reasoning_is_split_off_where_there_is_some(tokenizer):
    thinking, not_thinking = chat_choices(tokenizer, "<think>\nhm\n</think>\n\nyes", "yes", n=2)
    wanted = {"role": "assistant", "content": "yes"}
    assert thinking["message"] == wanted | {"reasoning_content": "hm"}
    assert not_thinking["message"] == wanted


def test_what_a_model_wrote_is_a_chat_again(tokenizer):
    (choice,) = chat_choices(tokenizer, CALL)
    turns = [choice["message"], {"role": "tool", "tool_call_id": "1", "content": "2"}]
    parse_body(CHAT, {"messages": turns, "tools": TOOLS})
