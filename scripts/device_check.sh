#!/usr/bin/env bash
# Checks kernels and engine on the accelerator at hand, in under 8 minutes and without a network;
# see usage below. Needs no environment of the project: it takes a Python as it finds it.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'TEXT'
scripts/device_check.sh --out=FOLDER [--python=PATH] [--torch_python=PATH] [argument ...]

Writes FOLDER/device_check.json, and measured block sizes under FOLDER/tuned. Needs jax 0.11 or later
with the accelerator's plugin, numpy, jaxtyping and ml_dtypes; for the engine flax, tokenizers, jinja2
and prometheus_client; for the tuner absl-py. PyTorch is compared with where there is one. What is
missing is named, and the rest goes on.

  --python=PATH        the Python with jax; without it, the first one on PATH that has it, or .venv's
  --torch_python=PATH  the one with PyTorch, likewise
  --smoke              tiny shapes, on a CPU too: tries the check itself
  --parts=A,B          some of numerics,kernels,engine,pytorch,tune
  --limit_s=SECONDS    of all parts together; 450
TEXT
}

has() { "$1" -c "import importlib.util as u, sys; sys.exit(not u.find_spec('$2'))" 2>/dev/null; }

# first_with MODULE -> the first Python that has it, or nothing
first_with() {
  local python
  for python in $(type -aP python3 python || true) .venv/bin/python; do
    if has "$python" "$1"; then
      printf '%s\n' "$python"
      return
    fi
  done
}

python='' torch_python='' arguments=()
for argument in "$@"; do
  case $argument in
    --python=*) python=${argument#*=} ;;
    --torch_python=*) torch_python=${argument#*=} ;;
    --help | -h) usage && exit ;;
    *) arguments+=("$argument") ;;
  esac
done
python=${python:-$(first_with jax)}
if [ -z "$python" ]; then
  printf 'no Python here has jax; name one with --python=PATH\n' >&2
  exit 1
fi
torch_python=${torch_python:-$(first_with torch)}
exec "$python" -m scripts.device_check --torch_python="${torch_python:-$python}" "${arguments[@]}"
