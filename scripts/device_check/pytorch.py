"""Part 2 on the other side: PyTorch's attention on the same steps. Runs in whichever Python has
PyTorch, and knows nothing of JAX."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

import torch
import torch.nn.functional as F

from scripts.device_check.record import Record
from scripts.device_check.sizes import Sizes, decode_name, num_copies, prefill_name


def run(record: Record, sizes: Sizes, is_small: bool, out: Path) -> None:
    """See `__main__`: records microseconds of a layer. Keys and values are dense, without pages."""
    del is_small, out
    decode = [(decode_name(*step), step[0], 1, step[1]) for step in sizes.decode]
    prefill = [(prefill_name(*step), 1, step[0], sum(step)) for step in sizes.prefill]
    # By turns: FlexAttention compiles each step for seconds, and the time may not do for all.
    steps = [step for pair in zip_longest(decode, prefill) for step in pair if step]
    for form, attend in {"torch_sdpa": _sdpa, "torch_flex": _flex}.items():
        for name, num_rows, q_len, kv_len in steps:
            with record.guard(f"{name} {form}"):
                us = _layer_us(attend(q_len, kv_len), num_rows, q_len, kv_len, sizes)
                kv_bytes = 4 * num_rows * kv_len * sizes.num_kv_heads * sizes.head_dim
                pairs = num_rows * sum(range(kv_len - q_len + 1, kv_len + 1))
                flops = 4 * pairs * sizes.num_heads * sizes.head_dim
                rate = {"gb_per_s": kv_bytes / us / 1e3} if q_len == 1 else {}
                rate |= {"tflop_per_s": flops / us / 1e6} if q_len > 1 else {}
                record.add(f"{name} {form}", form=form, us=us, **rate)


def _sdpa(q_len: int, kv_len: int) -> Callable:
    if q_len in (1, kv_len):
        is_causal = q_len > 1
        return lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, enable_gqa=True
        )
    from torch.nn.attention.bias import causal_lower_right

    mask = causal_lower_right(q_len, kv_len)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _flex(q_len: int, kv_len: int) -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if _device() == "cpu":
        raise NotImplementedError("is compiled for GPUs here; a CPU would need a C++ compiler")
    torch.compiler.reset()  # else it gives up after a few shapes
    attention = torch.compile(flex_attention, dynamic=False)
    if q_len == 1:
        return lambda q, k, v: attention(q, k, v, enable_gqa=True)

    def is_seen(batch, head, q_index, kv_index):
        return q_index + (kv_len - q_len) >= kv_index

    mask = create_block_mask(is_seen, None, None, q_len, kv_len, device=_device())
    return lambda q, k, v: attention(q, k, v, block_mask=mask, enable_gqa=True)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _layer_us(attend: Callable, num_rows: int, q_len: int, kv_len: int, sizes: Sizes) -> float:
    """Returns the median microseconds of one call; calls rotate over more than a cache holds."""

    def normal(num_heads: int, length: int):
        shape = (num_rows, num_heads, length, sizes.head_dim)
        return torch.randn(shape, dtype=torch.bfloat16, device=_device())

    q = normal(sizes.num_heads, q_len)
    caches = [
        (normal(sizes.num_kv_heads, kv_len), normal(sizes.num_kv_heads, kv_len))
        for _ in range(num_copies(num_rows, kv_len, sizes))
    ]
    times = []
    with torch.inference_mode():
        for _ in range(sizes.repeats + 1):
            begin = time.perf_counter()
            for _ in range(sizes.calls):
                for k, v in caches:
                    attend(q, k, v)
            if _device() == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) / (sizes.calls * len(caches)))
    return statistics.median(times[1:]) * 1e6
