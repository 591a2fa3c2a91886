"""How attention heads are laid out over the devices of a tensor-parallel group. Knows counts only.

Each device must hold the same whole number of KV heads, each with the same number of query heads.
Where a model's counts do not divide, KV heads are repeated or heads of zeros are added; the
result of attention stays the same, as heads of zeros meet zero columns of the output projection.
"""

from __future__ import annotations

from dataclasses import dataclass

from jserve.errors import ConfigError
from jserve.models.config import ModelConfig

ZERO_HEAD = -1


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Which of a model's heads sits where. Made by `head_layout`.

    Attributes:
      num_kv_heads: K as laid out; a multiple of tensor_parallel_size.
      group_size: G as laid out: query heads per KV head.
      kv_heads: per laid-out KV head, the model's KV head it holds, or ZERO_HEAD.
      query_heads: per laid-out KV head, the model's query heads of its group, or ZERO_HEAD.
      tensor_parallel_size: devices that share the heads.
    """

    num_kv_heads: int
    group_size: int
    kv_heads: tuple[int, ...]
    query_heads: tuple[tuple[int, ...], ...]
    tensor_parallel_size: int = 1

    @property
    def is_identity(self) -> bool:
        """True if heads are the model's own, in its own order."""
        queries = [head for group in self.query_heads for head in group]
        kv_heads = list(range(len(self.kv_heads)))  # copies of a head have equal queries
        return queries == list(range(len(queries))) and list(self.kv_heads) == kv_heads


def head_layout(config: ModelConfig, tensor_parallel_size: int = 1) -> HeadLayout:
    """Returns the layout of `config`'s heads over `tensor_parallel_size` devices (tp).

    With N query and K KV heads: K divisible by tp stays as it is; if tp is a multiple of K, each
    KV head is repeated tp / K times and its group is split among the copies; otherwise heads of
    zeros fill K up to a multiple of tp.
    # N 9, K 3, tp 2 -> K 4 (one of zeros), G 3;  N 4, K 1, tp 2 -> K 2 (copies), G 2

    Raises:
      ConfigError: tp is out of range or does not divide the MLP width; lists the sizes that work.
    """
    tp = tensor_parallel_size
    num_heads, num_kv_heads, group = config.num_heads, config.num_kv_heads, config.group_size
    if not 1 <= tp <= num_heads or config.intermediate_size % tp:
        sizes = [n for n in range(1, num_heads + 1) if config.intermediate_size % n == 0]
        raise ConfigError(
            f"tensor_parallel_size={tp} does not fit {num_heads} query heads and MLP width "
            f"{config.intermediate_size}; use one of {', '.join(map(str, sizes))}"
        )
    copies = tp // num_kv_heads if num_kv_heads < tp and tp % num_kv_heads == 0 else 1
    laid_group = -(-group // copies)
    kv_heads, query_heads = [], []
    for kv_head in range(num_kv_heads):
        group_end = (kv_head + 1) * group
        for copy in range(copies):
            start = kv_head * group + copy * laid_group
            heads = range(start, start + laid_group)
            kv_heads.append(kv_head)
            query_heads.append(tuple(h if h < group_end else ZERO_HEAD for h in heads))
    while len(kv_heads) % tp:
        kv_heads.append(ZERO_HEAD)
        query_heads.append((ZERO_HEAD,) * laid_group)
    return HeadLayout(len(kv_heads), laid_group, tuple(kv_heads), tuple(query_heads), tp)
