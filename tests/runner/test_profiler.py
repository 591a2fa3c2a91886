"""Profiles that jax really writes."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

from jserve.errors import ConfigError
from jserve.runner.profiler import Profiler


def test_each_profile_is_a_trace_in_a_folder_of_its_own(tmp_path):
    profiler = Profiler(str(tmp_path / "new" / "folder"))
    folders = []
    for _ in range(2):
        folders.append(Path(profiler.start()))
        (jnp.ones((64, 64)) @ jnp.ones((64, 64))).block_until_ready()
        profiler.stop()
    assert len({*folders}) == 2
    for folder in folders:
        assert folder.parent == tmp_path / "new" / "folder"
        assert [file.stat().st_size > 0 for file in folder.rglob("*.xplane.pb")] == [True]


def test_a_folder_that_cannot_be_made_is_a_config_error_with_its_flag(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--profile_dir="):
        Profiler(str(tmp_path / "file" / "below"))
