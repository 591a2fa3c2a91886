"""How byte-level vocabularies in GGUF files split text before merging, by the file's `pre` name.
Knows regular expressions only: no vocabularies and no files.

The names are those of llama.cpp's converter (`tokenizer.ggml.pre`); the splits are those of the
tokenizer.json files that the names were given for.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """How one kind of byte-level vocabulary treats text.

    Attributes:
      splits: expressions whose matches become pieces of their own, applied one after the other.
      gpt2_split: split as GPT-2 does after that.
      single_digits: every numeric character is a piece.
      nfc: text is brought to Unicode's composed form first.
      ignore_merges: a piece that is a token as a whole is that token, whatever the merges say.
      add_bos: whether texts begin with BOS where the file does not say.
    """

    splits: tuple[str, ...] = ()
    gpt2_split: bool = False
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(split), "isolated") for split in self.splits
        ]
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2_split))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NO_WORD = r"[^\r\n\p{L}\p{N}]?"


def _words_split(digits: str) -> str:
    """The split that cl100k_base began: contractions, words, digits, punctuation, spaces."""
    return (
        rf"{_CONTRACTION}|{_NO_WORD}\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased_split(digits: str, ending: str) -> str:
    """The split that o200k_base began: as above, but a word also ends where its case does."""
    return (
        rf"{_NO_WORD}{_UPPER}*{_LOWER}+{ending}|{_NO_WORD}{_UPPER}+{_LOWER}*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_GPT2 = PreTokenization(gpt2_split=True)
_DIGITS_GPT2 = PreTokenization(gpt2_split=True, single_digits=True)
_WORDS = PreTokenization(splits=(_words_split(r"\p{N}{1,3}"),))
_LLAMA3 = PreTokenization(splits=_WORDS.splits, ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenization(splits=(_words_split(r"\p{N}"),), nfc=True)
_QWEN35 = PreTokenization(
    splits=(
        rf"{_CONTRACTION}|{_NO_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    nfc=True,
)
_GPT4O = PreTokenization(
    splits=(_cased_split(r"\p{N}{1,3}", f"{_CONTRACTION}?"),), ignore_merges=True
)
_TEKKEN = PreTokenization(splits=(_cased_split(r"\p{N}", ""),), ignore_merges=True, add_bos=True)
_DEEPSEEK_V3 = PreTokenization(
    splits=(
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
    ),
    add_bos=True,
)

_DEEPSEEK_CODER = PreTokenization(
    splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"),
    single_digits=True,
    add_bos=True,
)
_FALCON = PreTokenization(
    splits=(
        r"[\p{P}$+<=>^~|`]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"[0-9]{3}",
    )
)

PRE_TOKENIZATIONS: dict[str, PreTokenization] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "codeshell": _DIGITS_GPT2,
    "olmo": PreTokenization(gpt2_split=True, nfc=True),
    "mpt": PreTokenization(gpt2_split=True, nfc=True),
    "command-r": PreTokenization(gpt2_split=True, single_digits=True, nfc=True),
    "falcon": _FALCON,
    "dbrx": _WORDS,
    "smaug-bpe": _WORDS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "lfm2": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "tekken": _TEKKEN,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
}
