"""Brings what schemathesis makes up nearer to what a server can do, so that more of it reaches the
engine: legal cases stay legal, illegal ones illegal. Named to schemathesis by SCHEMATHESIS_HOOKS.
"""

from __future__ import annotations

from typing import Any

import schemathesis

VOCAB = 256  # of the tiny models, at least
_TIMES = ("timeout_s", "timeout", "queue_timeout_s")
_TIMEOUT_HEADER = "x-request-timeout-ms"
_FORMS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
_PAIRS = (  # of which the second is left out: they may contradict each other
    *(("max_tokens", "max_completion_tokens"), ("timeout_s", "timeout"), ("n", "best_of")),
    *(("tenant", "cache_salt"), ("include_stop_str", "include_stop_str_in_output")),
    *(("max_tokens", "min_tokens"), ("prompt_logprobs", "echo"), ("tools", "tool_choice")),
    ("continue_final_message", "add_generation_prompt"),
)
_IDS = ("prompt", "input", "tokens", "stop_token_ids", "allowed_token_ids")


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    body, headers = case.body, case.headers
    if isinstance(body, dict):
        _give_what_is_needed(body)
        if (
            case.meta is not None
            and case.meta.generation.mode == schemathesis.GenerationMode.POSITIVE
        ):
            _settle(body)
    text = headers.get(_TIMEOUT_HEADER) if headers else None
    if isinstance(text, str) and text.isdecimal() and text[0] != "0" and len(text) <= 3:
        headers[_TIMEOUT_HEADER] = text + "000"


def _give_what_is_needed(body: dict[str, Any]) -> None:
    """A served model, time, a stream for its options: nothing becomes legal that was not."""
    if isinstance(body.get("model"), str) and len(body["model"]) % 4:
        del body["model"]
    for name in _TIMES:
        if type(body.get(name)) in (int, float) and 0 < body[name] < 1:
            body[name] += 5
    for name, needed in (("stream_options", "stream"), ("top_logprobs", "logprobs")):
        if body.get(name) is not None and (body.get(needed) is None or body[needed] is False):
            body[needed] = True


def _settle(body: dict[str, Any]) -> None:
    """Settles what is legal field by field and not together, or not with this model, most times."""
    if len(repr(body)) % 5 == 0:
        return
    given = [name for name in (*_FORMS, "response_format") if body.get(name) is not None]
    for name in given[1:]:
        del body[name]
    if given:
        for name in ("ignore_eos", "allowed_token_ids", "bad_words"):
            body.pop(name, None)
    for name, other in _PAIRS:
        if body.get(name) is not None:
            body.pop(other, None)
    body.pop("dimensions", None)
    for name in _IDS:
        if isinstance(body.get(name), list):
            body[name] = [int(i) % VOCAB if type(i) in (int, float) else i for i in body[name]]
    if isinstance(body.get("logit_bias"), dict):
        body["logit_bias"] = {str(int(k) % VOCAB): v for k, v in body["logit_bias"].items()}
