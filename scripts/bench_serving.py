#!/usr/bin/env python3
"""Loads a server and reports latencies and rates: scripts/bench_serving.py --help lists the flags.

Sixteen requests at once: --dataset=workload --dataset_path=tests/data/workloads/work16.json
One at a time: --concurrency=1. Open loop: --request_rate=4 --burstiness=0.5.
"""

from jserve.bench.main import run

if __name__ == "__main__":
    run()
