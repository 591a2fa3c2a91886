#!/usr/bin/env python
"""How well the engine predicts a text, by the log-probabilities that it gives prompts.

    python scripts/perplexity.py --text=kjv.txt --reference=tests/data/perplexity/smollm2_135m.json

The text is cut into windows of --window tokens, BOS included where the model has one; every token
but a window's first is scored. Flags are the engine's: add --quantization=w8a8 or
--kv_cache_dtype=int8 to see what they cost. With --reference, the windows have to be those that
transformers was given (scripts/make_perplexity_reference.py), and the difference is printed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from absl import app, flags

from jserve.build import build_engine
from jserve.flags import config_from_flags, define_flags, list_in_help
from jserve.llm import LLM
from jserve.sampling_params import SamplingParams

define_flags(("model", "cache", "scheduler", "parallel", "runner"))
_TEXT = flags.DEFINE_string("text", None, "A UTF-8 file.", required=True)
_REFERENCE = flags.DEFINE_string("reference", None, "What transformers makes of the same text.")
_WINDOW = flags.DEFINE_integer("window", 512, "Tokens of a window.", lower_bound=2)
_NUM_WINDOWS = flags.DEFINE_integer("num_windows", 100, "Windows to score.", lower_bound=1)
SCORE = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)


def windows_of(llm: LLM, text: str) -> list[list[int]]:
    tokenizer = llm.tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False)
    bos = [tokenizer.bos_token_id] if tokenizer.add_bos else []
    step = _WINDOW.value - len(bos)
    starts = range(0, len(ids) - step + 1, step)[: _NUM_WINDOWS.value]
    return [bos + ids[start : start + step] for start in starts]


def nll_of_windows(llm: LLM, windows: list[list[int]]) -> list[float]:
    """The mean negative log-probability of each window's tokens but the first, in nats."""
    means = []
    for output in llm.generate(windows, SCORE, use_tqdm=True):
        scored = [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
        means.append(-math.fsum(scored) / len(scored))
    return means


def main(_: list[str]) -> None:
    with LLM.from_engine(build_engine(config_from_flags())) as llm:
        windows = windows_of(llm, Path(_TEXT.value).read_text(encoding="utf-8"))
        nll = nll_of_windows(llm, windows)
    mean = math.fsum(nll) / len(nll)
    print(f"{len(nll)} windows, {len(nll) * (len(windows[0]) - 1)} tokens: "
          f"perplexity {math.exp(mean):.5f}")  # fmt: skip
    if _REFERENCE.value:
        reference = json.loads(Path(_REFERENCE.value).read_text())
        known = reference["nll_of_windows"][: len(nll)]
        first = reference["ids_of_first_windows"]
        assert windows[: len(first)] == first[: len(windows)], "the windows hold other tokens"
        exact = math.exp(math.fsum(known) / len(known))
        off = max(abs(a - b) for a, b in zip(nll, known, strict=True))
        print(f"transformers: {exact:.5f}; difference {math.exp(mean) - exact:+.5f}, "
              f"{math.exp(mean) / exact - 1:+.4%}; worst window {off:.6f} nats")  # fmt: skip


if __name__ == "__main__":
    list_in_help()
    app.run(main)
