"""Writes tests/data/text/: small tokenizers, and what the original libraries make of many strings.

Not part of any test run. Needs, in an environment of its own, `pip install torch transformers==5.24
gguf sentencepiece`, SmolLM2's GGUF file, and the published tokenizer.json files of Gemma 3 and of
the models whose splits are recorded:

  python scripts/make_tokenizer_reference.py --output=tests/data/text --smollm2=FILE.gguf \
      --gemma3=FILE.json --splits llama-bpe=FILE.json qwen2=FILE.json ...
"""

from __future__ import annotations

import argparse
import io
import json
import random
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

STRINGS = [
    *("Hello, world!", "hello", " hello", "  hello", "   hello world  ", "hello ", "", " ", "  "),
    *("     ", "\n", "\n\n", "\n\n\n  \n", "\t", "\t\tindent", "a\r\nb\r\n", "\r\r", " \n \n\t \n"),
    *(
        "I'm you're he'll WE'VE it's Don'T 'd 'S",
        "camelCaseHTTPServer iPhone",
        "snake_case __init__",
    ),
    *("x = 3.14159, y=1234567890", "1", "12", "123", "1234", "12345", "2024-01-31T12:34:56Z"),
    *("١٢٣ ४५६ Ⅷ ½", "東京は日本の首都です。", "你好，世界！今天天气怎么样？", "안녕하세요 세계"),
    *(
        "Привет, мир! Ёлка",
        "Γειά σου Κόσμε",
        "שלום עולם",
        "مرحبا بالعالم",
        "नमस्ते दुनिया",
        "สวัสดีชาวโลก",
    ),
    *(
        "Tiếng Việt có dấu",
        "café naïve",
        "cafe\u0301 nai\u0308ve",
        "ﬁne ﬂow Å Å",
        "I love 🍕 and 🎉!",
    ),
    *("👩‍👩‍👧‍👦 👍🏽 🇫🇷", "🙂🙂🙂", "𝔘𝔫𝔦 𓀀 \U0001f9ff", "zero\u200bwidth\u00a0nbsp\ufeffbom"),
    *("control \x00 \x07 \x1b[0m", "\u2028line\u2029para", "ALL CAPS TEXT", "mIxEd CaSe"),
    *(
        "def f(x):\n    return x**2  # square\n\n\nclass A:\n\tpass\n",
        "if (a && !c) { return a->b[0]; }",
    ),
    *(
        "<html><body>&amp;</body></html>",
        '{"key": [1, 2.5e-3, null], "s": "\\u00e9"}',
        "!!! ??? ... ---",
    ),
    *("$x^2 + \\frac{1}{2}$", "https://example.com/a?b=c&d=%20#e", "a/b/c//d\n/e\n", "word" * 40),
    *("«quoted» “quotes” ‘single’ — dash – …", "▁▁ literal ▁ lower", "ÀÉÎÕÜ àéîõü ß ẞ", "ab " * 50),
    *(
        "end with newline\n",
        "tabs\tand  spaces\t \t",
        "Dr. Smith's e-mail: a.b@c.d (work)",
        "x" * 300,
    ),
]
SPECIAL_STRINGS = [
    "<|im_start|>user\nhi<|im_end|>\n",
    "a<|im_end|> b",
    "<bos><start_of_turn>user\nhi<end_of_turn>\n",
    "x <eos>  y",
]
CORPUS_WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have"
)


def corpus() -> list[str]:
    """A small, seeded text with words, digits, punctuation and several scripts."""
    rng = random.Random(0)
    words = [*CORPUS_WORDS.split(), "return", "def", "2024", "x", "naïve", "日本", "мир", "hello"]
    lines = [" ".join(rng.choices(words, k=rng.randint(3, 14))) + ".\n" for _ in range(400)]
    return lines + [text for text in STRINGS if text.strip()] * 2


def tiny_byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def tiny_sentencepiece() -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=model,
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        user_defined_symbols=["<think>"],
        num_threads=1,
    )
    return model.getvalue()


def smollm2_ids(path: Path) -> list[list[int]]:
    """Ids by transformers, with the split of the published tokenizer.json.

    transformers 5.24 takes GPT-2's split for every `pre` that it does not know, `smollm` among
    them; the two differ where several numeric characters of other scripts follow each other.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    return [tokenizer.encode(text) for text in STRINGS + SPECIAL_STRINGS]


def json_ids(path: Path) -> list[list[int]]:
    backend = tokenizers.Tokenizer.from_file(str(path))
    return [backend.encode(text).ids for text in STRINGS + SPECIAL_STRINGS]


def splits(path: Path) -> list[list[str]]:
    """Pieces of each string before merging, in the byte alphabet."""
    backend = tokenizers.Tokenizer.from_file(str(path))
    normalize = backend.normalizer.normalize_str if backend.normalizer else str
    return [
        [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normalize(text))]
        for text in STRINGS
    ]


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--smollm2", type=Path, required=True)
    parser.add_argument("--gemma3", type=Path, required=True)
    parser.add_argument("--splits", nargs="*", default=[], metavar="PRE=FILE")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    byte_level, spm = tiny_byte_level(), tiny_sentencepiece()
    (args.output / "tiny_byte_level.json").write_text(byte_level.to_str(), "utf-8")
    (args.output / "tiny_spm.model").write_bytes(spm)
    processor = sentencepiece.SentencePieceProcessor(model_proto=spm)
    write(
        args.output / "expected_ids.json",
        {
            "strings": STRINGS,
            "special_strings": SPECIAL_STRINGS,
            "tiny_byte_level": [byte_level.encode(text).ids for text in STRINGS],
            "tiny_spm": [processor.encode(text) for text in STRINGS],
            "smollm2": smollm2_ids(args.smollm2),
            "gemma3": json_ids(args.gemma3),
        },
    )
    named = [entry.split("=", 1) for entry in args.splits]
    write(args.output / "expected_splits.json", {pre: splits(Path(file)) for pre, file in named})


if __name__ == "__main__":
    main()
