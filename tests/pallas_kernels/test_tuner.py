"""The search for block sizes, on made-up times; and once for real, on this CPU."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.devices import DEVICES, device_spec
from pallas_kernels.dispatch import Backend
from pallas_kernels.ragged_paged_attention import tuning
from pallas_kernels.ragged_paged_attention.config import XlaConfig
from pallas_kernels.ragged_paged_attention.tuner import climb, gain_of, neighbours, timer_of
from pallas_kernels.ragged_paged_attention.workloads import (
    Heads,
    decode,
    layers_for,
    make_step,
    prefill,
)

ROOT = Path(__file__).parents[2]
START = XlaConfig(decode_items=16, prefill_tile=128, prefill_block=128)
HEADS = Heads(4, 2, 32)
TINY = {"dtype": "float32", "kv_dtype": "float32"}


def found(time_of, phase="prefill", **settings):
    lines = []
    result = climb(START, phase, time_of, min_gain=0.03, report=lines.append, **settings)
    return result, lines


def valley(config: XlaConfig) -> list[float]:
    """Fastest at a tile of 32 and a block of 512; the same for both workloads."""
    away = abs(math.log2(config.prefill_tile / 32)) + abs(math.log2(config.prefill_block / 512))
    return [1 + away, 2 + 2 * away]


def test_the_search_walks_to_the_best_block_sizes():
    result, _ = found(valley)
    assert result.best == XlaConfig(16, 32, 512)
    assert result.gain == pytest.approx(1 - 1 / 5)


def test_only_block_sizes_of_the_phase_are_changed():
    result, lines = found(lambda config: [1 / config.decode_items], is_time_left=lambda: True)
    assert result.best == START
    assert len(lines) == 4


def test_small_counts_are_also_tried_one_apart():
    config = XlaConfig(decode_items=2, prefill_tile=8, prefill_block=8)
    assert [c.decode_items for c in neighbours(config, "decode")] == [1, 3, 4]


def test_a_refused_config_is_passed_over_and_named():
    def time_of(config):
        if config.prefill_block > 128:
            raise ValueError("needs 300 KiB of shared memory\nand so on")
        return valley(config)

    result, lines = found(time_of)
    assert result.best == XlaConfig(16, 32, 128)
    assert any("'prefill_block': 256}: refused: needs 300 KiB" in line for line in lines)


def test_what_saves_less_than_the_least_gain_is_not_taken():
    result, _ = found(lambda config: [1.0 if config == START else 0.98])
    assert (result.best, result.gain) == (START, 0)


def test_the_search_stops_when_the_time_is_up():
    result, lines = found(valley, is_time_left=lambda: False)
    assert (result.best, lines) == (START, [])


def test_a_gain_that_was_luck_shows_as_noise():
    times = iter([[1.0], [0.5]])  # the start's, the first neighbour's; from then on all are equal
    result, _ = found(lambda config: next(times, [1.0]))
    assert result.gain == 0
    assert result.noise == 1.0


def test_gains_of_workloads_weigh_alike_whatever_their_length():
    assert gain_of([50.0, 1.0], [100.0, 2.0]) == pytest.approx(0.5)
    assert gain_of([2.0, 50.0], [1.0, 100.0]) == pytest.approx(0)


@pytest.mark.parametrize("make", [decode, prefill])
def test_a_step_is_measured_and_gives_the_same_under_other_block_sizes(make):
    timer = timer_of(
        [make(HEADS, 8, 40, 16, **TINY)], Backend.XLA, pool_bytes=10**6, repeats=2, calls=2
    )
    [seconds] = timer(XlaConfig(16, 8, 16))
    assert 0 < seconds < 1
    timer(XlaConfig(32, 4, 32))


def test_block_sizes_that_change_the_results_are_refused(monkeypatch):
    from pallas_kernels.ragged_paged_attention import tuner

    attend_with = tuner.attend_with
    timer = timer_of(
        [decode(HEADS, 4, 40, 16, **TINY)], Backend.XLA, pool_bytes=10**6, repeats=1, calls=1
    )
    timer(START)

    def wrong(*args):
        attend = attend_with(*args)

        def call(*step):
            out, pool = attend(*step)
            return out + 1000, pool

        return call

    monkeypatch.setattr(tuner, "attend_with", wrong)
    with pytest.raises(ValueError, match="other results in decode_4_rows_40"):
        timer(START)


def test_block_sizes_over_the_on_chip_memory_are_refused_before_they_are_compiled(monkeypatch):
    from pallas_kernels.ragged_paged_attention import tuner

    spec = dataclasses.replace(device_spec("TPU v4"), on_chip_bytes=1000)
    monkeypatch.setattr(tuner, "DEVICES", {"cpu": spec})
    monkeypatch.setattr(tuner, "on_chip_bytes", lambda *_: 1001)
    monkeypatch.setattr(tuner, "compile_layers", None)
    timer = timer_of(
        [decode(HEADS, 4, 40, 16, **TINY)], Backend.XLA, pool_bytes=10**6, repeats=1, calls=1
    )
    with pytest.raises(ValueError, match="1001 of 1000 bytes on the chip"):
        timer(START)


def test_a_workload_counts_its_own_tokens_in_its_context():
    assert decode(HEADS, 2, 100, 16).rows == ((100, 1), (100, 1))
    assert prefill(HEADS, 8, 92, 16).rows == ((100, 8),)
    step = make_step(prefill(HEADS, 8, 92, 16, max_model_len=320), Backend.XLA, num_layers=3)
    assert step.rows[1].shape == (1, 20)
    assert step.pool.shape == (3, 8, 16, 4, 32)
    assert [array.tolist() for array in step.rows[2:]] == [[0, 8], [0, 1, 1]]


def test_the_pool_of_a_measurement_keeps_to_its_bytes():
    workload = decode(HEADS, 4, 1000, 16)  # 253 pages of 16 tokens of 256 bytes
    assert [layers_for(workload, Backend.XLA, n) for n in (1, 4 * 253 * 4096, 10**12)] == [1, 4, 16]


def script(*arguments: str, before: str = "") -> str:
    """Runs the script after a line of Python that may change what is in it."""
    code = f"import sys; sys.path.insert(0, 'scripts'); import tune_kernels as t\n{before}\n"
    command = [sys.executable, "-c", f"{code}t.app.run(t.main)", "--page_sizes=16", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    return run.stdout


DECODE = ("--backend=xla", "--heads=smollm2", "--rows=2", "--phases=decode", "--contexts=64")
FLOAT32 = ("--dtype=float32", "--kv_dtype=float32")


def test_the_script_keeps_what_wins(tmp_path):
    made_up = "t.timer_of = lambda *_, **__: lambda config: [1 + abs(config.decode_items - 64)]"
    script(*DECODE, *FLOAT32, f"--out={tmp_path}", before=made_up)
    [entry] = tuning.read(tuning.path_of("cpu", tmp_path))
    assert (entry.backend, entry.phase, entry.size) == ("xla", "decode", 2)
    assert (entry.blocks, entry.shape["num_kv_heads"]) == ({"decode_items": 64}, 3)
    assert entry.figures == {"decode_2_rows_64": {"us": 1e6, "us_before": 49e6}}


def test_without_an_accelerator_the_script_shows_the_roofline_of_each_device_kind():
    out = script("--rows=16", "--chunks=2048", "--contexts=8192")
    assert "There is no accelerator here" in out
    for kind in DEVICES:
        assert f"| {kind} | decode_16_rows_8192 | {{'decode_" in out
    [line] = [x for x in out.splitlines() if x.startswith("| NVIDIA H200 | prefill_2048")]
    cells = [cell.strip() for cell in line.split("|")]
    flops = 4 * 32 * 128 * (2048 * 8192 + 2048 * 2049 / 2)
    assert float(cells[5]) == pytest.approx(flops / 989e12 * 1e6, abs=0.1)
    assert cells[8] == "arithmetic"


@pytest.mark.slow
def test_the_script_measures_this_cpu(tmp_path):
    out = script(
        *(*DECODE, *FLOAT32, "--repeats=1", "--calls=1", "--pool_bytes=1000000"),
        *("--time_limit_s=1", f"--out={tmp_path}"),
    )
    assert "decode_2_rows_64: from {'decode_items': 16}" in out
    assert "best {'decode_items': " in out
