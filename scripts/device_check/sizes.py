"""How large everything in the check is: once for an accelerator, once to try the check itself on a
CPU. Knows numbers only; standard library, as the part in PyTorch's Python reads it too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes, tokens and counts of all parts.

    Attributes:
      copy_bytes, matmul_width: of the two ceilings that are measured.
      heads: the name in workloads.HEADS whose attention is timed; the next three are its figures.
      decode: (rows, context) of decode steps; prefill: (chunk, tokens before it).
      pool_bytes: most of the pool of a timed step.
      repeats, calls: timed repeats, and calls queued in each.
      model: a Hugging Face config.json of the engine's model.
      engine_rows: decode rows at which the engine is timed.
      context: tokens of each prompt; long_prompt: of the one that comes while others decode.
      token_budget: most tokens in a step; engine_steps: timed decode steps.
    """

    copy_bytes: int
    matmul_width: int
    heads: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    decode: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int], ...]
    pool_bytes: int
    repeats: int
    calls: int
    model: dict
    engine_rows: tuple[int, ...]
    context: int
    long_prompt: int
    token_budget: int
    engine_steps: int


LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
FULL = Sizes(
    copy_bytes=2**32,
    matmul_width=8192,
    heads="llama3-8b",
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    page_size=64,
    decode=((64, 4096), (16, 4096), (1, 8192), (256, 2048), (64, 1024), (1, 1024)),
    prefill=((2048, 0), (8192, 0), (2048, 8192), (512, 0)),
    pool_bytes=2**33,
    repeats=5,
    calls=4,
    model=LLAMA_3_8B,
    engine_rows=(1, 16, 64, 256),
    context=1024,
    long_prompt=8192,
    token_budget=2048,
    engine_steps=48,
)
SMOKE = Sizes(
    copy_bytes=2**22,
    matmul_width=128,
    heads="smollm2",
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    page_size=16,
    decode=((4, 64),),
    prefill=((32, 16),),
    pool_bytes=2**20,
    repeats=2,
    calls=1,
    model=LLAMA_3_8B
    | {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
    engine_rows=(1, 4),
    context=40,
    long_prompt=200,
    token_budget=64,
    engine_steps=6,
)


def decode_name(num_rows: int, context: int) -> str:
    return f"decode_{num_rows}_rows_{context}"


def prefill_name(chunk: int, before: int) -> str:
    return f"prefill_{chunk}_after_{before}"


def num_copies(num_rows: int, kv_len: int, sizes: Sizes) -> int:
    """Returns how many sets of bfloat16 keys and values to rotate among: more than a cache holds,
    16 at most."""
    kv_bytes = 4 * num_rows * kv_len * sizes.num_kv_heads * sizes.head_dim
    return max(1, min(16, 2**28 // kv_bytes))
