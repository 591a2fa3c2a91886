"""Matmuls of weights with a scale per group, on a TPU in Pallas. Knows arrays only.

XLA reads such weights in their own bits too, but its compilers reckon that multiplying group by
group takes them longer than bfloat16 weights would, in prefill many times as long. Here a tile of
weights is made wider in VMEM, a group at a time, and a tile of sums stays there for all groups.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

LANES = 128
_GROUPS = 8  # of a tile: its scales then fill whole rows of registers
_TOKENS, _OUTPUTS = (256, 128, 64, 32, 16), (512, 256, 128)  # of a tile, best first
_TILE_BYTES = 12 * 2**20  # two of each operand's tiles, within a TPU v4's 16 MiB of VMEM


def why_unsupported(num_inputs: int, num_outputs: int, group_size: int) -> str | None:
    """Returns what the kernel cannot do, with the remedy, or None."""
    if group_size % LANES or num_outputs % LANES:
        return f"{group_size=} and {num_outputs=}; use multiples of {LANES}"
    if _tile(num_inputs // group_size, num_outputs, group_size) is None:
        return (
            f"{num_inputs=} in groups of {group_size}: use groups that are a multiple of {_GROUPS} "
            "in number"
        )
    return None


def _tile(num_groups: int, num_outputs: int, size: int, num_tokens: int = 16):
    """Returns (tokens, outputs, groups) of the largest tile within the budget, or None."""
    groups = _GROUPS if num_groups % _GROUPS == 0 else num_groups
    most_tokens = -(-num_tokens // 16) * 16
    for outputs in _OUTPUTS:
        for tokens in _TOKENS:
            # Weights of 8 bits, activations and sums of 32: the most that there is.
            tile_bytes = 2 * groups * size * (outputs + 4 * tokens) + 12 * tokens * outputs
            if num_outputs % outputs == 0 and tile_bytes <= _TILE_BYTES:
                return min(tokens, most_tokens), outputs, groups
    return None


def grouped_matmul(
    values: Int[Array, "L D/g O g"],
    scales: Float[Array, "L D/g O"],
    layer: Int[Array, ""],
    x: Float[Array, "T D"],
    dtype: DTypeLike,
    interpret: Any = False,
) -> Float[Array, "T O"]:
    """Returns x times one layer's scaled weights, transposed, in `dtype`; summed in float32.

    The layer is an index, as a kernel's operand has to lie in memory by itself: a slice of a stack
    would be copied first.
    """
    _, num_groups, num_out, size = values.shape
    num_tokens = x.shape[0]
    tile = _tile(num_groups, num_out, size, num_tokens)
    assert tile is not None, why_unsupported(num_groups * size, num_out, size)
    tokens, outputs, groups = tile

    def kernel(layer_ref, values_ref, scales_ref, x_ref, out_ref, sum_ref):
        del layer_ref  # the block maps have it

        @pl.when(pl.program_id(2) == 0)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        for i in range(groups):
            product = jax.lax.dot_general(
                x_ref[:, i * size : (i + 1) * size],
                values_ref[i].astype(x_ref.dtype),
                (((1,), (1,)), ((), ())),
                precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
                preferred_element_type=jnp.float32,
            )
            sum_ref[...] += product * scales_ref[i : i + 1]

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            out_ref[...] = sum_ref[...].astype(out_ref.dtype)

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(pl.cdiv(num_tokens, tokens), num_out // outputs, num_groups // groups),
        in_specs=[
            pl.BlockSpec((None, groups, outputs, size), lambda t, o, g, layer: (layer[0], g, o, 0)),
            pl.BlockSpec((None, groups, outputs), lambda t, o, g, layer: (layer[0], g, o)),
            pl.BlockSpec((tokens, groups * size), lambda t, o, g, layer: (t, g)),
        ],
        out_specs=pl.BlockSpec((tokens, outputs), lambda t, o, g, layer: (t, o)),
        scratch_shapes=[pltpu.VMEM((tokens, outputs), jnp.float32)],
    )
    return pl.pallas_call(
        kernel,
        grid_spec=grid_spec,
        out_shape=jax.ShapeDtypeStruct((num_tokens, num_out), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
    )(layer.reshape(1), values, scales, x)
