"""Finds what an int8 KV pool's numbers are multiplied by: runs the model over a text and looks at
the keys and values that come. Knows arrays and token ids, no requests.

Scales are static and per lane, as some lanes of keys are many times as wide as others: written once
with a page, a number means the same to whoever reads it, so that hits in the prefix cache, chunks
and swapped pages cost no thought. fp8 needs none of this: its own exponents span what comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jserve.models.decoder import decoder_apply
from jserve.models.head_layout import HeadLayout
from jserve.runner.kv_cache import layout_of, make_pool
from jserve.runner.mesh import MODEL_AXIS
from jserve.runner.step import StepOptions, StepTokens, make_attend
from scheduler.bucket import Bucket

NUM_TOKENS = 512  # that are looked at
HEADROOM = 1.5  # of the largest magnitudes seen; what is larger still is clipped
LARGEST_INT8 = 127
# Of many kinds, as lanes that lie still in prose may not in code.
TEXT = """\
The harbour was quiet when Marta came down the stairs at 6:45, and the last of the fog still lay
between the boats. "You are early," said the old man at the gate; he did not look up from his
newspaper. She counted what was left in her purse: 3 coins, 12.50 in notes, one ticket to Oslo.

# Storage of heat in a pond
Water takes 4.18 kJ to warm one kilogram by 1 °C, so a pond of 2,000 m3 that cools from 18 to 11
degrees gives back about 58 GJ, or 16 MWh. (a) Ice floats. (b) Salt melts it. (c) Both. Answer: (c).

def moving_mean(values: list[float], width: int = 3) -> list[float]:
    total, means = sum(values[:width]), []
    for i in range(width, len(values)):
        means.append(total / width)
        total += values[i] - values[i - width]
    return [*means, total / width]

{"user": {"id": 90417, "name": "R. Okafor", "tags": ["new", "eu-west"], "active": true},
 "url": "https://example.org/a?b=1&c=%20", "score": -0.731, "note": null}

SELECT city, COUNT(*) FROM visits WHERE year >= 2019 GROUP BY city ORDER BY 2 DESC LIMIT 10;

User: Please translate "Where is the station?" into German, French, Spanish and Chinese.
Assistant: Wo ist der Bahnhof? Où est la gare ? ¿Dónde está la estación? 车站在哪里？ Thank you!!
Где находится вокзал? 駅はどこですか。

<h1>Contents</h1><ul><li>Part I</li><li>Part II</li></ul>
| item | price |
|------|------:|
| tea  |  2.40 |

In 1687 the book appeared in three parts, and few people read it; yet by the middle of the next
century its laws were taught from Lisbon to Saint Petersburg. Let x^2 + y^2 = r^2, with r > 0.
"""


def int8_scales(
    params: Any, options: StepOptions, heads: HeadLayout, page_size: int, token_ids: Sequence[int]
) -> Float[Array, "L 2 K H"]:
    """Returns the scales of keys and values, split over the mesh as heads are.

    Args:
      params, options, heads: of the engine.
      page_size: of its pool; the one made here is of the model's own dtype.
      token_ids: of TEXT; repeated, or cut, to NUM_TOKENS and what the engine's rows can hold.
    """
    num_tokens = min(NUM_TOKENS, options.max_pages_per_seq * page_size)
    num_pages = -(-num_tokens // page_size)
    options = replace(options, max_pages_per_seq=num_pages, invariant=False)
    mesh, model = options.mesh, options.model
    layout = layout_of(options.backend, model, heads, options.dtype)
    pool = make_pool(model, layout, options.dtype, num_pages + 1, page_size, mesh)
    split = NamedSharding(mesh, PartitionSpec(None, None, MODEL_AXIS, None))
    shape = (model.num_layers, 2, heads.num_kv_heads, model.head_dim)
    largest = jnp.zeros(shape, jnp.float32, device=split)
    run = jax.jit(_largest(options, num_tokens), out_shardings=split)
    ids = np.resize(np.asarray(token_ids, np.int32), num_tokens)
    return run(params, pool, largest, ids) * (HEADROOM / LARGEST_INT8)


def _largest(options: StepOptions, num_tokens: int):
    """Returns largest(params, pool, zeros, ids): the largest magnitudes f32[L, 2, K, H]."""
    num_pages = options.max_pages_per_seq
    row = {
        "kv_lens": jnp.asarray([num_tokens], jnp.int32),
        "page_indices": jnp.arange(1, num_pages + 1, dtype=jnp.int32)[None],
        "cu_q_lens": jnp.asarray([0, num_tokens], jnp.int32),
        "distribution": jnp.asarray([0, 1, 1], jnp.int32),
    }
    attend_to_pages = make_attend(options, Bucket(num_tokens, 1, False), row)

    def attend(q, k, v, carried, layer, sliding_window):
        pool, largest = carried
        out, pool = attend_to_pages(q, k, v, pool, layer, sliding_window)
        seen = jnp.abs(jnp.stack([k, v]).astype(jnp.float32)).max(axis=1)  # [2, K, H]
        return out, (pool, largest.at[layer].set(jnp.maximum(seen, 1e-6)))  # no scale is zero

    def run(params, pool, largest, ids):
        tokens = StepTokens(ids, jnp.arange(num_tokens, dtype=jnp.int32))
        carried = pool, largest
        _, (_, largest) = decoder_apply(
            params, options.model, tokens, carried, attend, options.loop, options.dtype
        )
        return largest

    return run
