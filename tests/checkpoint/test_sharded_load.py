"""Parameters arrive sharded over several devices, whichever kind of checkpoint they come from."""

from __future__ import annotations

import subprocess
import sys

from tests.checkpoint.builders import QWEN2, random_tensors, write_folder

# loads on two emulated devices, both loops and both kinds, in float32 and int8, and compares with
# one device
CHECK = """
import sys
from pathlib import Path
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
from jserve.checkpoint.mapping import load_params
from jserve.checkpoint.orbax import open_orbax, write_orbax
from jserve.checkpoint.safetensors import open_safetensors
from jserve.models.families import model_config_from_hf
from jserve.models.head_layout import head_layout
from jserve.models.params import ParamShape, param_shapes

source = open_safetensors(Path(sys.argv[1]))
write_orbax(source, Path(sys.argv[2]), "float32")
config = model_config_from_hf(source.config)
layout = head_layout(config, 2)
mesh = jax.make_mesh((2,), ("model",))

def sharding(axes):
    spec = jax.sharding.PartitionSpec(*("model" if axis else None for axis in axes))
    return jax.sharding.NamedSharding(mesh, spec)

def check(shape, param, expected):
    for array, whole in zip(jax.tree.leaves(param), jax.tree.leaves(expected), strict=True):
        wanted = sharding(shape.logical_axes[: array.ndim])  # scales lack the last axis
        assert array.sharding.is_equivalent_to(wanted, array.ndim)
        np.testing.assert_array_equal(array, whole)

for quantization in ("none", "w8a8"):
    for stacked in (False, True):
        settings = dict(stacked=stacked, quantization=quantization)
        whole = load_params(source, config, layout, "float32", **settings)
        shapes = param_shapes(config, layout, stacked)
        for checkpoint in (source, open_orbax(Path(sys.argv[2]))):
            params = load_params(checkpoint, config, layout, "float32", sharding, **settings)
            is_shape = lambda node: isinstance(node, ParamShape)
            jax.tree.map(check, shapes, params, whole, is_leaf=is_shape)
print("equal")
"""


def test_both_kinds_of_checkpoint_load_sharded_and_equal(tmp_path):
    folder = write_folder(tmp_path / "hf", QWEN2, random_tensors(QWEN2))
    command = [sys.executable, "-c", CHECK, str(folder), str(tmp_path / "orbax")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout == "equal\n", run.stderr
