#!/usr/bin/env bash
# Sets everything up, serves the default model and asks it one question; see usage below.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

usage() {
  cat <<'TEXT'
scripts/quickstart.sh [--serve] [--model=NAME] [--prompt=TEXT] [--port=N] [-- FLAG ...]

Makes .venv, installs jserve, fetches the model, starts the server, streams one answer from it and
stops it again. What is there already is used again.

  --serve        leave the server running, in the foreground, and say how to talk to it
  --model=NAME   smollm2-135m (default), gemma3-270m, a folder, a .gguf file or a hub name
  --prompt=TEXT  what to ask
  --port=N       of the server; by default a free one, or 50051 with --serve
  -- FLAG ...    more flags for jserve-serve, such as --metrics_port=9400
TEXT
}

serve=false model=smollm2-135m port=
prompt="Explain in three sentences why the sky is blue."
while [ $# -gt 0 ]; do
  case $1 in
    --serve) serve=true ;;
    --model=*) model=${1#*=} ;;
    --prompt=*) prompt=${1#*=} ;;
    --port=*) port=${1#*=} ;;
    --help | -h) usage && exit ;;
    --) shift && break ;;
    *) usage >&2 && fail "$1 is no option" ;;
  esac
  shift
done
if [ -z "$port" ]; then port=$($serve && say 50051 || say 0); fi
http_port=$($serve && say 8000 || say 0)

log=$(mktemp)
server=
stop_server() {
  if [ -n "$server" ]; then
    kill -TERM "$server" 2>/dev/null || true
    while kill -0 "$server" 2>/dev/null; do wait "$server" || true; done
  fi
}
trap 'stop_server; rm -f "$log"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

begin=$(now_ms)
set_up_venv .venv "" "${PYTHON_VERSIONS[@]}"
took_venv=$(since_ms "$begin")

begin=$(now_ms)
say "Model: $model"
.venv/bin/python - "$model" <<'PYTHON'
import sys
from jserve.checkpoint.resolve import open_checkpoint
from jserve.config import DEFAULT_CACHE_DIR
from jserve.errors import CheckpointError

try:
    open_checkpoint(sys.argv[1], DEFAULT_CACHE_DIR)
except CheckpointError as error:
    sys.exit(f"quickstart.sh: {error}")
PYTHON
took_model=$(since_ms "$begin")

# start_server FLAG ...: returns when it is ready; sets $server, $target and $num_programs.
start_server() {
  local line
  # In a session of its own: Ctrl-C then reaches this script alone, which stops the server once.
  setsid .venv/bin/jserve-serve "$@" >"$log" 2>&1 &
  server=$!
  num_programs=0
  while read -r line; do
    case $line in
      *"health answers on "*) target=${line##* } ;;
      *" compiled in "*) ;;
      *"] bucket "*) progress "$((++num_programs)) step shapes ready" ;;
      *"] weights "*) progress "${line##*] }" ;;
      *"] ready: "*) return ;;
    esac
  done < <(tail -n +1 -f --pid="$server" "$log")
  say
  tail -n 15 "$log" >&2
  fail "the server ended before it was ready; its last words are above"
}

# On a terminal one line that changes; elsewhere a line per piece of news, but not per program.
progress() {
  if [ -t 1 ]; then
    printf '\r\033[K  %s: %s' "$(since_ms "$begin")" "$1"
  elif ((num_programs % 4 == 0)); then
    say "  $(since_ms "$begin"): $1"
  fi
}

begin=$(now_ms)
say "Server: loading the model and compiling its steps; the first start compiles them, for about a minute"
start_server --flagfile=configs/cpu_default.flags --model="$model" --port="$port" \
  --http_port="$http_port" "$@"
took_start=$(since_ms "$begin")
if [ -t 1 ]; then printf '\r\033[K'; fi
say "Server: ready on $target after $took_start"

if $serve; then
  cat <<TEXT

Talk to it from a second terminal, in this folder ($PWD):

  .venv/bin/jserve-client --target=$target --chat --prompt="$prompt"

or by HTTP: its log below has the address, which is also that of a live page.

Ctrl-C here stops it, once its running answers are complete. Its log:
TEXT
  tail -n 1 -f --pid="$server" "$log" &
  status=0
  wait "$server" || status=$?
  server=
  exit "$status"
fi

say
say "> $prompt"
.venv/bin/jserve-client --target="$target" --wait_ready_s=30 --chat --prompt="$prompt" \
  --temperature=0 --max_tokens=160
kill -TERM "$server"
wait "$server" || fail "the server did not stop cleanly: $(tail -n 5 "$log")"
server=
say
say "Took: environment $took_venv, model $took_model, start to ready $took_start"
say "Next: scripts/quickstart.sh --serve, and README.md"
