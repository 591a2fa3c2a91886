"""Block sizes of ragged paged attention, per backend. Knows shapes, not arrays."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class XlaConfig:
    """Block sizes of the XLA backend, in tokens unless said otherwise.

    Attributes:
      decode_items: blocks of up to 16 KV tokens met in one iteration of the decode loop.
      prefill_tile: query tokens of one row in one tile of the prefill path.
      prefill_block: KV tokens met by a tile in one iteration.
    """

    decode_items: int
    prefill_tile: int
    prefill_block: int


def xla_config(num_tokens: int, num_rows: int, page_size: int) -> XlaConfig:
    """Returns block sizes for a bucket of `num_tokens` tokens and `num_rows` rows."""
    return XlaConfig(
        decode_items=min(128, max(16, 4 * num_rows)),
        prefill_tile=min(128, -(-num_tokens // 8) * 8),
        prefill_block=max(128, page_size),
    )
