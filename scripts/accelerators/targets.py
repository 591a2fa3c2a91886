"""The devices to compile for, none of which need be here. Knows compilers and topologies, not what
is compiled."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from jserve.runner.mesh import MODEL_AXIS
from jserve.runner.platform import set_compiler_flags
from pallas_kernels.devices import DeviceSpec, device_spec
from pallas_kernels.dispatch import Backend, backend_for

MOST_DEVICES = 8
H200_DESCRIPTION = Path(__file__).with_name("h200.txtpb")  # XLA's GpuTargetConfigProto, as text


@dataclass(frozen=True, slots=True)
class Target:
    """A device kind and a topology of at least MOST_DEVICES of it; a prefix of it is a mesh."""

    name: str
    kind: str  # of pallas_kernels/devices.py
    topology: str

    @property
    def spec(self) -> DeviceSpec:
        return device_spec(self.kind)

    @property
    def platform(self) -> str:
        """As lowering rules are registered."""
        return "tpu" if self.spec.platform == "tpu" else "cuda"

    @property
    def backend(self) -> Backend:
        return backend_for(self.platform)

    @property
    def compiler(self) -> str:
        """The package that compiles for it, with its version."""
        package = "libtpu" if self.platform == "tpu" else "jax-cuda13-pjrt"
        return f"{package} {version(package)}"


TARGETS = {
    target.name: target
    for target in (
        Target("v4", "TPU v4", "v4:2x2x1"),
        Target("v5e", "TPU v5 lite", "v5e:2x4"),
        Target("v5p", "TPU v5", "v5p:2x2x2"),
        Target("v6e", "TPU v6 lite", "v6e:2x4"),
        Target("7x", "TPU7x", "tpu7x:2x2x1"),
        Target("H200", "NVIDIA H200", "1x1x8"),
    )
}


def prepare_process() -> None:
    """Readies this process to compile for all targets; before anything asks jax for a device."""
    os.environ |= {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several children compile at a time
        "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
    }
    set_compiler_flags()
    jax.config.update("jax_platforms", "cpu")


@cache
def mesh_of(target: Target, num_devices: int) -> Mesh:
    """Returns a mesh like those of jserve/runner/mesh.py, of devices that are only described."""
    if target.platform == "tpu":
        topology = topologies.get_topology_desc(platform="tpu", topology_name=target.topology)
    else:
        topology = topologies.get_topology_desc(
            platform=target.platform,
            topology_name="",
            target_config=H200_DESCRIPTION.read_text(),
            topology=target.topology,
        )
    kind = topology.devices[0].device_kind
    assert kind == target.kind, f"the compiler calls it {kind!r}, devices.py {target.kind!r}"
    return Mesh(np.array(topology.devices[:num_devices]), (MODEL_AXIS,))
