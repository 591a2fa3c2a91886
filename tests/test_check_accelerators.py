"""The detectors behind scripts/check_accelerators.py, on texts in the compilers' formats."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from accelerators.cases import Case, Found
from accelerators.hlo import (
    PtxasReport,
    collectives,
    conditionals,
    copies,
    host_transfers,
    products,
    ptxas_reports,
    wider,
)
from accelerators.hlo import wgmma_counts as wgmma
from accelerators.workers import run_all

POOL = 4 * 1024 * 16 * 8 * 128
WEIGHT = 4096 * 1024


def module(body: str, fused: str = "") -> str:
    return f"""HloModule jit_step, is_scheduled=true
{fused}
ENTRY %main.1 (p.1: bf16[4,1024,16,8,128], w.1: bf16[4096,1024]) -> bf16[4096,1024] {{
  %p.1 = bf16[4,1024,16,8,128]{{4,3,2,1,0:T(8,128)(2,1)}} parameter(0)
  %w.1 = bf16[4096,1024]{{1,0:T(8,128)(2,1)}} parameter(1)
{body}
}}
"""


def fusion(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"%fused.1 (a: bf16[4096,1024]) -> bf16[4096,1024] {{\n{body}\n}}\n"


IN_PLACE = "%f.1 = bf16[4096,1024]{1,0} fusion(%w.1), kind=kLoop, calls=%fused.1"


@pytest.mark.parametrize(
    "line",
    [
        "%c.1 = bf16[4,1024,16,8,128]{4,3,2,1,0:T(8,128)(2,1)} copy(%p.1)",
        "ROOT %t.1 = bf16[1024,4096]{1,0:T(8,128)(2,1)} transpose(%w.1), dimensions={1,0}",
        "%u.1 = f32[4096,1024]{1,0} convert(%w.1)",
        "%s.1 = (bf16[4096,1024]{0,1}, bf16[4096,1024]{1,0}, u32[]{:S(2)}) copy-start(%w.1)",
        "%d.1 = bf16[1,4096,1024]{2,1,0} dynamic-slice(%w.1, %i), dynamic_slice_sizes={1,4096}",
    ],
)
def test_an_instruction_that_moves_a_large_array_is_found(line):
    [found] = copies(module(f"  {line}"), {POOL, WEIGHT})
    assert line.split("%")[1].split(" ")[0] in found


@pytest.mark.parametrize(
    "line",
    [
        "%c.1 = bf16[4096,1024]{1,0:T(8,128)(2,1)S(1)} copy(%w.1)",  # into a TPU's VMEM
        "%p.2 = (bf16[4096,1024]{1,0:S(1)}, bf16[4096,1024]{1,0}, u32[]{:S(2)}) copy-start(%w.1)",
        "%c.1 = bf16[64,4096]{1,0} copy(%x)",  # an activation
        "%d.1 = bf16[4096,1024]{1,0} dot(%a, %b), lhs_contracting_dims={1}",
        "%b.1 = bf16[1024,4096]{0,1} bitcast(%w.1)",
    ],
)
def test_an_instruction_that_moves_no_large_array_in_hbm_is_not(line):
    assert copies(module(f"  {line}"), {POOL, WEIGHT}) == []


def test_a_fusion_that_only_slices_and_converts_is_a_copy():
    fused = fusion(
        "%a = bf16[8,4096,1024]{2,1,0} parameter(0)",
        "%i = s32[] parameter(1)",
        "%j = s32[] add(%i, %i)",
        "%s = bf16[1,4096,1024]{2,1,0} dynamic-slice(%a, %j), dynamic_slice_sizes={1,4096,1024}",
        "ROOT %b = bf16[4096,1024]{1,0} bitcast(%s)",
    )
    [found] = copies(module(f"  {IN_PLACE}", fused), {WEIGHT})
    assert found.startswith("f.1 = ")


def test_a_slice_that_a_product_reads_in_place_is_no_copy():
    fused = fusion(
        "%a = bf16[8,4096,1024]{2,1,0} parameter(0)",
        "%s = bf16[4096,1024]{1,0} slice(%a), slice={[0:1]}",
        "ROOT %d = bf16[4096,1024]{1,0} multiply(%s, %s)",
    )
    assert copies(module(f"  {IN_PLACE}", fused), {WEIGHT}) == []


def test_a_copy_in_the_body_of_a_loop_is_found():
    body = """%body.1 (x: (s32[], bf16[4096,1024])) -> (s32[], bf16[4096,1024]) {
  %x = (s32[], bf16[4096,1024]{1,0}) parameter(0)
  %w.2 = bf16[4096,1024]{1,0} get-tuple-element(%x), index=1
  %c.2 = bf16[4096,1024]{0,1} copy(%w.2)
}
"""
    assert len(copies(module("", body), {WEIGHT})) == 1


def test_collectives_are_counted_by_size_and_asynchronous_ones_once():
    text = module(
        """  %a.1 = bf16[4096,64]{1,0} all-reduce(%x), to_apply=%add
  %a.2 = ((bf16[4096,64]{1,0}), bf16[4096,64]{1,0}) all-reduce-start(%x), to_apply=%add
  %a.3 = bf16[4096,64]{1,0} all-reduce-done(%a.2)
  %g.1 = f32[64,128256]{1,0} all-gather(%y), dimensions={1}"""
    )
    assert collectives(text) == {
        ("all-reduce", 4096 * 64): 2,
        ("all-gather", 64 * 128256): 1,
    }


SCALED = fusion(
    "%a = s8[4096,1024]{1,0} parameter(0)",
    "%b = bf16[4096,1024]{1,0} convert(%a)",
    "ROOT %c = bf16[4096,1024]{1,0} multiply(%b, %b)",
)


@pytest.mark.parametrize(
    ("line", "is_wider"),
    [
        (IN_PLACE, True),  # of SCALED: more than a move, so `copies` does not find it
        ("%c.1 = s32[4096,1024]{1,0:T(8,128)} convert(%w.1)", True),
        ("%c.1 = bf16[4096,1024]{1,0:T(8,128)(2,1)S(1)} convert(%w.1)", False),  # into VMEM
        ("%c.1 = s8[1024,4096]{1,0:T(8,128)(4,1)} copy(%w.1)", False),
        ("%c.1 = s32[4096,64]{1,0} dot(%w.1, %x)", False),
    ],
)
def test_a_weight_that_is_made_wider_in_memory_is_found(line, is_wider):
    fused = SCALED if line is IN_PLACE else ""
    text = f"{fused}\nENTRY %main.1 (w.1: s8[4096,1024]) -> s32[4096,64] {{\n  {line}\n}}\n"
    assert [found.split(" ")[0] for found in wider(text, {WEIGHT})] == [line[1:4]] * is_wider


def test_products_are_counted_by_what_they_multiply_wherever_they_stand():
    fused = """%fused.1 (v: s8[4096,1024], x: s8[1024,64]) -> s32[4096,64] {
  %v = s8[4096,1024]{1,0} parameter(0)
  %x = s8[1024,64]{1,0} parameter(1)
  ROOT %d.1 = s32[4096,64]{1,0:T(8,128)} convolution(%v, %x), dim_labels=bf_io->bf
}
"""
    text = module(
        """  %h.1 = bf16[1024,64]{1,0} parameter(2)
  %d.2 = f32[4096,64]{1,0} dot(%w.1, %h.1), lhs_contracting_dims={1}
  %d.3 = f32[4096,64]{1,0} dot(%w.1, %h.1), lhs_contracting_dims={1}""",
        fused,
    )
    assert products(text) == {"s8 s8 s32": 1, "bf16 bf16 f32": 2}


def test_conditionals_inside_a_branch_are_told_from_those_that_are_always_met():
    branch = """%branch.1 (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %c.2 = f32[8]{0} conditional(%p, %x, %x), true_computation=%a, false_computation=%b
}
"""
    always = "  %c.1 = f32[8]{0} conditional(%q, %y, %y), true_computation=%branch.1"
    assert conditionals(module(always, branch)) == (1, 2)
    assert conditionals(module("", branch)) == (0, 1)


def test_waiting_for_the_host_and_reading_its_memory_are_found():
    text = module(
        """  %s.1 = (f32[8]{0}, u32[]{:S(2)}, token[]) send(%x, %t), is_host_transfer=true
  %h.1 = bf16[2048]{0:T(1024)S(5)} parameter(2)"""
    )
    assert [found.split(" ")[0] for found in host_transfers(text)] == ["s.1", "h.1"]
    assert host_transfers(module("")) == []


PTXAS = """
ptxas info    : Compiling entry function 'decode' for 'sm_90a'
ptxas info    : Function properties for decode
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 72 registers, used 2 barriers, 1 bytes smem
ptxas info    : Compile time = 25.690 ms
ptxas info    : Function properties for prefill
    432 bytes stack frame, 428 bytes spill stores, 432 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers
