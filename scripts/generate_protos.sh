#!/usr/bin/env bash
# Rebuilds the modules in jserve/server/proto from their .proto files.
# Generated code loads only with libraries at least as new as its generator, so the generator is the
# oldest release that pyproject.toml admits, in an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

generator=grpcio-tools==1.76.0
env=$(mktemp -d)
trap 'rm -rf "$env"' EXIT
"${PYTHON:-python3}" -m venv "$env"
"$env/bin/pip" install --quiet "$generator" "setuptools<81"
"$env/bin/python" -m grpc_tools.protoc --proto_path=. \
  --python_out=. --pyi_out=. jserve/server/proto/*.proto
