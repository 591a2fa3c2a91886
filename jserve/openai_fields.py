"""The fields of OpenAI request bodies: their names, and what each may hold as JSON Schema. Knows
names and ranges: no parsing, no transport. `openai_format` reads by these tables, and the OpenAPI
document shows them.

Source: the OpenAI API reference; names that are not OpenAI's are vLLM's, where it has the field.
"""

from __future__ import annotations

from typing import Any

from jserve import sampling_params as limits

Schema = dict[str, Any]

MAX_EMBEDDING_INPUTS = 2048  # as at OpenAI


def _number(low: float, high: float, **more: Any) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high, **more}


def _integer(low: int, high: int = 2**31 - 1) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _list(items: Schema, low: int, high: int) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def _text(low: int, high: int) -> Schema:
    return {"type": "string", "minLength": low, "maxLength": high}


BOOL: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
TEXT: Schema = {"type": "string"}
NOTHING: Schema = {"type": "null"}  # what counts as absent, whatever its name
TOKEN_ID = _integer(0)
TOKEN_IDS = _list(TOKEN_ID, 1, 2**20)
_STOP = _text(1, limits.MAX_STOP_CHARS)
_WORD = {
    "anyOf": [_text(1, limits.MAX_BAD_WORD_SIZE), _list(TOKEN_ID, 1, limits.MAX_BAD_WORD_SIZE)]
}
_SECONDS = _number(0, 1e9, exclusiveMinimum=0)

