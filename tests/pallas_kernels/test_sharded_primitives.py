"""Page copies and quantised matmuls on two emulated devices: same results, and nothing sent that
need not be. In a process of its own, as the number of devices is fixed once jax has started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SET_UP = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pallas_kernels.page_copy import copy_pages, gather_pages, scatter_pages
from pallas_kernels.quantized_matmul import quantize, quantized_matmul
mesh = Mesh(np.array(jax.devices()), ("model",))
assert mesh.size == 2
def split(x, axis):
    axes = [None] * x.ndim
    axes[axis] = "model"
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))
def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)
def collectives(function, *arguments):
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return {word for word in ("all-gather", "all-reduce", "collective-permute") if word in text}
def agrees(function, arguments, whole):
    np.testing.assert_allclose(function(*arguments), function(*whole), rtol=1e-5, atol=1e-5)
"""
PAGES = """
pool, pages = normal(0, 3, 8, 4, 6, 16), normal(1, 2, 3, 4, 6, 16)
a, b = jnp.array([3, 4]), jnp.array([6, 1])
for function, whole in (
    (copy_pages, (pool, a, b)), (gather_pages, (pool, a)), (scatter_pages, (pool, pages, b)),
):
    arguments = [split(x, 3) if x.ndim == 5 else x for x in whole]
    assert not collectives(function, *arguments)
    agrees(jax.jit(function), arguments, whole)
"""
# A weight split over its outputs needs no exchange; over its inputs one sum, and for w8a8 each
# token's largest magnitude before.
MATMULS = """
w, x = normal(2, 16, 64), normal(3, 64, 5)
for kind, size in (("w8a8", None), ("int8", 16), ("int4", 32)):
    q = quantize(w, kind, group_size=size)
    lead = 0 if kind == "w8a8" else 1
    by_out = jax.tree.map(lambda leaf: split(leaf, lead), q)
    assert not collectives(quantized_matmul, by_out, x), kind
    agrees(jax.jit(quantized_matmul), (by_out, x), (q, x))
    if kind == "w8a8":
        by_in = type(q)(split(q.values, 1), q.scales, kind)
    else:
        by_in = type(q)(split(q.values, 0), split(q.scales, 0), kind)
    assert collectives(quantized_matmul, by_in, split(x, 0)) == {"all-reduce"}, kind
    agrees(jax.jit(quantized_matmul), (by_in, split(x, 0)), (q, x))
"""


@pytest.mark.parametrize("body", [PAGES, MATMULS], ids=["pages", "matmuls"])
def test_primitives_split_over_devices_agree_with_one_and_send_the_least(body):
    command = [sys.executable, "-c", SET_UP + body]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stderr
