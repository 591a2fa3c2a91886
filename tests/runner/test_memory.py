"""Large blocks of memory that are freed, and allocated again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# In a process of its own: what is set stays set. A page is touched for the first time by a fault.
SECOND_BLOCK = """
import ctypes, resource
from jserve.runner.compile import keep_freed_memory

def faults_of_a_block():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(SIZE)
    libc.memset(block, 1, SIZE)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

libc, SIZE = ctypes.CDLL(None), 96 * 2**20
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
keep_freed_memory()
print(faults_of_a_block(), faults_of_a_block())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told anything")
def test_a_block_like_one_that_was_freed_needs_no_new_pages():
    ran = subprocess.run(
        [sys.executable, "-c", SECOND_BLOCK], capture_output=True, text=True, check=True
    )
    first, second = map(int, ran.stdout.split())
    assert first > 20  # of 4 KiB, or of 2 MiB
    assert second < 5
