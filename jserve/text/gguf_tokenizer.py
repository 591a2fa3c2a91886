"""Builds a tokenizer from the metadata of a GGUF file. Knows the metadata's keys (GGUF
specification, "Tokenizer"), not the file: no tensors, no paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from jserve.errors import CheckpointError
from jserve.text.gguf_pre_tokenizers import PRE_TOKENIZATIONS
from jserve.text.tokenizer import Tokenizer

# tokenizer.ggml.token_type, as in sentencepiece_model.proto
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5

KINDS = ("gpt2", "llama")
SPACE = "▁"  # U+2581, how SentencePiece spells a space


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that a GGUF file's key-value metadata describe.

    Kind `gpt2` is byte-level BPE, split as `tokenizer.ggml.pre` says; kind `llama` is
    SentencePiece's BPE with byte fallback, whose merges follow from the tokens' scores.

    Raises:
      CheckpointError: naming the missing or contradictory key, or an unknown kind or `pre`.
    """
    backend = backend_from_gguf(metadata)
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    eos = [_token_id(metadata, name, num_tokens) for name in ("eos", "eot", "eom")]
    add_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        rules = PRE_TOKENIZATIONS.get(metadata.get("tokenizer.ggml.pre", ""))
        is_llama = metadata["tokenizer.ggml.model"] == "llama"
        add_bos = is_llama or (rules is not None and rules.add_bos)
    return Tokenizer(
        backend,
        bos_token_id=_token_id(metadata, "bos", num_tokens),
        eos_token_ids=[token_id for token_id in eos if token_id is not None],
        add_bos=bool(add_bos),
        chat_template=metadata.get("tokenizer.chat_template"),
        vocab_size=num_tokens,
    )


def backend_from_gguf(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The vocabulary alone of `tokenizer_from_gguf`, without the settings around it."""
    try:
        return _backend(metadata)
    except (TypeError, AttributeError) as error:  # an item of another kind than its list's
        raise CheckpointError(f"GGUF metadata tokenizer.ggml.* is malformed: {error}") from error


def _backend(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    kind = _get(metadata, "model", str)
    if kind not in KINDS:
        raise CheckpointError(
            f"tokenizer.ggml.model={kind!r} is not supported; known: {', '.join(KINDS)}"
        )
    tokens = _get(metadata, "tokens", list)
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.tokens has {len(tokens)} entries, token_type has {len(types)}"
        )
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens, types)
    else:
        tokens = [token.replace(" ", SPACE) for token in tokens]  # user-defined ones have spaces
        backend = _sentencepiece(metadata, tokens, types)
    _add_tokens(backend, tokens, types)
    return backend


def _get(metadata: Mapping[str, Any], name: str, kind: type) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, kind):
        raise CheckpointError(
            f"GGUF metadata tokenizer.ggml.{name} is {type(value).__name__}, not {kind.__name__}"
        )
    return value


def _token_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is not None and not (isinstance(token_id, int) and 0 <= token_id < num_tokens):
        raise CheckpointError(
            f"tokenizer.ggml.{name}_token_id={token_id!r} is none of the {num_tokens} tokens"
        )
    return token_id


def _vocab(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Tokens and ids. Unused ones (padding to a round size, mostly) are left without a text."""
    return {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != UNUSED
    }


def _bpe(**fields: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(**fields))
    except Exception as error:  # the Rust library raises bare Exceptions
        raise CheckpointError(f"GGUF tokenizer's merges do not fit its tokens: {error}") from error


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]
) -> tokenizers.Tokenizer:
    """Byte-level BPE (Radford et al. 2019, "Language Models are Unsupervised Multitask
    Learners")."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    rules = PRE_TOKENIZATIONS.get(pre)
    if rules is None:
        raise CheckpointError(
            f"tokenizer.ggml.pre={pre!r} is not supported; known: {', '.join(PRE_TOKENIZATIONS)}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in _get(metadata, "merges", list)]
    backend = _bpe(vocab=_vocab(tokens, types), merges=merges, ignore_merges=rules.ignore_merges)
    if rules.nfc:
        backend.normalizer = rules.normalizer()
    backend.pre_tokenizer = rules.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]
) -> tokenizers.Tokenizer:
    """SentencePiece's BPE (Kudo and Richardson 2018, arXiv 1808.06226)."""
    scores = _get(metadata, "scores", list)
    if len(scores) != len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.tokens has {len(tokens)} entries, scores has {len(scores)}"
        )
    vocab = _vocab(tokens, types)
    unknown = _token_id(metadata, "unknown", len(tokens))
    backend = _bpe(
        vocab=vocab,
        merges=_merges_from_scores(tokens, vocab, scores, types),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    steps: list[Any] = [normalizers.Replace(" ", SPACE)]
    decoding: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SPACE))
        decoding.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(decoding)
    return backend


def _merges_from_scores(
    tokens: Sequence[str], vocab: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Merges, first ones first, that make BPE join what SentencePiece would.

    SentencePiece joins the neighbours whose union has the best score, so every split of a token
    into two tokens is a merge, ranked by the token's score (0, the best, for user-defined ones).
    Equal scores are ranked by the longer left part, then the longer right part, as in the
    conversions that published tokenizer.json files come from. Half a second per 100,000 tokens.
    """
    score = [
        0.0 if kind == USER_DEFINED else value for value, kind in zip(scores, types, strict=True)
    ]
    ranked = sorted(vocab.values(), key=score.__getitem__, reverse=True)
    merges: list[tuple[str, str]] = []
    for _, ids in groupby(ranked, key=score.__getitem__):
        tied = [tokens[token_id] for token_id in ids]
        splits = [
            (left, right)
            for token in tied
            for cut in range(len(token) - 1, 0, -1)
            if (right := token[cut:]) in vocab and (left := token[:cut]) in vocab
        ]
        if len(tied) > 1:
            splits.sort(key=lambda split: (len(split[0]), len(split[1])), reverse=True)
        merges += splits
    return merges


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Makes control and user-defined tokens whole wherever their text stands."""
    kinds = (CONTROL, UNKNOWN, USER_DEFINED)
    added = [
        AddedToken(token, normalized=False, special=kind != USER_DEFINED)
        for token, kind in zip(tokens, types, strict=True)
        if kind in kinds and token
    ]
    backend.add_tokens(added)
