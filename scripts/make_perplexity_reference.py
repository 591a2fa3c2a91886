"""Computes what transformers thinks of a text: the log-probabilities of its tokens, in windows.

Run by hand, in an environment of its own (torch 2.13.0, transformers 5.24.0, accelerate, gguf); the
results are committed, so neither the tests nor the project need torch. The model is the GGUF file,
dequantised by transformers to float32. The text is Genesis and Luke of the King James Bible, as
Debian's packages bible-kjv and bible-kjv-text 4.38 print it, with no verse numbers: see
docs/quantization.md for the commands.

  python scripts/make_perplexity_reference.py MODEL.gguf TEXT OUTPUT.json
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

WINDOW = 512  # tokens, BOS included where the model has one; the first is given, not scored
NUM_WINDOWS = 100  # 51,100 tokens are scored
NUM_WITH_IDS = 4  # windows whose ids are kept, for tests


def windows_of(tokenizer, text: str) -> list[list[int]]:
    """The text's first tokens in consecutive windows."""
    bos = [tokenizer.bos_token_id] if tokenizer("a").input_ids[0] == tokenizer.bos_token_id else []
    ids = tokenizer(text, add_special_tokens=False).input_ids
    step = WINDOW - len(bos)
    return [bos + ids[i * step : (i + 1) * step] for i in range(NUM_WINDOWS)]


@torch.inference_mode()
def nll_of(model, ids: list[int]) -> float:
    """Returns the mean negative log-probability of a window's tokens but the first, in nats."""
    logits = model(torch.tensor([ids])).logits[0, :-1].float()
    targets = torch.tensor(ids[1:])
    return torch.nn.functional.cross_entropy(logits, targets).item()


def main(model_file: str, text_file: str, output: str) -> None:
    file = Path(model_file)
    given = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **given)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, **given, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    text = Path(text_file).read_text(encoding="utf-8")
    windows = windows_of(tokenizer, text)
    nll = []
    for i, ids in enumerate(windows):
        nll.append(round(nll_of(model, ids), 7))
        print(f"window {i + 1} of {len(windows)}: {nll[-1]:.4f}", file=sys.stderr)
    reference = {
        "model": file.name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "window": WINDOW,
        "nll_of_windows": nll,
        "ids_of_first_windows": windows[:NUM_WITH_IDS],
    }
    Path(output).write_text(json.dumps(reference, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
