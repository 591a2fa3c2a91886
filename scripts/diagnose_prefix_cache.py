#!/usr/bin/env python3
"""Says what keeps prompts from the prefix cache: scripts/diagnose_prefix_cache.py --help."""

from jserve.doctor.main import run

if __name__ == "__main__":
    run()
