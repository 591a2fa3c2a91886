"""Turns a chat into a prompt, and knows what the model's answer to it may hold: calls of tools and
reasoning. Knows one model's template: no queue, no sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jserve.errors import InvalidRequest
from jserve.messages import GenerateRequest
from jserve.structured import StructuredOutput
from jserve.text.chat import ChatTemplate, encode_chat
from jserve.text.output_formats import OutputFormats, detect_formats
from jserve.text.reasoning import starts_inside
from jserve.text.tokenizer import Tokenizer
from jserve.text.tool_calls import OutputParser, output_parser
from jserve.text.tool_grammar import tool_grammar


class ChatInput:
    """Chats with one model. Safe to call from any thread."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._template = template
        self._formats = detect_formats(template.source, tokenizer)

    def encode(self, message: GenerateRequest) -> list[int]:
        """Returns the prompt's token ids. Raises InvalidRequest, naming the field."""
        assert message.messages is not None, "this is for chats"
        return encode_chat(
            self._tokenizer,
            self._template,
            message.messages,
            tools=message.tools or None,
            add_generation_prompt=message.add_generation_prompt,
            continue_final_message=message.continue_final_message,
            template_args=message.template_args,
            max_tokens=self._max_model_len,
        )

    def form(self, message: GenerateRequest, prompt: Sequence[int]) -> StructuredOutput | None:
        """Returns the form that the output has to have: the caller's, or one in which a tool is
        called, where `tool_choice` says that one must be.

        Raises:
          InvalidRequest: both, a bad choice, or no chat to which it could belong.
        """
        asked = message.sampling.structured
        if message.messages is None:
            _check_no_chat(message)
            return asked
        call = tool_grammar(
            message.tools or None,
            message.tool_choice,
            self._formats,
            inside_reasoning=self._starts_inside(prompt),
        )
        if call is not None and asked is not None:
            raise InvalidRequest(
                f"tool_choice={message.tool_choice!r} and a structured output each ask for a form; "
                "give one of them"
            )
        return call or asked

    def kept_ids(self, message: GenerateRequest) -> frozenset[int]:
        """The special tokens whose text the output has to show, for the parser to see it."""
        if message.messages is None:
            return frozenset()
        reasoning = self._formats_of(message).reasoning or ()
        return frozenset(
            token_id
            for text, token_id in self._formats.special_ids
            if text in reasoning or _may_call(message)
        )

    def parser(self, message: GenerateRequest, prompt: Sequence[int]) -> OutputParser:
        """Returns what splits the text of one choice of the answer to `message`."""
        formats = self._formats_of(message)
        return output_parser(
            formats,
            tools=message.tools or None,
            tool_choice=message.tool_choice,
            inside_reasoning=formats.reasoning is not None and self._starts_inside(prompt),
        )

    def _formats_of(self, message: GenerateRequest) -> OutputFormats:
        """A form that the caller gives is that of the whole output: no reasoning precedes it."""
        if message.sampling.structured is None:
            return self._formats
        return replace(self._formats, reasoning=None)

    def _starts_inside(self, prompt: Sequence[int]) -> bool:
        return starts_inside(self._tokenizer, prompt, self._formats.reasoning)


def _may_call(message: GenerateRequest) -> bool:
    return bool(message.tools) and message.tool_choice != "none"


def _check_no_chat(message: GenerateRequest) -> None:
    """Refuses what a prompt without messages has no use for."""
    for name, is_given in (
        ("tools", bool(message.tools)),
        ("tool_choice", message.tool_choice not in ("auto", "none")),
        ("template_args", bool(message.template_args)),
        ("continue_final_message", message.continue_final_message),
        ("add_generation_prompt", not message.add_generation_prompt),
    ):
        if is_given:
            raise InvalidRequest(f"{name} is part of a chat; give messages, or leave it out")
