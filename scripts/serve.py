#!/usr/bin/env python3
"""Serves a model over gRPC: scripts/serve.py --model=smollm2-135m; --help lists the settings."""

from jserve.server.main import run

if __name__ == "__main__":
    run()
