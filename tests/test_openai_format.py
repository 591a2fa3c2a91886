"""OpenAI request bodies: every field is understood or refused by its name, none is passed over."""

from __future__ import annotations

import json

import pytest

from jserve.errors import InvalidRequest
from jserve.openai_format import Endpoint, parse_body
from jserve.sampling_params import SamplingParams
from jserve.structured import GrammarKind, StructuredOutput

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object"}


def read_chat(**fields):
    return parse_body(Endpoint.CHAT, CHAT | fields)


def read_text(**fields):
    return parse_body(Endpoint.COMPLETIONS, TEXT | fields)


FIELDS = [
    ("temperature", 0.5, 0.5),
    ("top_p", 0.5, 0.5),
    ("top_k", 5, 5),
    ("min_p", 0.1, 0.1),
    ("seed", 7, 7),
    ("max_tokens", 3, 3),
    ("stop", "x", ("x",)),
    ("stop_token_ids", [3], (3,)),
    ("ignore_eos", True, True),
    ("skip_special_tokens", False, False),
    ("include_stop_str", True, True),
    ("presence_penalty", 0.5, 0.5),
    ("frequency_penalty", -2, -2.0),
    ("repetition_penalty", 1.5, 1.5),
    ("logit_bias", {"5": -100, "0": 1}, ((5, -100.0), (0, 1.0))),
    ("allowed_token_ids", [1, 2], (1, 2)),
    ("bad_words", ["a", [1, 2]], ("a", (1, 2))),
    ("min_tokens", 2, 2),
    ("n", 3, 3),
    ("best_of", 2, 2),
    ("prompt_logprobs", 0, 0),
    ("guided_regex", "a+", StructuredOutput(GrammarKind.REGEX, "a+")),
]


@pytest.mark.parametrize("read", [read_chat, read_text])
@pytest.mark.parametrize(("name", "value", "wanted"), FIELDS)
def test_o32_each_sampling_field_reaches_its_place_and_null_is_absent(read, name, value, wanted):
    field = "structured" if name.startswith("guided") else name
    assert getattr(read(**{name: value}).request.sampling, field) == wanted
    absent = read(**{name: None}).request.sampling
    assert absent == read().request.sampling


def test_o32_no_sampling_field_is_without_a_name_in_a_body():
    listed = {name for name, _, _ in FIELDS} - {"guided_regex"}
    with_a_test_of_their_own = {"logprobs", "structured"}
    assert set(SamplingParams.__dataclass_fields__) == listed | with_a_test_of_their_own


@pytest.mark.parametrize(
    ("read", "fields", "names"),
    [
        (read_chat, {"best": 1}, "'best'"),
        (read_chat, {"stream": True}, "stream=True"),
        (read_chat, {"user": 1}, "user is of type int"),
        (read_chat, {"metadata": "u"}, "metadata is of type str"),
        (read_chat, {"store": True}, "store=True"),
        (read_chat, {"service_tier": "flex"}, "service_tier='flex'"),
        (read_chat, {"tools": [1]}, r"tools\[0\]"),
        (read_chat, {"tools": [{"function": 1}]}, r"tools\[0\]"),
        (read_chat, {"priority": 1.5}, "priority=1.5"),
        (read_text, {"timeout_s": "1"}, "timeout_s='1'"),
        (read_chat, {"prompt": "x"}, "'prompt'"),
        (read_chat, {"echo": True}, "'echo'"),
        (read_chat, {"parallel_tool_calls": 0}, "parallel_tool_calls=0"),
        (read_chat, {"functions": [TOOL]}, "'functions'"),
        (read_chat, {"tools": {"a": 1}}, "tools is not a list"),
        (read_chat, {"tool_choice": 1}, "tool_choice"),
        (read_chat, {"chat_template_kwargs": []}, "chat_template_kwargs"),
        (read_chat, {"continue_final_message": 1}, "continue_final_message=1"),
        (read_chat, {"add_generation_prompt": "no"}, "add_generation_prompt"),
        (
            read_chat,
            {"add_generation_prompt": True, "continue_final_message": True},
            "add_generation_prompt",
        ),
        (read_text, {"tools": [TOOL]}, "'tools'"),
        (read_text, {"suffix": "x"}, "'suffix'"),
        (read_text, {"echo": 1}, "echo=1"),
        (read_text, {"echo": True, "logprobs": 1, "prompt_logprobs": 1}, "prompt_logprobs"),
        (read_text, {"max_tokens": 0}, "max_tokens=0"),
        (read_text, {"n": 0}, "n=0"),
        (read_text, {"n": 3, "best_of": 2}, "best_of=2"),
        (read_text, {"n": True}, "n=True"),
        (read_text, {"return_token_ids": 1}, "return_token_ids=1"),
    ],
)
def test_o32_what_is_not_offered_is_refused_by_name(read, fields, names):
    with pytest.raises(InvalidRequest, match=names):
        read(**fields)


