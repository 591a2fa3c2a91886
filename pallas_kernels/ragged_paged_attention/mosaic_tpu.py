"""Ragged paged attention on a TPU in Pallas. Knows arrays only."""

from __future__ import annotations

from pallas_kernels.ragged_paged_attention.config import AttentionShape


def attend(q, rows, kv_pool, *args, **settings):
    """See `api._module_of`."""
    raise NotImplementedError


def why_unsupported(shape: AttentionShape, device_kind: str) -> str | None:
    """See `api._module_of`."""
    raise NotImplementedError
