"""What each device can do at most, from public specifications. Knows names and numbers only.

Roofline choices, compile-time budgets and memory bounds all read this one table.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device as JAX counts them: a TPU v4 or 7x chip has two, every other chip one.

    Attributes:
      kind: jax's `device_kind`.
      platform: "tpu" or "gpu".
      hbm_bytes: memory that a program can have.
      hbm_bytes_per_s: peak memory bandwidth.
      bf16_flop_per_s: peak dense bfloat16 rate.
      on_chip_bytes: VMEM of a TPU; shared memory that one thread block of a GPU can have.
      scalar_bytes: SMEM of a TPU; 0 on a GPU.
      num_cores: tensor cores of a TPU device; streaming multiprocessors of a GPU.
    """

    kind: str
    platform: str
    hbm_bytes: int
    hbm_bytes_per_s: float
    bf16_flop_per_s: float
    on_chip_bytes: int
    scalar_bytes: int = 0
    num_cores: int = 1


# VMEM, SMEM and usable HBM are those that the TPU compiler enforces (libtpu 0.0.48.1).
DEVICES = {
    spec.kind: spec
    for spec in (
        DeviceSpec("TPU v4", "tpu", int(15.25 * GIB), 614e9, 137.5e12, 16 * MIB, MIB),
        DeviceSpec("TPU v5 lite", "tpu", int(15.75 * GIB), 819e9, 197e12, 128 * MIB, MIB),
        DeviceSpec("TPU v5", "tpu", int(95.73 * GIB), 2765e9, 459e12, 64 * MIB, MIB),
        DeviceSpec("TPU v6 lite", "tpu", int(31.24 * GIB), 1640e9, 918e12, 128 * MIB, MIB),
        DeviceSpec("TPU7x", "tpu", int(94.74 * GIB), 3690e9, 1153.5e12, 64 * MIB, MIB),
        DeviceSpec("NVIDIA H100 80GB HBM3", "gpu", 80 * 10**9, 3350e9, 989e12, 232_448, 0, 132),
        DeviceSpec("NVIDIA H200", "gpu", 141 * 10**9, 4800e9, 989e12, 232_448, 0, 132),
    )
}


def device_spec(kind: str) -> DeviceSpec:
    """Returns the figures of a device kind.

    Raises:
      ValueError: the kind is not in the table; names those that are.
    """
    if kind not in DEVICES:
        raise ValueError(f"device kind {kind!r} is unknown; use one of {', '.join(DEVICES)}")
    return DEVICES[kind]
