"""Runs the parts of the device check, each in a process of its own and under a time limit, and
writes what they found to OUT/device_check.json, with the goals and whether they are met.

    python -m scripts.device_check --out=OUT [--smoke] [--parts=numerics,engine]

Standard library only: it must be able to say what is missing, and never holds the device itself.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.device_check.goals import as_json, judge
from scripts.device_check.record import Record, read
from scripts.device_check.sizes import FULL, SMOKE

ROOT = Path(__file__).parents[2]
# Seconds that each part may take; together they keep to --limit_s, whatever happens.
PARTS = {"numerics": 120, "kernels": 100, "engine": 170, "pytorch": 60, "tune": 90}
NEEDED = {
    "numerics": "jax numpy jaxtyping ml_dtypes",
    "kernels": "jax numpy jaxtyping",
    "engine": "jax numpy jaxtyping flax tokenizers jinja2 prometheus_client",
    "pytorch": "torch",
    "tune": "jax numpy jaxtyping absl",
}


def main() -> int:
    arguments = _arguments()
    sizes = SMOKE if arguments.smoke else FULL
    if arguments.part:
        record = Record(arguments.record, arguments.part)
        with record.guard(arguments.part):
            module = importlib.import_module(f"scripts.device_check.{arguments.part}")
            module.run(record, sizes, arguments.smoke, arguments.out)
        return 0
    begin = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records"
        for part in arguments.parts.split(","):
            left = arguments.limit_s - (time.monotonic() - begin)
            _run_part(part, path, min(PARTS[part], left), arguments)
        records = read(path)
    goals = judge(records)
    result = {
        "seconds": round(time.monotonic() - begin, 1),
        "smoke": arguments.smoke,
        "goals": as_json(goals),
        "records": records,
    }
    (arguments.out / "device_check.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{'goal':28}{'wanted':36}{'got':>12}  met")
    for goal in goals:
        got = f"{goal.got:.3g}" if isinstance(goal.got, float) else str(goal.got)
        verdict = {True: "yes", False: "NO", None: "not measured"}[goal.is_met]
        print(f"{goal.name:28}{goal.wanted:36}{got:>12}  {verdict}")
    print(f"{arguments.out / 'device_check.json'}: {len(records)} records, {result['seconds']} s")
    is_failed = any("error" in r for r in records)
    return int(is_failed or (not arguments.smoke and any(g.is_met is False for g in goals)))


def _run_part(part: str, path: Path, limit_s: float, arguments: argparse.Namespace) -> None:
    """Runs one part in a child; what it has recorded by its limit is kept."""
    print(f"\n{part}: at most {limit_s:.0f} s", flush=True)
    record = Record(path, part)
    if limit_s < 1:
        record.skip(part, "no time left")
        return
    python = arguments.torch_python if part == "pytorch" else sys.executable
    missing = _missing(python, NEEDED[part])
    if missing:
        record.skip(part, f"{python} has no {', '.join(missing)}")
        return
    command = [python, "-m", "scripts.device_check", f"--part={part}", f"--record={path}",
               f"--out={arguments.out}"] + ["--smoke"] * arguments.smoke  # fmt: skip
    begin = time.monotonic()
    path_of_modules = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path_of_modules}
    child = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        code = child.wait(limit_s)
        if code:
            record.add(part, error=f"the process ended with {code}")
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        record.add(part, error=f"stopped after {limit_s:.0f} s")
    record.add(f"{part} as a whole", seconds=round(time.monotonic() - begin, 1))


def _missing(python: str, names: str) -> list[str]:
    """Returns which of the modules `python` cannot find; all of them if it does not run."""
    code = (
        "import importlib.util as u, sys; "
        "print(*[name for name in sys.argv[1:] if u.find_spec(name) is None])"
    )
    command = [python, "-c", code, *names.split()]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout.split() if run.returncode == 0 else names.split()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/device_check.sh", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for what is found")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, for any CPU")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, in which order")
    parser.add_argument("--limit_s", type=float, default=450, help="of all parts together")
    parser.add_argument("--torch_python", default=sys.executable, help="the Python with PyTorch")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for part in set(arguments.parts.split(",")) - set(PARTS):
        parser.error(f"--parts: {part!r} is unknown; use some of {','.join(PARTS)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
