#!/usr/bin/env bash
# Puts smg, a router that speaks VllmEngine, unmodified from PyPI in front of jserve, and asks it and
# jserve itself the same through OpenAI's client. It gets no tokenizer but the one that jserve sends.
# Flags go to the server: scripts/compat/router.sh --model=qwen2.5-0.5b
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/lib.sh
. scripts/compat/lib.sh

client_venv router 3.12 "smg==1.13.0" "openai>=2.0"
serve --flagfile=configs/cpu_default.flags --enable_cache_service "$@"
target=$(sed -n 's/.*\] ready: .* on \([^ ,]*:[0-9]*\),.*/\1/p' "$serve_log")

read -r port metrics_port < <("$client/bin/python" -c '
import socket
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(s.getsockname()[1] for s in sockets))')
router_log=$(mktemp)
"$client/bin/python" -m smg launch --worker-urls "grpc://$target" --policy cache_aware \
  --host 127.0.0.1 --port "$port" --prometheus-port "$metrics_port" >"$router_log" 2>&1 &
router=$!
trap 'kill $router $server 2>/dev/null; wait $router $server 2>/dev/null; rm -f "$serve_log" "$router_log"' EXIT
say "Router: http://127.0.0.1:$port before grpc://$target"
if ! "$client/bin/python" scripts/compat/router_calls.py "http://127.0.0.1:$port/v1" "$url/v1"; then
  tail -n 20 "$router_log" >&2
  exit 1
fi
say "Router: what it has read of the prefix cache's events, and how often it went by them"
curl -s "http://127.0.0.1:$metrics_port/metrics" |
  grep -E '^smg_(kv_event_(batches|blocks)_total|kv_event_missed|kv_index_blocks|cache_aware_policy_branch)'