"""


def test_registers_and_spills_are_read_per_kernel():
    assert ptxas_reports(PTXAS) == [
        PtxasReport("decode", 72, 0, 0),
        PtxasReport("prefill", 255, 428, 432),
    ]
    assert ptxas_reports("no kernel here") == []


def test_tensor_core_products_are_counted_per_kernel():
    line = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1}, %rd1, %rd2;\n"
    ptx = f".visible .entry decode(\n{line}{line}\n.visible .entry join(\nret;\n"
    assert wgmma(ptx) == {"decode": 2, "join": 0}


CHILD = """
import sys, time
for line in sys.stdin:
    if "slow" in line: time.sleep(60)
    if "dies" in line: sys.exit(3)
    print('[{"seconds": 1}, []]', flush=True)
"""


def test_a_case_that_hangs_or_kills_its_process_is_a_problem_and_the_rest_go_on(monkeypatch):
    monkeypatch.setattr("accelerators.workers.START_S", 0)
    cases = [
        Case(f"kernel/none/{what}", Found, limit_s=2 if what == "slow" else 60)
        for what in ("fine", "dies", "slow", "fine too")
    ]
    found = {}
    run_all(cases, [sys.executable, "-c", CHILD], 1, lambda c, f: found.update({c.name: f}))
    assert {name.split("/")[2]: f.problems for name, f in found.items()} == {
        "fine": [],
        "dies": ["its process died with 3"],
        "slow": ["its process was killed after 2 s"],
        "fine too": [],
    }
