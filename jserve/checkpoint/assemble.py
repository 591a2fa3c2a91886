"""Builds one parameter on the host from its tensors. Knows numpy arrays, no files or devices.

A parameter is filled block by block from its tensors, so that host memory holds one parameter and
a few megabytes of its source at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from jserve.checkpoint.source import Tensor
from jserve.models.config import ModelConfig
from jserve.models.head_layout import ZERO_HEAD, HeadLayout
from jserve.models.params import is_norm

BLOCK_BYTES = 8 * 2**20  # of a source tensor, counted as float32


def assemble(
    name: str,
    tensors: Sequence[Tensor],
    shape: tuple[int, ...],
    dtype: np.dtype,
    config: ModelConfig,
    layout: HeadLayout,
) -> np.ndarray:
    """Returns parameter `name` with `shape`, made of `tensors` in the order `mapping.py` gives.

    `dtype` is that of weights; norm scales are float32 with the family's offset added.
    """
    out = np.zeros(shape, np.float32 if is_norm(name) else dtype)
    if name in ("qkv", "qkv_bias"):
        _fill_heads(out, tensors, layout, config.head_dim)
    elif name == "o":
        heads = out.reshape(len(out), layout.num_kv_heads, layout.group_size, config.head_dim)
        _fill_output(heads, tensors[0], layout)
    elif name in ("gate_up", "gate_up_bias"):
        for part, tensor in zip(out, tensors, strict=True):
            _fill(part, tensor)
    else:
        _fill(out, tensors[0])
        if is_norm(name):
            out += np.float32(config.norm_offset)
    return out


def _blocks(tensor: Tensor) -> Iterator[tuple[slice, np.ndarray]]:
    """Yields a tensor's rows a few megabytes at a time, with where they belong."""
    rows = tensor.shape[0]
    step = max(1, BLOCK_BYTES // (4 * math.prod(tensor.shape[1:])))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield slice(start, stop), tensor.read_rows(start, stop)


def _fill(out: np.ndarray, tensor: Tensor) -> None:
    for rows, block in _blocks(tensor):
        out[rows] = block


def _fill_heads(
    out: np.ndarray, tensors: Sequence[Tensor], layout: HeadLayout, head_dim: int
) -> None:
    """Fills out [K, G+2, H, ...] with each KV head's query heads, its k and its v."""

    def put(at: tuple[int, int], tensor: Tensor, head: int) -> None:
        if head != ZERO_HEAD:
            out[at] = tensor.read_rows(head * head_dim, (head + 1) * head_dim)

    q, k, v = tensors
    G = layout.group_size
    heads = zip(layout.kv_heads, layout.query_heads, strict=True)
    for row, (kv_head, query_heads) in enumerate(heads):
        for column, query_head in enumerate(query_heads):
            put((row, column), q, query_head)
        put((row, G), k, kv_head)
        put((row, G + 1), v, kv_head)


def _fill_output(out: np.ndarray, tensor: Tensor, layout: HeadLayout) -> None:
    """Fills out [D, K, G, H] from the output projection [D, N * H]."""
    head_dim = out.shape[-1]
    for rows, block in _blocks(tensor):
        by_head = block.reshape(len(block), -1, head_dim)
        for row, query_heads in enumerate(layout.query_heads):
            for column, query_head in enumerate(query_heads):
                if query_head != ZERO_HEAD:
                    out[rows, row, column] = by_head[:, query_head]