@pytest.mark.parametrize("read", [read_chat, read_text])
@pytest.mark.parametrize(
    ("alias", "name", "value"),
    [
        ("max_completion_tokens", "max_tokens", 3),
        ("include_stop_str_in_output", "include_stop_str", True),
        ("cache_salt", "tenant", "a"),
        ("timeout", "timeout_s", 1.5),
    ],
)
def test_o89_an_alias_has_the_same_effect_on_both_endpoints(read, alias, name, value):
    assert read(**{alias: value}) == read(**{name: value}) == read(**{alias: value, name: value})
    assert read(**{alias: value}) != read()
    with pytest.raises(InvalidRequest, match=f"{name} and {alias} differ"):
        read(**{alias: value, name: "other"})


@pytest.mark.parametrize("read", [read_chat, read_text])
def test_o89_labels_are_accepted_and_change_nothing(read):
    labels = {"user": "ann", "safety_identifier": "x", "prompt_cache_key": "y", "metadata": {}}
    nothing = {"store": False, "service_tier": "auto", "modalities": ["text"], "stream": False}
    assert read(**labels, **nothing) == read()


ADDED_BY_ROUTERS = {
    **{"no_stop_trim": False, "return_hidden_states": False, "separate_reasoning": True},
    **{"stream_reasoning": True, "include_reasoning": True},
}


@pytest.mark.parametrize("read", [read_chat, read_text])
def test_what_routers_add_to_each_body_is_accepted_with_its_default_only(read):
    """As sglang_router 0.3.2 and vllm_router 0.1.17 were seen to send them."""
    assert read(**ADDED_BY_ROUTERS) == read()
    for name, value in ADDED_BY_ROUTERS.items():
        with pytest.raises(InvalidRequest, match=name):
            read(**{name: not value})


def test_an_echo_alone_generates_the_one_token_that_it_must():
    call = read_text(max_tokens=0, echo=True)
    assert (call.is_echo_alone, call.request.sampling.max_tokens) == (True, 1)
    assert not read_text(max_tokens=1, echo=True).is_echo_alone
    with pytest.raises(InvalidRequest, match="max_tokens=False"):
        read_text(max_tokens=False, echo=True)


@pytest.mark.parametrize(
    "bias", [{"-1": 1}, {"abc": 1}, {"1.5": 1}, {"": 1}, {"07": 1}, {"²": 1}, {"9" * 5000: 1}]
)
def test_o30_a_bias_of_what_is_no_token_id_is_refused_by_name(bias):
    with pytest.raises(InvalidRequest, match=r"^logit_bias") as caught:
        read_chat(logit_bias=bias)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [1e9, -101, "1", True, None])
def test_o30_a_bias_out_of_range_is_refused_by_name(value):
    with pytest.raises(InvalidRequest, match="logit_bias"):
        read_text(logit_bias={"5": value})


def test_o34_logprobs_of_0_and_null_differ():
    assert read_text(logprobs=0).request.sampling.logprobs == 0
    assert read_text(logprobs=None).request.sampling.logprobs is None


