"""What a chat becomes before it is queued, and what its answer may hold."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jserve.engine.chat_input import ChatInput
from jserve.engine.input_processor import InputProcessor
from jserve.engine.prompt_input import ModelLimits
from jserve.errors import InvalidRequest
from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams
from jserve.structured import GrammarKind, StructuredOutput
from jserve.text.chat import ChatTemplate
from jserve.text.tokenizer import load_tokenizer
from tests.e2e.chain_model import write_chain_model

SPECIAL = ("[TOOL_CALLS]", "<think>", "</think>")
TEMPLATE = (
    "{% if tools %}[TOOLS]{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
    "{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}>{% if think %}<think>{% endif %}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add"}}]
REGEX = StructuredOutput(GrammarKind.REGEX, "a+")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_chain_model(folder, [("A", *SPECIAL)], special=SPECIAL)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def chat(tokenizer):
    return ChatInput(tokenizer, ChatTemplate(TEMPLATE), max_model_len=1000)


def asking(structured=None, **fields):
    messages = [{"role": "user", "content": "hi"}]
    sampling = SamplingParams(structured=structured)
    return GenerateRequest(**({"messages": messages, "sampling": sampling} | fields))


def form_of(chat, message):
    return chat.form(message, chat.encode(message) if message.messages else [1])


def joined(chat, message, text):
    parser = chat.parser(message, chat.encode(message))
    parts = (parser.feed(text), parser.finish())
    return (
        "".join(p.content for p in parts),
        "".join(p.reasoning for p in parts),
        [call.name for p in parts for call in p.tool_calls if call.name],
    )


def test_tools_template_arguments_and_a_message_to_go_on_with_reach_the_template(chat, tokenizer):
    def text_of(**fields):
        return tokenizer.decode(chat.encode(asking(**fields)), skip_special_tokens=False)

    assert text_of() == "user:hi;>"
    assert text_of(tools=TOOLS).startswith("[TOOLS][{")
    assert text_of(template_args={"think": True}) == "user:hi;><think>"
    assert text_of(continue_final_message=True, add_generation_prompt=False) == "user:hi"
    assert text_of(add_generation_prompt=False) == "user:hi;"
    assert text_of(tools=[]) == "user:hi;>"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_choice_that_forces_a_call_becomes_the_form_of_the_output(chat, choice):
    form = form_of(chat, asking(tools=TOOLS, tool_choice=choice))
    assert form.kind == GrammarKind.LARK
    assert "add" in form.value
    with pytest.raises(InvalidRequest, match=r"tool_choice=.* structured"):
        form_of(chat, asking(REGEX, tools=TOOLS, tool_choice=choice))


def test_a_choice_that_forces_nothing_leaves_the_caller_s_form(chat):
    for choice in ("auto", "none"):
        assert form_of(chat, asking(tools=TOOLS, tool_choice=choice)) is None
        assert form_of(chat, asking(REGEX, tools=TOOLS, tool_choice=choice)) is REGEX
        assert form_of(chat, asking(REGEX, tool_choice=choice)) is REGEX


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tool_choice": "required"}, "tool_choice='required' needs tools"),
        ({"tool_choice": "always", "tools": TOOLS}, "tool_choice='always'"),
        ({"tool_choice": {"function": {"name": "sub"}}, "tools": TOOLS}, "'sub'"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\]"),
        ({"template_args": {"style": 1}}, "chat_template_kwargs.style"),
    ],
)
def test_what_a_chat_cannot_have_is_refused_by_name(chat, fields, names):
    with pytest.raises(InvalidRequest, match=names):
        form_of(chat, asking(**fields))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", TOOLS),
        ("tool_choice", "required"),
        ("template_args", {"think": True}),
        ("continue_final_message", True),
        ("add_generation_prompt", False),
    ],
)
def test_o32_parts_of_a_chat_are_refused_with_a_prompt_of_another_kind(chat, name, value):
    for prompt in ({"prompt": "x"}, {"prompt_token_ids": [1]}):
        with pytest.raises(InvalidRequest, match=f"^{name} is part of a chat"):
            form_of(chat, asking(messages=None, **prompt, **{name: value}))


def test_markers_stay_in_the_text_only_where_the_answer_may_hold_them(chat, tokenizer):
    def kept(**fields):
        names = [tokenizer.token_bytes(i).decode() for i in chat.kept_ids(asking(**fields))]
        return sorted(names)

    reasoning = ["</think>", "<think>"]
    assert kept() == kept(tools=[]) == reasoning
    assert kept(tools=TOOLS) == [*reasoning, "[TOOL_CALLS]"]
    assert kept(tools=TOOLS, tool_choice="none") == reasoning
    assert kept(structured=REGEX) == []
    assert kept(messages=None, prompt="x") == []


def test_an_answer_is_split_as_its_request_and_prompt_say(chat):
    call = '[TOOL_CALLS][{"name": "add", "arguments": {}}]'
    assert joined(chat, asking(tools=TOOLS), call) == ("", "", ["add"])
    assert joined(chat, asking(), call) == (call, "", [])
    assert joined(chat, asking(), "<think>a</think>b") == ("b", "a", [])
    inside = asking(template_args={"think": True})
    assert joined(chat, inside, "a</think>b") == ("b", "a", [])


def test_a_form_that_the_caller_gives_is_the_form_of_the_whole_answer(chat):
    inside = asking(REGEX, template_args={"think": True})
    assert joined(chat, inside, "aaa") == ("aaa", "", [])


def test_a_prepared_chat_shows_its_markers_and_has_the_form_of_a_call(chat, tokenizer):
    limits = ModelLimits("tiny", 384, 4096, (1,))
    forms = []
    processor = InputProcessor(
        tokenizer,
        ChatTemplate(TEMPLATE),
        limits,
        lambda num_tokens: None,
        new_matcher=lambda form: forms.append(form) or SimpleNamespace(copy=object),
    )
    request = asking(tools=TOOLS, tool_choice="required")
    prepared = processor.prepare(request)
    assert forms == [form_of(chat, request)]
    (marker,) = tokenizer.encode("[TOOL_CALLS]")
    assert prepared.detokenizer.add((marker,)) == "[TOOL_CALLS]"
    plain = processor.prepare(GenerateRequest(prompt="x"))
    assert plain.detokenizer.add((marker,)) == ""


def test_min_tokens_that_do_not_fit_behind_the_prompt_are_refused(tokenizer):
    limits = ModelLimits("tiny", 384, 8, ())
    processor = InputProcessor(tokenizer, ChatTemplate(None), limits, lambda num_tokens: None)
    for max_tokens in (None, 5):
        sampling = SamplingParams(min_tokens=5, max_tokens=max_tokens)
        processor.prepare(GenerateRequest(prompt="abc", sampling=sampling))
    sampling = SamplingParams(min_tokens=6, max_tokens=None)
    with pytest.raises(InvalidRequest, match="min_tokens=6 is above the 5 tokens"):
        processor.prepare(GenerateRequest(prompt="abc", sampling=sampling))
