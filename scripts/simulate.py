#!/usr/bin/env python3
"""Predicts how a server would do under a load, without a device: scripts/simulate.py --help."""

from jserve.sim.main import run

if __name__ == "__main__":
    run()
