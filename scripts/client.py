#!/usr/bin/env python3
"""Asks a running server: scripts/client.py --prompt="..." [--chat]; --help lists the settings."""

from jserve.client import run

if __name__ == "__main__":
    run()
