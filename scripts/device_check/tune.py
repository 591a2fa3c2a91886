"""Part 4: block sizes measured on this device, by scripts/tune_kernels.py, into OUT/tuned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts.device_check.record import Record
from scripts.device_check.sizes import Sizes

ARGUMENTS = ("--rows=16,64,256,1", "--chunks=2048", "--contexts=4096", "--repeats=3",
             "--time_limit_s=75")  # fmt: skip
SMALL_ARGUMENTS = (
    *("--backend=xla", "--rows=2", "--chunks=16", "--contexts=64", "--dtype=float32"),
    *("--kv_dtype=float32", "--repeats=1", "--calls=1", "--pool_bytes=1000000"),
    *("--time_limit_s=1",),
)


def run(record: Record, sizes: Sizes, is_small: bool, out: Path) -> None:
    """See `__main__`: records what the tuner says of each size, and the files it wrote."""
    command = [sys.executable, "-u", "scripts/tune_kernels.py", f"--out={out / 'tuned'}",
               f"--heads={sizes.heads}", f"--page_sizes={sizes.page_size}"]  # fmt: skip
    command += SMALL_ARGUMENTS if is_small else ARGUMENTS
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "it is a pipe"
        title = "?"
        for line in process.stdout:
            print(line, end="", flush=True)
            if not line.startswith(" "):
                title = line.split(":")[0]
            elif line.startswith("  best "):
                record.add(f"tuned {title}", found=line.strip())
    if process.returncode:
        record.add("tune", error=f"scripts/tune_kernels.py ended with {process.returncode}")
    record.add("tuned files", files=[str(p.relative_to(out)) for p in out.rglob("tuned/*/*.json")])
