# What the trials of other people's clients share: an environment for the client, a server to ask.
# Sourced with the repository as the current folder, after scripts/lib.sh; knows no client.
# shellcheck shell=bash

# With --help a script says what stands at its head.
if [[ "${1:-}" == --help ]]; then
  sed -n '2,/^set/{/^#/s/^# //p}' "scripts/compat/$(basename "$0")"
  exit
fi

# client_venv NAME VERSION PACKAGE...: sets $client to an environment with the packages, made once
client_venv() {
  client=.venv-compat-$1
  local stamp="$client/.jserve-setup" version=$2
  shift 2
  if [[ "$(cat "$stamp" 2>/dev/null)" != "$*" ]]; then
    say "Client: installing $* into $client"
    make_venv "$(find_python "$version")" "$client"
    "$client/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
    say "$*" >"$stamp"
  fi
}

# serve FLAG ...: starts jserve-serve on free ports; sets $url, and stops it when the script ends
serve() {
  set_up_venv .venv "" "${PYTHON_VERSIONS[@]}"
  serve_log=$(mktemp)
  .venv/bin/jserve-serve --port=0 --http_port=0 "$@" >"$serve_log" 2>&1 &
  server=$!
  trap 'kill $server 2>/dev/null; wait $server 2>/dev/null; rm -f "$serve_log"' EXIT
  until grep -q "] ready: " "$serve_log"; do
    kill -0 $server 2>/dev/null || { tail -n 15 "$serve_log" >&2; fail "the server ended"; }
    sleep 0.2
  done
  url=$(sed -n 's/.*HTTP answers on \(http[^ ]*\).*/\1/p' "$serve_log" | head -n 1)
  say "Server: $url"
}
