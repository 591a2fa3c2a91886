"""Turns whichever prompt a request gives into token ids that the model has. Knows the tokenizer and
the model's limits: no settings of sampling, no queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from jserve.engine.chat_input import ChatInput
from jserve.errors import InvalidRequest
from jserve.messages import GenerateRequest
from jserve.text.tokenizer import Tokenizer, check_length


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the served model accepts, and for those who ask, what it is and what it runs on."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    hidden_size: int = 0  # of an embedding
    model_type: str = ""  # as in a Hugging Face config: "llama"
    architectures: tuple[str, ...] = ()  # likewise
    max_num_seqs: int = 0
    page_size: int = 0


class PromptInput:
    """Reads prompts. Safe to call from any thread."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatInput, limits: ModelLimits) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._limits = limits

    def token_ids(self, message: GenerateRequest) -> list[int]:
        """Returns the ids of the one prompt that is given: at least one, each in the vocabulary.

        Raises:
          InvalidRequest: naming the field and what is legal.
        """
        given = [
            name
            for name in ("prompt", "prompt_token_ids", "messages")
            if getattr(message, name) is not None
        ]
        if len(given) != 1:
            raise InvalidRequest(
                f"{' and '.join(given) or 'no prompt'} given; "
                "give exactly one of prompt, prompt_token_ids and messages"
            )
        if message.messages is not None:
            ids = self._chat.encode(message)
        elif message.prompt is not None:
            if not isinstance(message.prompt, str):
                raise InvalidRequest(f"prompt is a {type(message.prompt).__name__}, not a text")
            self.check_length(message.prompt)
            ids = self._tokenizer.encode(message.prompt)
        else:
            ids = self._checked(message.prompt_token_ids)
        if not ids:
            raise InvalidRequest("the prompt is empty; give at least one token")
        if (highest := max(ids)) >= self._limits.vocab_size:  # some tokenizers know more than that
            token = self._tokenizer.decode([highest], skip_special_tokens=False)
            raise InvalidRequest(
                f"the prompt holds {token!r}, token id {highest}, which this model does not have; "
                "leave it out"
            )
        return ids

    def check_length(self, text: str) -> None:
        """Refuses what no tokenisation could make fit. Raises InvalidRequest."""
        check_length(self._tokenizer, len(text), self._limits.max_model_len)

    def _checked(self, ids: Sequence[int] | None) -> list[int]:
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
            raise InvalidRequest("prompt_token_ids is not a list of token ids")
        vocab, limit = self._limits.vocab_size, self._limits.max_model_len
        if len(ids) > limit:  # before each of some millions is looked at
            raise InvalidRequest(
                f"the prompt has {len(ids)} tokens; the limit is max_model_len={limit}: use at "
                f"most {limit - 1}, or for an embedding {limit}"
            )
        for index, token_id in enumerate(ids):
            bad_type = isinstance(token_id, bool) or not isinstance(token_id, Integral)
            if bad_type or not 0 <= token_id < vocab:
                raise InvalidRequest(
                    f"prompt_token_ids[{index}]={token_id!r} is not a token id; "
                    f"use integers from 0 to {vocab - 1}"
                )
        return [int(token_id) for token_id in ids]