def test_o35_chat_logprobs_is_a_switch_and_top_logprobs_a_count():
    assert read_chat(logprobs=True).request.sampling.logprobs == 0
    assert read_chat(logprobs=True, top_logprobs=3).request.sampling.logprobs == 3
    assert read_chat(logprobs=False).request.sampling.logprobs is None
    assert read_chat(logprobs=False, top_logprobs=0).request.sampling.logprobs is None  # as vLLM
    wrongs = ({"top_logprobs": 3}, {"top_logprobs": False}, {"logprobs": 3})
    for wrong in (*wrongs, {"logprobs": False, "top_logprobs": 3}):
        with pytest.raises(InvalidRequest, match="logprobs"):
            read_chat(**wrong)


@pytest.mark.parametrize("count", [2_000_000_000, 21, -1, 1.5])
def test_o37_a_number_of_alternatives_out_of_range_is_refused(count):
    for read, fields in (
        (read_chat, {"logprobs": True, "top_logprobs": count}),
        (read_text, {"logprobs": count}),
        (read_text, {"prompt_logprobs": count}),
    ):
        with pytest.raises(InvalidRequest, match=f"logprobs={count}"):
            read(**fields)


def test_o36_echo_with_logprobs_asks_for_those_of_the_prompt():
    call = read_text(echo=True, logprobs=2)
    assert call.echo
    assert call.request.sampling.prompt_logprobs == 2
    assert read_text(echo=True).request.sampling.prompt_logprobs is None


TAG = {"type": "structural_tag", "structures": [], "triggers": ["<"]}


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            "json_schema",
            json.dumps(SCHEMA),
        ),
        ({"response_format": TAG}, "structural_tag", json.dumps(TAG)),
        ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_choice": ["a", "b"]}, "choice", '["a", "b"]'),
        ({"guided_grammar": "start: /a/"}, "grammar", "start: /a/"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"regex": "a", "json": None}}, "regex", "a"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]'),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "grammar", "start: /a/"),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag", "{}"),
    ],
)
def test_every_name_of_a_form_becomes_the_same_structured_output(fields, kind, value):
    for read in (read_chat, read_text):
        assert read(**fields).request.sampling.structured == StructuredOutput(
            GrammarKind(kind), value
        )


def test_a_response_format_of_text_is_free_text():
    assert read_chat(response_format={"type": "text"}).request.sampling.structured is None


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"response_format": "json"}, "response_format.type=None"),
        ({"response_format": {"type": "xml"}}, "'xml'"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format has unknown .*'x'"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "'schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is not"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "schema"),
        ({"guided_json": 7}, "guided_json is not a JSON schema"),
        ({"guided_regex": ["a"]}, "guided_regex is not a text"),
        ({"guided_choice": "abc"}, "guided_choice is not a list of texts"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_whitespace_pattern": "x"}, "'guided_whitespace_pattern'"),
        ({"structured_outputs": {"json_object": False}}, "json_object is not true"),
        ({"structured_outputs": {"whitespace": "x"}}, "structured_outputs has unknown"),
        ({"structured_outputs": []}, "structured_outputs is not an object"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json and guided_regex"),
        (
            {"structured_outputs": {"regex": "a", "json": {}}},
            r"structured_outputs.regex and structured_outputs.json",
        ),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "each ask for a form"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_a_form_that_cannot_be_kept_is_refused_by_name(fields, names):
    with pytest.raises(InvalidRequest, match=names):
        read_chat(**fields)


def test_a_chat_hands_its_tools_and_template_arguments_on():
    turns = [
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "refusal": None},
        {"role": "tool", "content": "22", "tool_call_id": "1"},
    ]
    request = read_chat(
        messages=turns,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=True,
        chat_template_kwargs={"enable_thinking": False},
    ).request
    assert request.messages[0] == turns[0]
    assert request.messages[1] == {k: v for k, v in turns[1].items() if k != "refusal"}
    assert (request.tools, request.tool_choice) == ([TOOL], "required")
    assert request.template_args == {"enable_thinking": False}
    assert (request.add_generation_prompt, request.continue_final_message) == (True, False)


def test_a_continued_message_has_no_generation_prompt():
    request = read_chat(continue_final_message=True).request
    assert (request.add_generation_prompt, request.continue_final_message) == (False, True)
    assert not read_chat(add_generation_prompt=False).request.add_generation_prompt


def test_a_list_of_no_tools_asks_for_nothing():
    assert read_chat(tools=[]) == read_chat()
