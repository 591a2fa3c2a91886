"""Times the masks of a grammar as an engine asks for them: one step of --rows constrained rows.

On the default model's vocabulary (fetched where it is not in the cache), and on a made one of
--large_vocab tokens: seconds to build the vocabulary's trie; milliseconds to compile a JSON schema
of middling size, for the first time and from the cache; and microseconds per step to fill the masks
of all rows and to accept their tokens. Each row walks on its own, at random with a bias to close.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import tokenizers
from absl import app, flags
from tokenizers import decoders, models

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jserve.checkpoint.fetch import fetch_known
from jserve.checkpoint.gguf import open_gguf
from jserve.config import DEFAULT_CACHE_DIR
from jserve.structured import StructuredOutput
from jserve.text.gguf_tokenizer import tokenizer_from_gguf
from jserve.text.grammar import Grammar, GrammarCompiler
from jserve.text.tokenizer import BYTE_ALPHABET, Tokenizer

_ROWS = flags.DEFINE_integer("rows", 32, "Constrained rows in a step.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 300, "Steps to time.", lower_bound=10)
_LARGE = flags.DEFINE_integer("large_vocab", 262_144, "Tokens of the made vocabulary.")

CLOSING = (b'"', b'",', b'"}', b"]", b"}", b"}]", b'"]')
P_CLOSE = 0.25
ITEM = {
    "type": "object",
    "properties": {
        "sku": {"type": "string"},
        "quantity": {"type": "integer", "minimum": 1, "maximum": 100},
        "price": {"type": "number", "minimum": 0},
    },
    "required": ["sku", "quantity"],
    "additionalProperties": False,
}
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": "string", "maxLength": 60},
        "email": {"type": "string", "format": "email"},
        "active": {"type": "boolean"},
        "colours": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 4},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}},
    },
    "required": ["id", "name", "email", "active", "items"],
    "additionalProperties": False,
    "$defs": {"item": ITEM},
}


def default_tokenizer() -> Tokenizer:
    path = fetch_known("smollm2-135m", Path(DEFAULT_CACHE_DIR))
    return tokenizer_from_gguf(open_gguf(path).gguf_metadata)


def made_tokenizer(size: int) -> Tokenizer:
    """`size` tokens: EOS, the 256 bytes, and others that go on where an earlier one ends, as those
    of byte-pair encoding do."""
    rng = np.random.default_rng(0)
    vocab = {"<eos>": 0} | {char: 1 + i for i, char in enumerate(BYTE_ALPHABET)}
    tokens = list(vocab)
    while len(tokens) < size:
        tail = bytes(rng.integers(97, 123, rng.integers(1, 3)).tolist()).decode()
        token = tokens[1 + rng.integers(len(tokens) - 1)] + tail
        if vocab.setdefault(token, len(tokens)) == len(tokens):
            tokens.append(token)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, eos_token_ids=[0])


def time_steps(grammar: Grammar, tokenizer: Tokenizer, vocab_size: int) -> dict[str, np.ndarray]:
    """Microseconds per step, by what is done in it."""
    rng = np.random.default_rng(0)
    closing = {id for id in range(vocab_size) if tokenizer.token_bytes(id) in CLOSING}
    matchers = [grammar.matcher() for _ in range(_ROWS.value)]
    masks = np.zeros((_ROWS.value, (vocab_size + 31) // 32), np.uint32)
    times: dict[str, list[float]] = {"fill": [], "accept": []}
    for _ in range(_STEPS.value):
        begin = time.perf_counter()
        for matcher, words in zip(matchers, masks, strict=True):
            matcher.fill(words)
        times["fill"].append(time.perf_counter() - begin)
        tokens = []
        for words in masks:
            ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            ends = closing.intersection(ids.tolist()) if rng.random() < P_CLOSE else None
            tokens.append(min(ends) if ends else int(rng.choice(ids)))
        begin = time.perf_counter()
        for matcher, token in zip(matchers, tokens, strict=True):
            matcher.accept(token)
        times["accept"].append(time.perf_counter() - begin)
        matchers = [grammar.matcher() if m.is_finished else m for m in matchers]
    return {name: 1e6 * np.array(values) for name, values in times.items()}


def bench(name: str, tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size
    compiler = GrammarCompiler(tokenizer, size, tokenizer.eos_token_ids)
    begin = time.perf_counter()
    compiler.warm_up()
    print(f"{name}: {size} tokens, trie built in {time.perf_counter() - begin:.2f} s")
    spec = StructuredOutput.of_json_schema(ORDER)
    compile_ms = []
    for _ in range(2):
        begin = time.perf_counter()
        grammar = compiler.compile(spec)
        compile_ms.append(1e3 * (time.perf_counter() - begin))
    print(f"  compile {compile_ms[0]:.1f} ms, from the cache {compile_ms[1]:.3f} ms")
    for what, us in time_steps(grammar, tokenizer, size).items():
        quantiles = ", ".join(f"p{q} {np.percentile(us, q):.0f}" for q in (50, 95, 100))
        print(f"  {what} of {_ROWS.value} rows: mean {us.mean():.0f} us, {quantiles}")


def main(_: list[str]) -> None:
    bench("default model", default_tokenizer())
    bench("made vocabulary", made_tokenizer(_LARGE.value))


if __name__ == "__main__":
    app.run(main)
