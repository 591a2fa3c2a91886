"""The least time that a device can take for given work: bytes over bandwidth, FLOPs over rate.

Knows counts and device figures (Roofline, Williams, Waterman and Patterson, CACM 2009), no arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pallas_kernels.devices import DeviceSpec
from pallas_kernels.ragged_paged_attention.config import AttentionShape


@dataclass(frozen=True, slots=True)
class Work:
    """What cannot be avoided: bytes to and from memory, each once, and multiply-adds as two."""

    hbm_bytes: int
    flops: int

    def seconds(self, spec: DeviceSpec) -> float:
        return max(self.hbm_bytes / spec.hbm_bytes_per_s, self.flops / spec.bf16_flop_per_s)


def attention_work(shape: AttentionShape, rows: Sequence[tuple[int, int]], window: int = 0) -> Work:
    """Returns the work of one layer's attention over `rows` of (kv_len, q_len), for one device.

    Keys and values that some query of a row sees are read once, this step's are written, queries
    are read and outputs written. Padding heads and lanes count: kernels move them.
    """
    tokens = kv_tokens = pairs = 0
    for kv_len, q_len in rows:
        tokens += q_len
        kv_tokens += min(kv_len, window + q_len - 1) if window else kv_len
        pairs += _seen(kv_len, window) - _seen(kv_len - q_len, window)
    kv_row = shape.pool_rows * shape.width * shape.kv_bytes
    q_row = shape.num_kv_heads * shape.group * shape.width * shape.q_bytes
    return Work(
        hbm_bytes=(kv_tokens + tokens) * kv_row + 2 * tokens * q_row,
        flops=4 * pairs * shape.num_kv_heads * shape.group * shape.width,
    )


def _seen(num_tokens: int, window: int) -> int:
    """Keys that the first `num_tokens` positions of a row see, added up."""
    if not window or num_tokens <= window:
        return num_tokens * (num_tokens + 1) // 2
    return window * (window + 1) // 2 + (num_tokens - window) * window
