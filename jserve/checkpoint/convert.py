"""Command that writes any supported model as an Orbax checkpoint. Knows flags and messages only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jserve.config import DEFAULT_CACHE_DIR
from jserve.errors import JserveError

USAGE = """Writes a model as an Orbax checkpoint, which loads straight into its shardings.

jserve-convert --model=smollm2-135m --output=checkpoints/smollm2 --dtype=bfloat16
"""


def define_flags() -> flags.FlagValues:
    """Returns this command's own flags, apart from those of the server."""
    values = flags.FlagValues()
    flags.DEFINE_string(
        "model", None, "Known name, folder, .gguf file or hub name.", flag_values=values
    )
    flags.DEFINE_string("output", None, "Folder to write; must not exist.", flag_values=values)
    flags.DEFINE_enum(
        "dtype", "bfloat16", ["float32", "bfloat16"], "Of the weights.", flag_values=values
    )
    flags.DEFINE_string(
        "cache_dir", DEFAULT_CACHE_DIR, "Where fetched models are kept.", flag_values=values
    )
    flags.mark_flags_as_required(["model", "output"], flag_values=values)
    return values


def main(argv: Sequence[str]) -> int:
    """Converts and returns the exit status: 0, 1 for a checkpoint's fault, 2 for the flags'."""
    values = define_flags()
    if {"--help", "-h"} & set(argv[1:]):
        print(f"{USAGE}\n{values.get_help()}")
        return 0
    try:
        unknown = values(argv)[1:]
        if unknown:
            raise flags.Error(f"unexpected argument {unknown[0]!r}")
    except flags.Error as error:
        print(f"jserve-convert: {error}", file=sys.stderr)
        return 2
    # after the flags: these bring jax, and a wrong flag should answer at once
    from jserve.checkpoint.orbax import write_orbax
    from jserve.checkpoint.resolve import open_checkpoint

    try:
        checkpoint = open_checkpoint(values.model, values.cache_dir)
        write_orbax(checkpoint, Path(values.output), values.dtype)
    except (JserveError, OSError) as error:
        print(f"jserve-convert: {error}", file=sys.stderr)
        return 1
    print(f"wrote {values.output} from {checkpoint.kind} {checkpoint.source} in {values.dtype}")
    return 0


def run() -> None:
    """Entry point of the `jserve-convert` command."""
    sys.exit(main(sys.argv))
