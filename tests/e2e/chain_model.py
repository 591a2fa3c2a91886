"""Writes tiny Llama checkpoints whose output is known: a chain model, which follows a given walk
through its vocabulary, and a random one of the same shape. Knows files: no engine.

The chain model's attention and MLP add nothing to the residual stream, its embeddings are one-hot
and its LM head is a permutation-like table, so that token t is always followed by the token that
the table names. Both have the same array shapes and so share compiled steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jserve.text.tokenizer import BYTE_ALPHABET

VOCAB = 384  # V of the model: bytes, then tokens by name, then ids that the tokenizer lacks
MAX_MODEL_LEN = 4096
LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 2, 2, 1, 16, 32
NUM_BYTES = 256
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '>' }}{% endif %}"
)


@dataclass(frozen=True)
class TinyModel:
    """A folder in Hugging Face's form and the ids of its named tokens."""

    folder: Path
    token_ids: Mapping[str, int]

    def ids(self, *names: str) -> list[int]:
        return [self.token_ids[name] for name in names]


def write_chain_model(
    folder: Path,
    walks: Sequence[Sequence[str]],
    *,
    special: Sequence[str] = (),
    eos: Sequence[str] = (),
) -> TinyModel:
    """Writes a model that walks: after a walk's first token come the others, then the last again.

    Tokens are named by their text; those longer than one byte are added to the vocabulary, those
    in `special` as special tokens. Every byte that no walk holds is followed by the next byte,
    "z" and 255 by themselves. `eos` names the ids of generation_config.json.
    """
    names = dict.fromkeys(name for walk in walks for name in walk)
    token_ids = _write_tokenizer(folder, [n for n in names if len(n.encode()) > 1], special)
    follower = np.arange(VOCAB)
    follower[: NUM_BYTES - 1] = np.arange(1, NUM_BYTES)
    follower[ord("z")] = ord("z")
    for walk in walks:
        ids = [token_ids[name] for name in walk]
        follower[ids] = [*ids[1:], ids[-1]]
    weights = _weights(np.random.default_rng(5))
    weights["model.embed_tokens.weight"] = np.eye(VOCAB, dtype=np.float32)
    weights["lm_head.weight"] = np.eye(VOCAB, dtype=np.float32)[follower].T.copy()
    for name, value in weights.items():
        if "o_proj" in name or "down_proj" in name:
            value[...] = 0
    _write_model(folder, weights, [token_ids[name] for name in eos])
    return TinyModel(folder, token_ids)


def write_random_model(
    folder: Path, *, eos: Sequence[str] = (), poison: Mapping[int, float] | None = None
) -> TinyModel:
    """Writes a model of random weights, whose output depends on every token before it. All numbers
    of the embeddings of the token ids in `poison` are what that says."""
    token_ids = _write_tokenizer(folder, eos, eos)
    weights = _weights(np.random.default_rng(7))
    for token_id, number in (poison or {}).items():
        weights["model.embed_tokens.weight"][token_id] = number
    _write_model(folder, weights, [token_ids[name] for name in eos])
    return TinyModel(folder, token_ids)


def _weights(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Float32 weights; each matrix keeps the size of what it multiplies."""

    def matrix(rows: int, columns: int) -> np.ndarray:
        scale = 1.5 / columns**0.5
        return (random.standard_normal((rows, columns)) * scale).astype(np.float32)

    D = VOCAB
    weights = {
        "model.embed_tokens.weight": random.standard_normal((VOCAB, D)).astype(np.float32),
        "model.norm.weight": np.ones(D, np.float32),
        "lm_head.weight": matrix(VOCAB, D),
    }
    for layer in range(LAYERS):
        of = f"model.layers.{layer}"
        weights |= {
            f"{of}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, D),
            f"{of}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, D),
            f"{of}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, D),
            f"{of}.self_attn.o_proj.weight": matrix(D, HEADS * HEAD_DIM),
            f"{of}.mlp.gate_proj.weight": matrix(MLP, D),
            f"{of}.mlp.up_proj.weight": matrix(MLP, D),
            f"{of}.mlp.down_proj.weight": matrix(D, MLP),
            f"{of}.input_layernorm.weight": np.ones(D, np.float32),
            f"{of}.post_attention_layernorm.weight": np.ones(D, np.float32),
        }
    return weights


def _write_model(folder: Path, weights: dict[str, np.ndarray], eos: list[int]) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": VOCAB,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))


def _write_tokenizer(folder: Path, names: Sequence[str], special: Sequence[str]) -> dict[str, int]:
    """Writes a byte-level BPE vocabulary without merges: text becomes its bytes, and the named
    tokens come only out of the model (special ones out of text too)."""
    folder.mkdir(parents=True, exist_ok=True)
    spelled = {byte: char for char, byte in BYTE_ALPHABET.items()}
    vocab = {spelled[byte]: byte for byte in range(NUM_BYTES)}
    plain = [name for name in names if name not in special]
    for name in plain:
        vocab["".join(spelled[byte] for byte in name.encode())] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    token_ids = {chr(byte): byte for byte in range(128)}
    token_ids |= {name: NUM_BYTES + i for i, name in enumerate([*plain, *special])}
    assert tokenizer.get_vocab_size() <= VOCAB, "too many named tokens"
    return token_ids
