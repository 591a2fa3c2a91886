"""Settings of the compilers that must be made before they load. Knows flags, not programs."""

from __future__ import annotations

import os

# On a TPU 7x the compiler wants bfloat16 weights in another tiling inside the layer loop than at
# its entry, and lays out all of them anew in every step: 3.3 GiB of copies for a fourth of a
# Llama-3-8B. Without the large tiles there are none; programs for other generations do not change.
_LIBTPU_FLAGS = ("--xla_tpu_impure_enable_large_2nd_minor_layout=false",)

# XLA takes what a program returns off the memory that it may plan with, the donated pool a second
# time. A pool of half a GPU leaves nothing, as it seems, and to save memory XLA then has each layer
# multiply by `qkv` three times over, for its queries, its keys and its values.
_GPU_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}


def compiler_options(platform: str) -> dict[str, str]:
    """Returns what the compiler of a device's `platform` must be told with each program."""
    return _GPU_OPTIONS if platform in ("gpu", "cuda") else {}


def set_compiler_flags() -> None:
    """Adds what libtpu must be told to LIBTPU_INIT_ARGS, its only way in; what is set there already
    stays. Without effect once jax has looked for devices, or where there is no TPU."""
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    names = {argument.partition("=")[0] for argument in given.split()}
    ours = (flag for flag in _LIBTPU_FLAGS if flag.partition("=")[0] not in names)
    os.environ["LIBTPU_INIT_ARGS"] = " ".join([*given.split(), *ours])
