# What the set-up scripts share: a Python, an environment with the project in it, times. Sourced
# with the repository as the current folder; knows no model, no server and no test.
# shellcheck shell=bash

PYTHON_VERSIONS=(3.12 3.13 3.11) # best first; pyproject.toml has the bounds

say() { printf '%s\n' "$*"; }

fail() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

now_ms() { date +%s%3N; }

# since_ms START -> "12.3 s"
since_ms() {
  local ms=$(($(now_ms) - $1))
  printf '%d.%d s' $((ms / 1000)) $((ms % 1000 / 100))
}

# python_version PATH -> "3.12"; nothing for what does not run, like the shim of an inactive version
python_version() {
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

# find_python VERSION... -> path of the first one there is, on PATH or among pyenv's
find_python() {
  local version candidate
  for version in "$@"; do
    while read -r candidate; do
      if [ -x "$candidate" ] && [ "$(python_version "$candidate")" = "$version" ]; then
        say "$candidate"
        return
      fi
    done < <(
      type -aP "python$version" python3 || true
      printf '%s\n' {"${PYENV_ROOT:-}","$HOME/.pyenv"}/versions/"$version".*/bin/"python$version" |
        sort -Vr
    )
  done
  fail "found none of Python $*; install one, for example: sudo apt-get install python3.12-venv," \
    "or with pyenv: pyenv install 3.12"
}

# make_venv PYTHON FOLDER. Debian keeps pip out of python3: where python3-venv is missing, the pip
# of the system does as well, or the one in the distribution's python3-pip-whl, unpacked.
make_venv() {
  local python=$1 folder=$2 unpacked packages
  rm -rf "$folder"
  if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "$folder"
    return
  fi
  "$python" -m venv --without-pip "$folder"
  if ! "$python" -m pip --python "$folder/bin/python" install --quiet pip 2>/dev/null; then
    unpacked=$(mktemp -d)
    packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    (
      cd "$unpacked" && apt-get download python3-pip-whl && dpkg-deb -x ./*.deb . &&
        "$OLDPWD/$folder/bin/python" -m zipfile -e usr/share/python-wheels/pip-*.whl "$packages"
    ) &>/dev/null || true
    rm -rf "$unpacked"
  fi
  if ! "$folder/bin/python" -m pip --version &>/dev/null; then
    rm -rf "$folder"
    fail "$python cannot make an environment: it has neither ensurepip nor pip; run" \
      "sudo apt-get update && sudo apt-get install python$(python_version "$python")-venv"
  fi
}

# set_up_venv FOLDER EXTRA VERSION...: an environment with the project, editable, and "" or the
# "test" extra. A stamp in it says what it was made from, so a second call takes no time. An
# environment of another accepted version is taken as it is.
set_up_venv() {
  local folder=$1 extra=$2 stamp="$1/.jserve-setup" version python
  shift 2
  version=$(python_version "$folder/bin/python")
  if [[ " $* " != *" $version "* ]] || ! "$folder/bin/python" -m pip --version &>/dev/null; then
    python=$(find_python "$@")
    version=$(python_version "$python")
    say "Environment: making $folder with Python $version"
    make_venv "$python" "$folder"
  fi
  local made_from="$version $PWD $(sha256sum <pyproject.toml)"
  if [[ "$(cat "$stamp" 2>/dev/null)" == "$made_from "@("$extra"|test) ]]; then
    say "Environment: $folder as it is (Python $version)"
    return
  fi
  say "Environment: installing the project and what it needs (about 300 MB the first time)"
  rm -f "$stamp"
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -e ".${extra:+[$extra]}"
  say "$made_from $extra" >"$stamp"
}

# The compilers of accelerators, and what of the project's needs a step has. libtpu comes with jax;
# the GPU's compiler is taken without NVIDIA's libraries, which only running needs.
ACCELERATOR_PACKAGES=("jax[tpu]==0.11.2" flax jaxtyping absl-py)
ACCELERATOR_PACKAGES_ALONE=(jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2)

# set_up_accelerator_venv FOLDER: an environment that compiles for TPUs and GPUs, with a stamp too.
set_up_accelerator_venv() {
  local folder=$1 stamp="$1/.jserve-setup" python
  local made_from="$PWD ${ACCELERATOR_PACKAGES[*]} ${ACCELERATOR_PACKAGES_ALONE[*]}"
  if [[ "$(cat "$stamp" 2>/dev/null)" == "$made_from" ]]; then
    say "Environment: $folder as it is"
    return
  fi
  python=$(find_python 3.12)
  say "Environment: making $folder with compilers for accelerators (about 500 MB the first time)"
  make_venv "$python" "$folder"
  local install=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
  "${install[@]}" "${ACCELERATOR_PACKAGES[@]}"
  "${install[@]}" --no-deps "${ACCELERATOR_PACKAGES_ALONE[@]}" -e .
  say "$made_from" >"$stamp"
}
