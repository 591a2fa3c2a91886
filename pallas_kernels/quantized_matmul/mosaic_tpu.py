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
_TOKENS, _OUTPUTS, _GROUPS = 256, 512, 8  # of a tile, at most


def why_unsupported(num_outputs: int, group_size: int) -> str | None:
    """Returns what the kernel cannot do, with the remedy, or None."""
    if group_size % LANES or num_outputs % LANES:
        return f"{group_size=} and {num_outputs=}; use multiples of {LANES}"
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
    # A tile's scales fill whole rows of registers, or are all that there are.
    groups = _GROUPS if num_groups % _GROUPS == 0 else num_groups
    outputs = max(n for n in (LANES, 2 * LANES, _OUTPUTS) if num_out % n == 0)
    tokens = min(_TOKENS, -(-num_tokens // 16) * 16)

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
