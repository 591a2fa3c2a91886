"""Writes tests/data/embeddings/: what transformers makes of a few texts, by last and mean pooling.

Not part of any test run. Needs, in an environment of its own, `pip install torch==2.13.0
transformers==5.24.0 accelerate gguf`; the model is a GGUF file, dequantised to float32:

  python scripts/make_embedding_reference.py MODEL.gguf tests/data/embeddings/NAME.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModel, AutoTokenizer

TEXTS = (
    "A cat sleeps on the warm windowsill.",
    "The kitten is dozing in the sun by the window.",
    "Interest rates rose by a quarter of a percentage point.",
    "Wien liegt an der Donau – 東京は日本の首都です 🚀",
    "Pages of keys and values are handed out, shared and taken back. " * 20,
)
NUM_DIMENSIONS = 16  # kept of each vector; the cosines are of all of them


@torch.inference_mode()
def vectors_of(model, ids: list[int]) -> dict[str, torch.Tensor]:
    """Returns f32[D] of length 1 for each pooling of the states after the final norm."""
    hidden = model(torch.tensor([ids])).last_hidden_state[0]
    pooled = {"last": hidden[-1], "mean": hidden.mean(dim=0)}
    return {name: vector / vector.norm() for name, vector in pooled.items()}


def main(model_file: str, output: str) -> None:
    file = Path(model_file)
    given = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **given)
    model = AutoModel.from_pretrained(
        file.parent, **given, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    all_ids = [tokenizer(text).input_ids for text in TEXTS]
    found = [vectors_of(model, ids) for ids in all_ids]
    reference = {
        "model": file.name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "texts": TEXTS,
        "token_ids": all_ids,
    }
    for pooling in ("last", "mean"):
        vectors = torch.stack([of_text[pooling] for of_text in found])
        reference[pooling] = {
            "first_dimensions": vectors[:, :NUM_DIMENSIONS].tolist(),
            "cosines": (vectors @ vectors.T).tolist(),
        }
    Path(output).write_text(json.dumps(reference, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
