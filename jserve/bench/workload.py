"""What is sent and when: requests from files or drawn from lengths, arrival times. Knows seeds and
formats: no server, no clock."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jserve.errors import ConfigError, InvalidRequest
from jserve.messages import GenerateRequest
from jserve.sampling_params import SamplingParams

CHARS_PER_TOKEN = 4  # of English text, about; only to guess the length of a ShareGPT answer
LOWEST_RANDOM_ID = 256  # below it many vocabularies keep control and byte tokens
_ENTRY_FIELDS = {"max_tokens", "temperature", "ignore_eos"}
_INPUT_FIELDS = {"prompt", "prompt_token_ids", "messages"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """What an entry of a file does not say itself."""

    temperature: float = 0.0
    ignore_eos: bool = True


class Lengths:
    """Lengths in tokens: "512", a range "100:400" (both included), or a mix "64:128,1024:2048".

    Each part of a mix is as likely as the others. Raises ConfigError for anything else.
    """

    def __init__(self, text: str) -> None:
        try:
            parts = [tuple(map(int, part.split(":"))) for part in text.split(",")]
            self._ranges = [(part[0], part[-1]) for part in parts]
            if any(len(p) > 2 or not 1 <= p[0] <= p[-1] for p in parts):
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"length {text!r} is not understood; use 512, 100:400 or 64:128,1024:2048"
            ) from None

    def draw(self, rng: np.random.Generator) -> int:
        low, high = self._ranges[rng.integers(len(self._ranges))]
        return int(rng.integers(low, high, endpoint=True))


def synthetic(
    num_requests: int,
    input_len: Lengths,
    output_len: Lengths,
    *,
    vocab_size: int,
    defaults: RequestDefaults,
    seed: int,
) -> list[GenerateRequest]:
    """Draws prompts of random token ids; equal seeds give equal requests."""
    if vocab_size <= LOWEST_RANDOM_ID:
        raise ConfigError(f"{vocab_size=} must be above {LOWEST_RANDOM_ID}")
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(num_requests):
        ids = rng.integers(LOWEST_RANDOM_ID, vocab_size, input_len.draw(rng)).tolist()
        requests.append(_request({"prompt_token_ids": ids}, defaults, output_len.draw(rng)))
    return requests


def load(
    kind: str,
    path: str,
    defaults: RequestDefaults,
    *,
    output_len: Lengths | None = None,
    seed: int = 0,
) -> list[GenerateRequest]:
    """Reads a workload of `kind`, in the file's order.

    "jsonl" is a line per entry, "workload" is {"requests": [entry, ...]}; an entry has one of
    prompt, prompt_token_ids and messages, and may have max_tokens, temperature and ignore_eos.
    "sharegpt" is a list of {"conversations": [{"from", "value"}, ...]}: the first human turn is
    the prompt, and max_tokens is about the length of its answer.
    `output_len`, where given, takes the place of every entry's max_tokens.

    Raises ConfigError, naming the file and the entry.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        if kind == "jsonl":
            entries = [json.loads(line) for line in text.splitlines() if line.strip()]
        elif kind == "workload":
            entries = json.loads(text)["requests"]
        else:
            entries = list(_sharegpt_entries(json.loads(text)))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a readable {kind} file: {error!r}") from error
    rng = np.random.default_rng(seed)
    requests = []
    for i, entry in enumerate(entries):
        max_tokens = output_len.draw(rng) if output_len else None
        try:
            requests.append(_request(entry, defaults, max_tokens))
        except InvalidRequest as error:
            raise ConfigError(f"{path}, entry {i}: {error}") from error
    if not requests:
        raise ConfigError(f"{path} has no usable requests")
    return requests


def _sharegpt_entries(talks: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    for talk in talks:
        turns = talk.get("conversations", [])
        if len(turns) < 2 or turns[0]["from"] not in ("human", "user") or not turns[0]["value"]:
            continue  # one-sided conversations are common in this data; there is nothing to ask
        guess = max(1, len(turns[1]["value"]) // CHARS_PER_TOKEN)
        yield {"prompt": turns[0]["value"], "max_tokens": guess}


def _request(
    entry: Any, defaults: RequestDefaults, max_tokens: int | None = None
) -> GenerateRequest:
    if not isinstance(entry, Mapping):
        raise InvalidRequest("not an object")
    inputs = {name: entry[name] for name in _INPUT_FIELDS & entry.keys()}
    unknown = entry.keys() - _INPUT_FIELDS - _ENTRY_FIELDS
    if len(inputs) != 1 or unknown:
        raise InvalidRequest(
            f"needs exactly one of {sorted(_INPUT_FIELDS)}, and besides it only "
            f"{sorted(_ENTRY_FIELDS)}; has {sorted(entry)}"
        )
    sampling = dataclasses.asdict(defaults)
    sampling |= {name: entry[name] for name in _ENTRY_FIELDS & entry.keys()}
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    if "max_tokens" not in sampling:
        raise InvalidRequest("has no max_tokens; add it, or use --output_len")
    return GenerateRequest(**inputs, sampling=SamplingParams(**sampling))


def take(requests: list[GenerateRequest], num_requests: int, seed: int) -> list[GenerateRequest]:
    """Returns `num_requests` of them: a seeded sample in order, or all again and again if more."""
    if num_requests <= 0 or num_requests == len(requests):
        return requests
    if num_requests > len(requests):
        return [requests[i % len(requests)] for i in range(num_requests)]
    chosen = np.random.default_rng(seed).choice(len(requests), num_requests, replace=False)
    return [requests[i] for i in sorted(chosen)]


def warmup(requests: list[GenerateRequest], num_requests: int, seed: int) -> list[GenerateRequest]:
    """Returns requests of the same lengths with their prompts reversed: the run that follows must
    not find its own prompts in the server's prefix cache."""

    def reverse(request: GenerateRequest) -> GenerateRequest:
        if request.messages is not None:
            turns = [dict(m, content=str(m["content"])[::-1]) for m in request.messages]
            return dataclasses.replace(request, messages=turns)
        if request.prompt is not None:
            return dataclasses.replace(request, prompt=request.prompt[::-1])
        return dataclasses.replace(request, prompt_token_ids=(request.prompt_token_ids or ())[::-1])

    return [reverse(request) for request in take(requests, num_requests, seed)]


def arrival_times(
    num_requests: int, request_rate: float, burstiness: float, seed: int
) -> list[float]:
    """Returns seconds, ascending from 0, at `request_rate` per second.

    Gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, below 1 comes
    in bursts, above 1 is more even. An infinite rate sends everything at once.
    """
    if not request_rate > 0 or not burstiness > 0:
        raise ConfigError(f"{request_rate=} and {burstiness=} must be above 0")
    if np.isinf(request_rate):
        return [0.0] * num_requests
    rng = np.random.default_rng(seed)
    gaps = rng.gamma(burstiness, 1 / (request_rate * burstiness), num_requests)
    return (np.cumsum(gaps) - gaps[:1].sum()).tolist()
