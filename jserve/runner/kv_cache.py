"""How large the KV pool is, and its one array. Knows bytes and shapes, not who uses a page."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jserve.config import CacheSettings
from jserve.errors import ConfigError
from jserve.models.config import ModelConfig
from jserve.models.head_layout import HeadLayout
from jserve.runner.mesh import pool_sharding
from pallas_kernels.dispatch import Backend
from pallas_kernels.kv_layout import PoolLayout, bytes_per_page, pool_layout, pool_shape

# --kv_cache_dtype but "auto", which is the model's own
KV_DTYPES = {"int8": jnp.dtype(jnp.int8), "fp8": jnp.dtype(jnp.float8_e4m3fn)}
DEFAULT_PAGE_SIZE = {"cpu": 16, "tpu": 64, "gpu": 64}
ACCELERATOR_FRACTION = 0.9
# On a CPU the pool shares memory with everything else, and is touched at once: keep it modest.
CPU_FRACTION, CPU_MOST_BYTES = 0.25, 384 * 2**20


def page_size_for(settings: CacheSettings, platform: str) -> int:
    return settings.page_size or DEFAULT_PAGE_SIZE[platform]


def free_bytes(device: jax.Device) -> int:
    """Returns the bytes that `device` can still hand out (on a CPU: the machine's)."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return min(_available_bytes(), _cgroup_headroom())


def _available_bytes() -> int:
    """What the machine can hand out, its page cache included where the system says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_headroom() -> int:
    """What a container's memory limit (cgroup v2) leaves; without one, as good as no limit."""
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / f"memory.{x}").read_text().strip() for x in ("max", "current"))
    except OSError:
        return 2**62
    return 2**62 if limit == "max" else max(0, int(limit) - int(used))


def layout_of(
    backend: Backend, model: ModelConfig, heads: HeadLayout, dtype: jnp.dtype
) -> PoolLayout:
    """Returns how `backend` wants the heads that one device holds in the pool."""
    here = heads.num_kv_heads // heads.tensor_parallel_size
    return pool_layout(backend, here, model.head_dim, dtype)


def choose_num_pages(
    settings: CacheSettings,
    model: ModelConfig,
    layout: PoolLayout,
    dtype: jnp.dtype,
    *,
    page_size: int,
    max_num_seqs: int,
    max_model_len: int,
    device: jax.Device,
) -> int:
    """Returns P, the pages of the pool with the null page, from the memory it may take per device.

    Never more than all rows at full length can use.

    Raises:
      ConfigError: the memory does not hold two pages.
    """
    page_bytes = bytes_per_page(model.num_layers, page_size, layout, dtype)
    if settings.kv_memory_bytes:
        budget = settings.kv_memory_bytes
    elif settings.kv_memory_fraction:
        budget = int(settings.kv_memory_fraction * free_bytes(device))
    elif device.platform == "cpu":
        budget = min(int(CPU_FRACTION * free_bytes(device)), CPU_MOST_BYTES)
    else:
        budget = int(ACCELERATOR_FRACTION * free_bytes(device))
    useful = max_num_seqs * -(-max_model_len // page_size) + 1
    num_pages = min(budget // page_bytes, useful)
    if num_pages < 2:
        raise ConfigError(
            f"{budget} bytes of KV memory hold {budget // page_bytes} pages of {page_bytes} bytes; "
            f"raise --kv_memory_bytes to {2 * page_bytes} or more, or lower --page_size"
        )
    return num_pages


def make_pool(
    model: ModelConfig,
    layout: PoolLayout,
    dtype: jnp.dtype,
    num_pages: int,
    page_size: int,
    mesh: Mesh,
) -> jax.Array:
    """Returns the zeroed pool [L, P, p, R, W], split over the mesh."""
    shape = pool_shape(model.num_layers, num_pages, page_size, layout, mesh.size)
    return jnp.zeros(shape, dtype, device=pool_sharding(mesh))
