#!/usr/bin/env bash
# Puts smg, a router that speaks VllmEngine, unmodified from PyPI in front of jserve, and asks it and
# jserve itself the same through OpenAI's client. It gets no tokenizer but the one that jserve sends.
# With --keyed first, jserve has TLS and keys, and the router reaches it over HTTPS: over gRPC it
# sends no key and speaks no TLS (docs/security.md). Either way callers need the router's key.
# Flags go to the server: scripts/compat/router.sh --model=qwen2.5-0.5b
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/lib.sh
. scripts/compat/lib.sh

client_venv router 3.12 "smg==1.13.0" "openai>=2.0"
files=$(mktemp -d)
server_flags=(--flagfile=configs/cpu_default.flags --enable_cache_service) router_flags=()
export OPENAI_API_KEY=any
if [[ "${1:-}" == --keyed ]]; then
  shift
  set_up_venv .venv "" "${PYTHON_VERSIONS[@]}"
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost \
    -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE \
    -keyout "$files/key.pem" -out "$files/cert.pem" 2>/dev/null
  OPENAI_API_KEY=$(.venv/bin/jserve-keys --file="$files/keys.toml" --name=router --admin 2>/dev/null)
  export SSL_CERT_FILE=$files/cert.pem
  server_flags+=(--tls_cert="$files/cert.pem" --tls_key="$files/key.pem" --api_keys="$files/keys.toml")
  router_flags+=(--ca-cert-paths "$files/cert.pem")
fi
serve "${server_flags[@]}" "$@"
target=grpc://$(sed -n 's/.*\] ready: .* on \([^ ,]*:[0-9]*\),.*/\1/p' "$serve_log")
[[ "$url" == https:* ]] && target=$url

read -r port metrics_port < <("$client/bin/python" -c '
import socket
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(s.getsockname()[1] for s in sockets))')
"$client/bin/python" -m smg launch --worker-urls "$target" --policy cache_aware \
  --host 127.0.0.1 --port "$port" --prometheus-port "$metrics_port" \
  --api-key "$OPENAI_API_KEY" "${router_flags[@]}" >"$files/router.log" 2>&1 &
router=$!
trap 'kill $router $server 2>/dev/null; wait $router $server 2>/dev/null; rm -rf "$serve_log" "$files"' EXIT
say "Router: http://127.0.0.1:$port before $target"
if ! "$client/bin/python" scripts/compat/router_calls.py "http://127.0.0.1:$port/v1" "$url/v1"; then
  tail -n 20 "$files/router.log" >&2
  exit 1
fi
[[ "$url" == https:* ]] && exit
say "Router: what it has read of the prefix cache's events, and how often it went by them"
curl -s "http://127.0.0.1:$metrics_port/metrics" |
  grep -E '^smg_(kv_event_(batches|blocks)_total|kv_event_missed|kv_index_blocks|cache_aware_policy_branch)'
