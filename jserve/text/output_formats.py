"""Says how a model writes tool calls and reasoning, read off its chat template. Knows markers only:
parsing is `tool_calls`' and `reasoning`'s, grammars are `tool_grammar`'s."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from jserve.text.tokenizer import Tokenizer


class ToolCallFormat(StrEnum):
    HERMES = "hermes"  # <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    LLAMA3 = "llama3"  # {"name": "f", "parameters": {...}}, perhaps after <|python_tag|>
    MISTRAL = "mistral"  # [TOOL_CALLS][{"name": "f", "arguments": {...}}]
    MISTRAL_ARGS = "mistral_args"  # [TOOL_CALLS]f[ARGS]{...}


MARKERS = {
    ToolCallFormat.HERMES: ("<tool_call>", "</tool_call>"),
    ToolCallFormat.LLAMA3: ("<|python_tag|>",),
    ToolCallFormat.MISTRAL: ("[TOOL_CALLS]",),
    ToolCallFormat.MISTRAL_ARGS: ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
}
REASONING_MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
# What other formats that share Hermes' marker write after it.
_NOT_HERMES = ("<function=", "<arg_key>")


@dataclass(frozen=True)
class OutputFormats:
    """How a model writes what is more than text.

    Attributes:
      tool_calls: None where the model's template has no calls, or none in a format known here.
      reasoning: the texts that begin and end a block of reasoning, or None.
      special_ids: (text, id) of the markers that are special tokens, which text never shows.
    """

    tool_calls: ToolCallFormat | None = None
    reasoning: tuple[str, str] | None = None
    special_ids: tuple[tuple[str, int], ...] = ()


def detect_formats(template_source: str | None, tokenizer: Tokenizer) -> OutputFormats:
    """The formats that a chat template itself writes for the assistant's turns.

    Reasoning also counts as marked where both markers are tokens of the vocabulary.
    """
    source = template_source or ""
    calls = _tool_call_format(source)
    reasoning = next(
        (pair for pair in REASONING_MARKERS if pair[1] in source or _are_tokens(tokenizer, pair)),
        None,
    )
    specials = []
    for text in markers(OutputFormats(calls, reasoning)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == 1 and ids[0] in tokenizer.special_token_ids:
            specials.append((text, ids[0]))
    return OutputFormats(calls, reasoning, tuple(specials))


def markers(formats: OutputFormats) -> tuple[str, ...]:
    """Texts of the tokens that a detokeniser must show, special or not, for the parser to see."""
    calls = MARKERS[formats.tool_calls] if formats.tool_calls else ()
    return (*calls, *(formats.reasoning or ()))


def _tool_call_format(source: str) -> ToolCallFormat | None:
    if "[TOOL_CALLS]" in source:
        return ToolCallFormat.MISTRAL_ARGS if "[ARGS]" in source else ToolCallFormat.MISTRAL
    if "<tool_call>" in source:
        other = any(sign in source for sign in _NOT_HERMES)
        return None if other or "arguments" not in source else ToolCallFormat.HERMES
    # Llama's template spells the call out; "ipython" is its role for what tools answer.
    is_llama = "ipython" in source and '"parameters": ' in source
    return ToolCallFormat.LLAMA3 if is_llama else None


def _are_tokens(tokenizer: Tokenizer, texts: tuple[str, ...]) -> bool:
    return all(len(tokenizer.encode(text, add_special_tokens=False)) == 1 for text in texts)
