"""Shapes updates as the server-sent events of OpenAI's streams. Knows field names and shapes: no
transport, no engine.

Sources: the OpenAI API reference, "chat.completion.chunk" objects; the HTML standard, "Server-sent
events".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jserve.json_pieces import pieces
from jserve.messages import GenerateRequest, RequestUpdate, TokenLogprobs, Usage
from jserve.openai_format import Endpoint
from jserve.openai_http import HttpBody
from jserve.openai_logprobs import TextOffsets, chat_logprobs, columns, prompt_logprobs
from jserve.openai_response import NewParser, echoed_columns, prompt_text, usage_body
from jserve.text.tokenizer import Tokenizer
from jserve.text.tool_calls import OutputDelta, OutputParser

DONE = "data: [DONE]\n\n"
# ASCII: some clients take other Unicode line separators for the end of an event.
encode = json.JSONEncoder(separators=(",", ":")).encode


def _in_pieces(value: Any) -> str:
    return "".join(pieces(value, encode))


def event(fields: Mapping[str, Any]) -> str:
    return f"data: {encode(fields)}\n\n"


def usage_event(body: HttpBody, head: Mapping[str, Any], usage: Usage) -> str:
    """Returns the last chunk of a stream that was asked to include its usage."""
    return event({**head, "choices": [], "usage": usage_body(body.call, usage)})


@dataclass(slots=True)
class _Choice:
    """One choice so far: what splits or places its text, and what waits for more of it."""

    parser: OutputParser | None
    offsets: TextOffsets | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_tokens: int = 0


class ChunkWriter:
    """Turns the updates of one request into the events of its choices.

    An update without text waits for the next one with some, unless token ids are asked for.

    Args:
      head: the fields that all chunks of the stream begin with.
      first_index: of the request's choices, in a stream of several prompts.
    """

    def __init__(
        self,
        body: HttpBody,
        request: GenerateRequest,
        *,
        head: Mapping[str, Any],
        first_index: int = 0,
        tokenizer: Tokenizer,
        new_parser: NewParser,
    ) -> None:
        self._body, self._call, self._request = body, body.call, request
        self._is_chat = body.call.endpoint == Endpoint.CHAT
        self._wants_logprobs = request.sampling.logprobs is not None
        self._wants_ids = body.call.return_token_ids
        self._head = f'data: {encode(head)[:-1]},"choices":['
        self._first_index = first_index
        self._tokenizer = tokenizer
        self._new_parser = new_parser
        self._choices: dict[int, _Choice] = {}
        self._early: list[RequestUpdate] = []  # they need what comes with those of choice 0
        self._prompt_ids: Sequence[int] = ()
        self._prompt_logprobs: Sequence[TokenLogprobs | None] = ()
        self._usages: list[Usage] = []

    @property
    def usage(self) -> Usage:
        """That of the request, once it has ended."""
        return Usage.of_choices(self._usages)

    def takes_long(self, update: RequestUpdate) -> bool:
        """Whether an update holds, or repeats, the log-probabilities of a whole prompt."""
        begins = update.index not in self._choices
        return begins and self._request.sampling.prompt_logprobs is not None

    def take(self, update: RequestUpdate) -> str:
        """Returns the events that an update makes, none or several, as one text."""
        choice, events = self._choices.get(update.index), ""
        if choice is None:
            if self.takes_long(update) and update.index and 0 not in self._choices:
                self._early.append(update)
                return ""
            choice, events = self._begin(update)
        choice.num_tokens += len(update.token_ids)
        if update.usage is not None:
            self._usages.append(update.usage)
        if not self._call.is_echo_alone:
            if self._wants_ids or self._wants_logprobs:
                choice.token_ids += update.token_ids
                choice.logprobs += update.logprobs
            add = self._chat_events if self._is_chat else self._text_events
            events += add(choice, update)
        elif update.finish_reason is not None:
            events += self._chunk(update, choice, text="", logprobs=None, finish_reason="length")
        if self._early and update.index == 0:
            early, self._early = self._early, []
            events += "".join(map(self.take, early))
        return events

    def _begin(self, update: RequestUpdate) -> tuple[_Choice, str]:
        """A new choice, and the events that open it."""
        if update.prompt_token_ids:
            self._prompt_ids = update.prompt_token_ids
        if update.index == 0:
            self._prompt_logprobs = update.prompt_logprobs
        choice = self._choices[update.index] = _Choice(None, None)
        if self._is_chat:
            choice.parser = self._new_parser(self._request, self._prompt_ids)
            delta = {"role": "assistant", "content": ""}
            fields: dict[str, Any] = {"delta": delta}
        else:
            echoed = self._echoed() if self._call.echo else ""
            if self._wants_logprobs:
                choice.offsets = TextOffsets(
                    self._tokenizer,
                    self._prompt_ids,
                    skip_special_tokens=self._request.sampling.skip_special_tokens,
                    start=len(echoed),
                )
            fields = {"text": echoed}
        logprobs = self._echoed_logprobs if self._call.echo and self._wants_logprobs else None
        about = self._about_prompt() if update.index == 0 else {}
        if not (self._is_chat or self._call.echo or about):
            return choice, ""
        opening = {**fields, "logprobs": logprobs, "finish_reason": None}
        if len(self._body.requests) > 1:
            return choice, self._chunk(update, choice, **opening, **about)
        return choice, self._chunk(update, choice, about, **opening)

    def _about_prompt(self) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self._prompt_logprobs and not self._call.echo:
            told["prompt_logprobs"] = prompt_logprobs(self._prompt_logprobs, self._tokenizer)
        if self._wants_ids:
            told["prompt_token_ids"] = self._prompt_ids
        return told

    def _echoed(self) -> str:
        return prompt_text(self._call, self._request.prompt, self._prompt_ids, self._tokenizer)

    @cached_property
    def _echoed_logprobs(self) -> dict[str, list[Any]]:
        prompt = (self._request.prompt, self._prompt_ids, self._prompt_logprobs)
        return echoed_columns(self._call, *prompt, self._echoed(), self._tokenizer)

    def _text_events(self, choice: _Choice, update: RequestUpdate) -> str:
        is_end = update.finish_reason is not None
        if not (update.text or is_end or self._wants_ids):
            return ""
        logprobs = None
        if choice.offsets is not None:
            ids = [entry.token_id for entry in choice.logprobs]
            starts = choice.offsets.take(ids, update.text, is_last=is_end)
            logprobs = columns(ids, choice.logprobs, starts, self._tokenizer)
        fields = {"text": update.text, "logprobs": logprobs, "finish_reason": update.finish_reason}
        return self._chunk(update, choice, **fields)

    def _chat_events(self, choice: _Choice, update: RequestUpdate) -> str:
        assert choice.parser is not None, "a chat's choice begins with one"
        finish_reason = update.finish_reason
        deltas = [self._delta(choice.parser.feed(update.text))]
        if finish_reason is not None:
            deltas.append(self._delta(choice.parser.finish()))
            if choice.parser.has_calls and finish_reason == "stop":
                finish_reason = "tool_calls"
        deltas = [delta for delta in deltas if delta]
        if not deltas and (finish_reason is not None or self._wants_ids):
            deltas = [{}]
        events = ""
        for number, delta in enumerate(deltas, 1):
            logprobs = chat_logprobs(choice.logprobs, self._tokenizer) if choice.logprobs else None
            reason = finish_reason if number == len(deltas) else None
            fields = {"delta": delta, "logprobs": logprobs, "finish_reason": reason}
            events += self._chunk(update, choice, **fields)
        return events

    def _delta(self, delta: OutputDelta) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.content:
            fields["content"] = delta.content
        calls = []
        for piece in delta.tool_calls:
            if piece.index and not self._call.parallel_tool_calls:
                continue
            call: dict[str, Any] = {"index": piece.index}
            if piece.name is not None:
                function = {"name": piece.name, "arguments": piece.arguments}
                call |= {"id": piece.id, "type": "function", "function": function}
            else:
                call["function"] = {"arguments": piece.arguments}
            calls.append(call)
        return fields | ({"tool_calls": calls} if calls else {})

    def _chunk(
        self,
        update: RequestUpdate,
        choice: _Choice,
        more: Mapping[str, Any] | None = None,
        /,
        **fields: Any,
    ) -> str:
        """One event; `more` are fields beside the choice. It takes what waits in the choice."""
        fields = {"index": self._first_index + update.index, **fields}
        if fields["finish_reason"] is not None:
            fields["stop_reason"] = None if self._call.is_echo_alone else update.stop_reason
        if self._wants_ids:
            fields["token_ids"] = choice.token_ids
        # A chunk with a whole prompt's log-probabilities is large, and made in a thread.
        written = encode if choice.num_tokens else _in_pieces
        text = f"{self._head}{written(fields)}]"
        choice.token_ids, choice.logprobs = [], []
        if self._body.continuous_usage:
            usage = Usage(len(self._prompt_ids), choice.num_tokens, 0)
            more = {"usage": usage_body(self._call, usage), **(more or {})}
        if more:
            text += f",{written(more)[1:-1]}"
        return text + "}\n\n"