# Same name and meaning in SamplingParams. Those from top_k on are not OpenAI's but common
# extensions, as is best_of in a chat.
SAMPLING: dict[str, Schema] = {
    "temperature": _number(0, 100),
    "top_p": _number(0, 1, exclusiveMinimum=0),
    "seed": _integer(-(2**63), 2**64 - 1),
    "max_tokens": _integer(1),
    "stop": {"anyOf": [_STOP, _list(_STOP, 0, limits.MAX_STOP_STRINGS)]},
    "n": _integer(1, limits.MAX_CHOICES),
    "best_of": _integer(1, limits.MAX_CHOICES),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "top_k": _integer(-1),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0.01, 100),
    "min_tokens": _integer(0),
    "stop_token_ids": _list(TOKEN_ID, 0, limits.MAX_STOP_TOKEN_IDS),
    "ignore_eos": BOOL,
    "bad_words": _list(_WORD, 0, limits.MAX_BAD_WORDS),
    "allowed_token_ids": _list(TOKEN_ID, 1, limits.MAX_ALLOWED_TOKEN_IDS),
    "skip_special_tokens": BOOL,
    "include_stop_str": BOOL,
}
# Same name and meaning in GenerateRequest.
REQUEST: dict[str, Schema] = {
    "model": TEXT,
    "priority": _integer(-(2**31) + 1),
    "request_class": TEXT,
    "tenant": _text(0, 256),
    "timeout_s": _SECONDS,
    "queue_timeout_s": _SECONDS,
}
# Other names for the above; giving both is an error unless they agree.
ALIASES = {
    "max_completion_tokens": "max_tokens",
    "include_stop_str_in_output": "include_stop_str",
    "cache_salt": "tenant",
    "timeout": "timeout_s",
}
FORM: dict[str, Schema] = {
    "response_format": OBJECT,
    "guided_json": {"type": ["object", "string", "boolean"]},
    "guided_regex": TEXT,
    "guided_choice": {"type": "array", "items": _text(1, 2**20), "minItems": 1},
    "guided_grammar": TEXT,
    "structured_outputs": OBJECT,
}
COMMON: dict[str, Schema] = {
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": _number(-limits.MAX_BIAS, limits.MAX_BIAS),
        "maxProperties": limits.MAX_LOGIT_BIAS,
    },
    "prompt_logprobs": _integer(0, limits.MAX_LOGPROBS),
    "return_token_ids": BOOL,
}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": TEXT},
    "required": ["type", "text"],
}
_FUNCTION_CALL: Schema = {
    "type": "object",
    "properties": {"name": TEXT, "arguments": {"type": ["string", "object", "null"]}},
    "required": ["name"],
}
_TOOL_CALL: Schema = {
    "type": "object",
    "properties": {
        "id": _TEXT_OR_NULL,
        "type": {"const": "function"},
        "function": _FUNCTION_CALL,
    },
    "required": ["function"],
}
# Which roles there are, and what their messages need, is the chat template's matter.
MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": TEXT,
        "content": {"anyOf": [_TEXT_OR_NULL, {"type": "array", "items": _PART}]},
        "name": _TEXT_OR_NULL,
        "tool_call_id": _TEXT_OR_NULL,
        "reasoning_content": _TEXT_OR_NULL,
        "tool_calls": {"anyOf": [{"type": "array", "items": _TOOL_CALL}, {"type": "null"}]},
    },
    "required": ["role"],
    "additionalProperties": NOTHING,
}
_FUNCTION: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
        "description": _TEXT_OR_NULL,
        "parameters": {
            "type": ["object", "null"],
            "properties": {"type": {"const": "object"}},
        },
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["name"],
    "additionalProperties": False,
}
_TOOL: Schema = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["type", "function"],
    "additionalProperties": False,
}
CHAT: dict[str, Schema] = {
    "messages": {"type": "array", "minItems": 1, "items": MESSAGE},
    "tools": _list(_TOOL, 0, 128),
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, OBJECT]},
    "parallel_tool_calls": BOOL,
    "logprobs": BOOL,
    "top_logprobs": _integer(0, limits.MAX_LOGPROBS),
    "add_generation_prompt": BOOL,
    "continue_final_message": BOOL,
    "chat_template_kwargs": OBJECT,
}
COMPLETIONS: dict[str, Schema] = {
    "prompt": {"anyOf": [TEXT, TOKEN_IDS]},
    "echo": BOOL,
    "logprobs": _integer(0, limits.MAX_LOGPROBS),
    "max_tokens": _integer(0),  # 0 with echo alone
}
MAX_PROMPTS = 512
_ONE_PROMPT = {"type": "string", "minLength": 1}
# Of HTTP alone: a line of a batch has one prompt, and no stream.
PROMPTS: Schema = {
    "anyOf": [
        _ONE_PROMPT,
        TOKEN_IDS,
        _list(_ONE_PROMPT, 1, MAX_PROMPTS),
        _list(TOKEN_IDS, 1, MAX_PROMPTS),
    ]
}
STREAM: dict[str, Schema] = {
    "stream": BOOL,
    "stream_options": {
        "type": "object",
        "properties": {
            "include_usage": {"type": ["boolean", "null"]},
            "continuous_usage_stats": {"type": ["boolean", "null"]},
            "include_obfuscation": {"enum": [False, None]},
        },
        "additionalProperties": NOTHING,
    },
}
TOKENIZE: dict[str, Schema] = {"model": TEXT, "return_token_strs": BOOL}
TOKENIZE_TEXT: dict[str, Schema] = {"prompt": TEXT, "add_special_tokens": BOOL}
TOKENIZE_CHAT: dict[str, Schema] = {
    **{name: CHAT[name] for name in ("messages", "tools", "tool_choice", "add_generation_prompt")},
    **{name: CHAT[name] for name in ("continue_final_message", "chat_template_kwargs")},
}
DETOKENIZE: dict[str, Schema] = {
    "model": TEXT,
    "tokens": {"type": "array", "items": TOKEN_ID},
}
EMBEDDINGS: dict[str, Schema] = {
    "input": {
        "anyOf": [
            TEXT,
            TOKEN_IDS,
            _list({"anyOf": [TEXT, TOKEN_IDS]}, 1, MAX_EMBEDDING_INPUTS),
        ]
    },
    "encoding_format": {"enum": ["float", "base64"]},
    "dimensions": _integer(1),
    "pooling": {"enum": ["last", "mean"]},
}
# They name a call for its sender's own accounts, and by definition change no answer.
LABELS: dict[str, Schema] = {
    "user": TEXT,
    "safety_identifier": TEXT,
    "prompt_cache_key": TEXT,
    "metadata": OBJECT,
}
# Not offered; these values ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    # What routers made for SGLang and vLLM add to each body that they pass on, with its default.
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "include_reasoning": (True,),
}
