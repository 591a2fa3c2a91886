"""Block sizes come from measurements where there are some, and from the backend otherwise."""

from __future__ import annotations

import dataclasses
import json
import logging

import numpy as np
import pytest

from pallas_kernels.dispatch import Backend
from pallas_kernels.ragged_paged_attention import api, tuning
from pallas_kernels.ragged_paged_attention.config import AttentionShape, xla_config

KIND = "Some Chip v1"
SHAPE = AttentionShape(
    num_tokens=64,
    num_rows=16,
    pages_per_row=8,
    page_size=16,
    num_kv_heads=2,
    group=4,
    pool_rows=4,
    width=64,
    q_dtype="float32",
    kv_dtype="float32",
)


def tuned(phase="decode", size=16, blocks=None, shape=SHAPE, **fields):
    given = dict(
        backend="xla",
        phase=phase,
        size=size,
        shape=tuning.exact_part(shape),
        blocks=blocks or {"decode_items": 77},
        jax="0.12.0",
        date="2026-11-30",
        figures={},
    )
    return tuning.Tuned(**(given | fields))


def config_for(folder, shape=SHAPE, kind=KIND):
    return tuning.config_for(Backend.XLA, shape, kind, folder)


def test_without_a_tuned_file_the_backend_chooses(tmp_path):
    assert config_for(tmp_path) == xla_config(SHAPE)


def test_an_entry_for_the_shape_replaces_the_blocks_of_its_phase_only(tmp_path):
    tuning.write([tuned()], KIND, tmp_path)
    assert config_for(tmp_path) == dataclasses.replace(xla_config(SHAPE), decode_items=77)


def test_decode_is_looked_up_by_rows_and_prefill_by_tokens(tmp_path):
    prefill = tuned("prefill", 64, {"prefill_tile": 24})
    tuning.write([tuned(), prefill], KIND, tmp_path)
    config = config_for(tmp_path)
    assert (config.decode_items, config.prefill_tile) == (77, 24)


@pytest.mark.parametrize(
    ("rows", "blocks"), [(7, None), (8, 1), (15, 1), (16, 2), (32, 2), (33, None)]
)
def test_the_nearest_smaller_size_counts_down_to_half(tmp_path, rows, blocks):
    entries = [tuned(size=8, blocks={"decode_items": 1}), tuned(blocks={"decode_items": 2})]
    tuning.write(entries, KIND, tmp_path)
    shape = dataclasses.replace(SHAPE, num_rows=rows)
    expected = xla_config(shape).decode_items if blocks is None else blocks
    assert config_for(tmp_path, shape).decode_items == expected


@pytest.mark.parametrize("name", tuning.EXACT)
def test_an_entry_for_other_heads_dtypes_or_pages_does_not_count(tmp_path, name):
    tuning.write([tuned()], KIND, tmp_path)
    value = "bfloat16" if name.endswith("dtype") else 2 * getattr(SHAPE, name)
    shape = dataclasses.replace(SHAPE, **{name: value})
    assert config_for(tmp_path, shape) == xla_config(shape)


def test_an_entry_of_another_device_kind_or_backend_does_not_count(tmp_path):
    tuning.write([tuned()], "Another Chip", tmp_path)
    tuning.write([tuned(backend="mosaic_tpu")], KIND, tmp_path)
    assert config_for(tmp_path) == xla_config(SHAPE)


def test_the_log_says_once_where_block_sizes_come_from(tmp_path, caplog):
    tuning.write([tuned()], KIND, tmp_path)
    with caplog.at_level(logging.INFO, logger=tuning.__name__):
        config_for(tmp_path)
        config_for(tmp_path)
    [record] = caplog.records
    assert "decode tuned at 16 on 2026-11-30 with jax 0.12.0" in record.message
    assert "prefill chosen by roofline" in record.message


def test_writing_replaces_what_was_measured_again_and_keeps_the_rest(tmp_path):
    tuning.write([tuned(), tuned(size=32)], KIND, tmp_path)
    path = tuning.write([tuned(blocks={"decode_items": 5})], KIND, tmp_path)
    found = {entry.size: entry.blocks["decode_items"] for entry in tuning.read(path)}
    assert found == {16: 5, 32: 77}
    assert list(path.parent.iterdir()) == [path]


def test_blocks_that_the_config_no_longer_has_are_refused_by_name(tmp_path):
    tuning.write([tuned(blocks={"decode_gone": 4})], KIND, tmp_path)
    with pytest.raises(ValueError, match=r"Some_Chip_v1.*XlaConfig has no 'decode_gone'"):
        config_for(tmp_path)


GOOD = dataclasses.asdict(tuned())
BAD_FILES = {
    "no JSON": ("{", "Expecting"),
    "no list": ({}, "no list"),
    "no object": ([3], "'entry'"),
    "no size": ([{k: v for k, v in GOOD.items() if k != "size"}], "'size'"),
    "text for a size": ([GOOD | {"size": "16"}], "'size'"),
    "a field too many": ([GOOD | {"speed": 1}], "'speed'"),
    "an unknown backend": ([GOOD | {"backend": "cuda"}], "'backend'"),
    "an unknown phase": ([GOOD | {"phase": "verify"}], "'phase'"),
    "a shape without width": (
        [GOOD | {"shape": {k: v for k, v in GOOD["shape"].items() if k != "width"}}],
        "'shape.width'",
    ),
    "a negative block size": ([GOOD | {"blocks": {"decode_items": -1}}], "'decode_items'"),
    "blocks of the other phase": ([GOOD | {"blocks": {"prefill_tile": 8}}], "'prefill_tile'"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_damaged_file_is_refused_naming_file_and_field(tmp_path, name):
    content, message = BAD_FILES[name]
    path = tuning.path_of(KIND, tmp_path)
    path.parent.mkdir()
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=f"Some_Chip_v1/ragged_paged_attention.json: .*{message}"):
        config_for(tmp_path)


def test_every_tuned_file_of_the_package_can_be_read():
    for path in tuning.TUNED.rglob("*.json"):
        assert tuning.read(path), f"{path} has no entries"


def test_a_call_without_block_sizes_asks_for_those_of_its_device_kind(monkeypatch):
    asked = []

    def config_for(backend, shape, device_kind):
        asked.append((backend, shape.num_rows, device_kind))
        return xla_config(shape)

    monkeypatch.setattr(api, "config_for", config_for)
    k = np.zeros((2, 1, 8), np.float32)
    rows = [np.ones(2), np.ones((2, 1)), np.arange(3), np.full(3, 2)]
    call = [k, k, k, np.zeros((1, 3, 16, 2, 8), np.float32), 0, *(x.astype(np.int32) for x in rows)]
    for kind in (None, KIND):
        api.ragged_paged_attention(*call, scale=1.0, backend=Backend.XLA, device_kind=kind)
    assert asked == [(Backend.XLA, 2, "cpu"), (Backend.XLA, 2, KIND)]
