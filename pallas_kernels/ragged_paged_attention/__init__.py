"""Attention of ragged rows (prefill chunks and decode tokens) over paged keys and values."""

from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention

__all__ = ["ragged_paged_attention"]
