"""A decoder's architecture in one frozen record. Knows numbers, not tensors, files or families."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding (arXiv 2104.09864) with one of the context extensions.

    `kind` is "default", "linear", "dynamic", "llama3" or "yarn"; the fields after it are those of
    Hugging Face's `rope_scaling` of that kind.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that tells one supported decoder from another.

    Letters as elsewhere: L layers, D width, N query heads, K KV heads, H head_dim, F mlp width,
    V vocabulary.
    """

    family: str
    vocab_size: int  # V, as the embedding has it
    num_layers: int  # L
    hidden_size: int  # D
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    intermediate_size: int  # F
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    rope_local: RopeConfig | None = None  # of sliding-window layers, where it differs
    activation: str = "silu"  # or "gelu_tanh"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # Gemma: a norm after attention and after the MLP too
    norm_offset: float = 0.0  # Gemma checkpoints store norm scales minus one
    embedding_scale: float = 1.0
    query_scale: float = 1.0  # multiplies q . k
    attn_soft_cap: float | None = None
    final_soft_cap: float | None = None
    sliding_windows: tuple[int, ...] = ()  # per layer; 0 is global attention
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def group_size(self) -> int:
        """G, query heads per KV head."""
        return self.num_heads // self.num_kv_heads
