"""Large blocks of memory that are freed, and allocated again."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.util import find_spec

import pytest

# In a process of its own: what is set stays set. A page is touched for the first time by a fault.
SECOND_BLOCK = """
import ctypes, resource, threading
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
found = []
threads = [threading.Thread(target=lambda: found.append(faults_of_a_block())) for _ in range(2)]
for thread in threads:
    thread.start()
    thread.join()
print(*found)
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or any(map(find_spec, ("jax_plugins", "libtpu"))),
    reason="only glibc is told anything, and only where jax has no devices but CPUs",
)
def test_a_block_like_one_that_another_thread_has_freed_needs_no_new_pages():
    ran = subprocess.run(
        [sys.executable, "-c", SECOND_BLOCK], capture_output=True, text=True, check=True
    )
    first, second = map(int, ran.stdout.split())
    assert first > 20  # of 4 KiB, or of 2 MiB
    assert second < 5
