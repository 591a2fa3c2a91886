#!/usr/bin/env bash
# Sets up what the tests need and runs them; see usage below.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

usage() {
  cat <<'TEXT'
scripts/test.sh [--quick] [--gemma] [--nightly] [--no-accelerators] [--python=VERSION] [argument of pytest ...]

Checks style and types, runs the tests, in .venv, then compiles for TPUs and GPUs, which need not be
there, in .venv-accelerators. The default model is fetched on first use.

  --quick            leave out the slow tests and the compilers for accelerators
  --gemma            also the tests on Gemma 3 270M: fetches 240 MB, under Gemma's own terms of use
  --nightly          only random search: a million steps through the scheduler, a long one through
                     the prefix cache, thousands of JSON schemas
  --no-accelerators  leave out the compilers for accelerators, as any argument of pytest does
  --python=VERSION   3.11, 3.12 or 3.13, in an environment of its own, .venv-VERSION; tests only
TEXT
}

venv=.venv versions=("${PYTHON_VERSIONS[@]}") lint=true accelerators=true pytest=(--durations=15)
# Compiling and waiting, half of the time, leave cores idle. The order of files keeps the long first.
together=(--numprocesses=logical --maxprocesses=4 --dist=loadfile --no-loadscope-reorder)
for argument in "$@"; do
  case $argument in
    --quick) pytest+=(-m "not slow") accelerators=false ;;
    --gemma) pytest+=(--gemma) ;;
    --nightly)
      pytest+=(--nightly -s tests/scheduler/test_{scheduler_properties,prefix_cache_model}.py
        tests/text/test_{grammar_json,json_schema_rewrites}.py)
      accelerators=false together=()
      ;;
    --no-accelerators) accelerators=false ;;
    --python=*)
      versions=("${argument#*=}") venv=.venv-${argument#*=} lint=false accelerators=false
      ;;
    --help | -h) usage && exit ;;
    *) pytest+=("$argument") accelerators=false together=() ;;
  esac
done

begin=$(now_ms)
set_up_venv "$venv" test "${versions[@]}"
say "Environment: ready after $(since_ms "$begin")"

if $lint; then
  begin=$(now_ms)
  "$venv/bin/ruff" check --quiet .
  "$venv/bin/ruff" format --quiet --check .
  "$venv/bin/mypy" --no-error-summary --strict scheduler
  "$venv/bin/mypy" --no-error-summary jserve pallas_kernels
  say "Style and types: fine, $(since_ms "$begin")"
fi

begin=$(now_ms)
"$venv/bin/python" -m pytest "${together[@]}" "${pytest[@]}" # not zero also where no test was selected
say "Tests: passed, $(since_ms "$begin")"

if $accelerators; then
  begin=$(now_ms)
  set_up_accelerator_venv .venv-accelerators
  say "Environment: ready after $(since_ms "$begin")"
  begin=$(now_ms)
  .venv-accelerators/bin/python scripts/check_accelerators.py --quick
  say "Accelerators: compiled within their bounds, $(since_ms "$begin")"
else
  say "Accelerators: not compiled for; scripts/test.sh alone, or with --gemma, does"
fi
