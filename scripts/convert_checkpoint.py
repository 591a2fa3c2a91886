#!/usr/bin/env python3
"""Writes a model as an Orbax checkpoint: see jserve/checkpoint/convert.py."""

from jserve.checkpoint.convert import run

if __name__ == "__main__":
    run()
