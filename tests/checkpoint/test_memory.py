"""Loading holds the model and its largest parameter, never a second copy of the model."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from tests.checkpoint.builders import LLAMA, random_tensors, write_folder

CONFIG = LLAMA | {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
SLACK_BYTES = 64 * 2**20  # blocks of the file, compiled writes, the allocator's own
# prints: bytes of the parameters, of the largest as read (of one layer), growth of the peak
# resident size
MEASURE = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from jserve.checkpoint.mapping import load_params
from jserve.checkpoint.safetensors import open_safetensors
from jserve.models.families import model_config_from_hf
from jserve.models.head_layout import head_layout
folder, dtype, stacked, quantization = sys.argv[1:]
jax.jit(lambda x: x + 1)(jnp.zeros(8)).block_until_ready()
# not getrusage, whose maximum a process inherits from the one that started it
status = lambda: Path("/proc/self/status").read_text()
peak = lambda: int(status().split("VmHWM:")[1].split()[0]) * 1024
before = peak()
checkpoint = open_safetensors(Path(folder))
config = model_config_from_hf(checkpoint.config)
params = load_params(checkpoint, config, head_layout(config), dtype, stacked=stacked == "True",
                     quantization=quantization)
total = sum(array.nbytes for array in jax.tree.leaves(params))
layer = params.pop("layers")
share = config.num_layers if stacked == "True" else 1
largest = max([array.size // share for array in jax.tree.leaves(layer)]
              + [array.size for array in jax.tree.leaves(params)])
width = 4 if quantization != "none" else jnp.dtype(dtype).itemsize
print(total, largest * width, peak() - before)
"""


@pytest.fixture(scope="module")
def bfloat16_folder(tmp_path_factory):
    tensors = {n: np.zeros(t.shape, ml_dtypes.bfloat16) for n, t in random_tensors(CONFIG).items()}
    return write_folder(tmp_path_factory.mktemp("model"), CONFIG, tensors, num_shards=2)


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("bfloat16", "none"), ("float32", "none"), ("bfloat16", "w8a8")]
)
def test_peak_memory_is_the_model_and_its_largest_parameter(
    bfloat16_folder, dtype, quantization, stacked
):
    command = [sys.executable, "-c", MEASURE]
    command += [str(bfloat16_folder), dtype, str(stacked), quantization]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    total, largest, growth = map(int, run.stdout.split())
    if dtype == "float32":
        assert total > 200e6
    if quantization == "w8a8":
        assert total < 70e6
    copies = 2 if stacked or quantization != "none" else 1
    assert growth < total + copies * largest + SLACK_BYTES
