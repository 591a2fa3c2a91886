"""Ragged paged attention on a Hopper GPU in Pallas. Knows arrays only."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.devices import DEVICES
from pallas_kernels.kv_layout import PoolLayout
from pallas_kernels.ragged_paged_attention.config import AttentionShape, GpuConfig
from pallas_kernels.ragged_paged_attention.kv_write import scatter

_KV_DTYPES = ("bfloat16", "int8", "float8_e4m3fn")


def attend(
    q, rows, kv_pool, layer, kv_lens, page_indices, cu_q_lens, distribution, *,
    window, soft_cap, sinks, layout: PoolLayout, config: GpuConfig, decode_only: bool, interpret,
):  # fmt: skip
    """See `api._module_of`."""
    # Imported here: the kernels need a jax that `why_unsupported` must be able to do without.
    from pallas_kernels.ragged_paged_attention.mosaic_gpu_decode import decode
    from pallas_kernels.ragged_paged_attention.mosaic_gpu_prefill import prefill

    del layout
    num_tokens, num_rows = q.shape[0], kv_lens.shape[0]
    settings = dict(
        window=window, soft_cap=soft_cap, sinks=sinks, config=config, interpret=interpret
    )
    kv_pool = scatter(rows, kv_pool, layer, kv_lens, page_indices, cu_q_lens)

    # Decode rows come first and have one token each: row s is token s.
    is_decode = jnp.diff(cu_q_lens) > 0
    if not decode_only:
        is_decode &= jnp.arange(num_rows) < distribution[0]
    span = min(num_rows, num_tokens)
    kv_lens_of_decode = jnp.where(is_decode, kv_lens, 0)[:span]
    out = decode(q[:span], kv_pool, layer, kv_lens_of_decode, page_indices[:span], **settings)
    if decode_only:
        return out, kv_pool
    out = jnp.pad(out, ((0, num_tokens - span), (0, 0), (0, 0), (0, 0)))
    out = prefill(
        q, out, kv_pool, layer, kv_lens, page_indices, cu_q_lens, distribution, **settings
    )
    return out, kv_pool


def why_unsupported(shape: AttentionShape, device_kind: str) -> str | None:
    """See `api._module_of`."""
    reason = _why_unsupported(shape, device_kind)
    return reason and f"the mosaic_gpu backend {reason}; use attention_backend=xla"


def _why_unsupported(shape: AttentionShape, device_kind: str) -> str | None:
    hopper = [kind for kind in DEVICES if kind.startswith(("NVIDIA H", "NVIDIA GH"))]
    if jax.__version_info__ < (0, 11):
        return f"needs jax 0.11 or later (Python 3.12 or later), not {jax.__version__}"
    if device_kind not in hopper:
        return f"needs a Hopper GPU ({', '.join(hopper)}), not {device_kind!r}"
    if shape.q_dtype != "bfloat16":
        return f"computes in bfloat16, not {shape.q_dtype}"
    if shape.kv_dtype not in _KV_DTYPES:
        return f"reads pages of {', '.join(_KV_DTYPES)}, not {shape.kv_dtype}"
    if shape.width % 64 or not 64 <= shape.width <= 256:
        return f"takes heads of up to 256 lanes in multiples of 64, not {shape.width}"
    if shape.kv_bytes == 1 and shape.width > 192:  # prefill holds them twice, and registers spill
        return f"reads {shape.kv_dtype} pages of up to 192 lanes, not {shape.width}"
    if shape.group > 16:
        return f"takes up to 16 query heads per KV head, not {shape.group}"
    if shape.page_size % 8 or (64 % shape.page_size and shape.page_size % 64):
        return f"takes pages of 8, 16, 32 or a multiple of 64 tokens, not {shape.page_size}"
    return None
