"""Writes tests/data/sampling/: what transformers' logits processors make of random logits.

Not part of any test run. Needs, in an environment of its own, `pip install torch
transformers==5.24`:

  python scripts/make_sampling_reference.py --output=tests/data/sampling
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

VOCAB = 20  # as many as a row's alternatives, so that the test sees them all
EOS = [5, 17]
# Each case: settings by transformers' names. The order of the processors is transformers' own.
CASES: list[dict] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.6},
    {"temperature": 0.45},
    {"top_k": 7},
    {"top_p": 0.8123},
    {"min_p": 0.0431},
    {"sequence_bias": {"3": -2.5, "11": 4.0, "16": -100.0}},
    {"bad_words_ids": [[2], [9, 13], [14, 9, 12], [12, 12]]},
    {"min_new_tokens": 12},
    {"min_new_tokens": 4},
    {"allowed": [1, 5, 8, 13]},
    {"top_k": 9, "top_p": 0.7321, "min_p": 0.0517, "temperature": 1.7},
    {"repetition_penalty": 1.8, "sequence_bias": {"9": 3.5, "7": -1.25}, "temperature": 0.7},
    {
        "repetition_penalty": 1.2,
        "sequence_bias": {"9": 1.5, "16": -3.0},
        "bad_words_ids": [[2], [9, 13]],
        "min_new_tokens": 12,
        "temperature": 1.3,
        "top_k": 15,
        "top_p": 0.8713,
        "min_p": 0.0613,
    },
]
PROMPT = [1, 9, 9, 18, 16, 7]
OUTPUT = [12, 9, 11, 12, 14, 9]


def processors(settings: dict, allowed: list[int] | None):
    """Returns what transformers would apply at each step of `generate`."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    fixed = {"do_sample": True, "eos_token_id": EOS, "num_beams": 1, "num_return_sequences": 1}
    generation = GenerationConfig(**{"top_k": 0} | settings | fixed)
    model._prepare_special_tokens(generation, device="cpu")
    return model._get_logits_processor(
        generation_config=generation,
        input_ids_seq_length=len(PROMPT),
        prefix_allowed_tokens_fn=None if allowed is None else lambda *_: allowed,
        device="cpu",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1.5, (len(CASES), VOCAB)).astype(np.float32)
    scores, cases = [], []
    for row, given in zip(logits, CASES, strict=True):
        settings = dict(given)
        allowed = settings.pop("allowed", None)
        if "sequence_bias" in settings:
            pairs = settings["sequence_bias"].items()
            settings["sequence_bias"] = [[[int(token_id)], bias] for token_id, bias in pairs]
        chain = processors(settings, allowed)
        ids = torch.tensor([PROMPT + OUTPUT])
        scores.append(chain(ids, torch.from_numpy(row.copy())[None])[0].numpy())
        cases.append(given | {"processors": [type(one).__name__ for one in chain]})
        print(cases[-1]["processors"], np.isfinite(scores[-1]).sum())
    output.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(output / "processors.npz", logits=logits, scores=np.stack(scores))
    about = {
        "source": f"transformers {transformers.__version__}, scripts/make_sampling_reference.py",
        "eos": EOS,
        "prompt": PROMPT,
        "output": OUTPUT,
        "cases": cases,
    }
    (output / "processors.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
