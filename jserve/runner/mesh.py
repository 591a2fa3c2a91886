"""Devices of one engine and where its arrays live on them. Knows axes, not values."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jserve.errors import ConfigError
from jserve.models.layers import LOGICAL_AXIS_RULES

MODEL_AXIS = "model"
_MESH_AXIS = dict(LOGICAL_AXIS_RULES)


def make_mesh(tensor_parallel_size: int) -> Mesh:
    """Returns a mesh of the first `tensor_parallel_size` devices along one axis, "model".

    Raises:
      ConfigError: there are fewer devices.
    """
    devices = jax.devices()
    if tensor_parallel_size > len(devices):
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel_size} needs as many devices; there are "
            f"{len(devices)} of kind {devices[0].device_kind!r} (on a CPU, add "
            f"--emulated_cpu_devices={tensor_parallel_size})"
        )
    return Mesh(np.array(devices[:tensor_parallel_size]), (MODEL_AXIS,))


def sharding_of(mesh: Mesh, logical_axes: tuple[str | None, ...]) -> NamedSharding:
    """Returns the sharding of an array by the logical names of its axes (models/layers.py)."""
    spec = PartitionSpec(*(_MESH_AXIS.get(axis) if axis else None for axis in logical_axes))
    return NamedSharding(mesh, spec)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def pool_sharding(mesh: Mesh) -> NamedSharding:
    """The KV pool [L, P, p, R, W] is split over its rows, keys and values of a head together."""
    return NamedSharding(mesh, PartitionSpec(None, None, None, MODEL_AXIS, None))


def split_columns(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Keeps the second axis of an array in a program split over the devices of a mesh, if there is
    one: XLA may gather what leaves a conditional, or is cut into blocks, unless it is told."""
    return x if mesh is None else _placed(x, mesh, PartitionSpec(None, MODEL_AXIS))


def keep_whole(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Keeps an array in a program whole on each device of a mesh, if there is one."""
    return x if mesh is None else _placed(x, mesh, PartitionSpec())


def _placed(x: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
