#!/usr/bin/env python3
"""Answers a file of requests: scripts/batch_generate.py --input=prompts.jsonl --output=out.jsonl"""

from jserve.batch import run

if __name__ == "__main__":
    run()
