"""Reading compiled programs as text: what the ahead-of-time checks conclude must be right."""

import pytest

from polestar_jax.kernels.hlo import bits, custom_calls, host_choices, kernel_calls, moves
from polestar_jax.kernels.ptx import ENTRY, THUNK

MODULE = """HloModule jit_f, is_scheduled=true

%fused_a (param_0: bf16[2,256,64]) -> bf16[2,64] {
  %param_0 = bf16[2,256,64]{2,1,0} parameter(0)
  %s = bf16[2,128,64]{2,1,0} slice(%param_0), slice={[0:2], [0:128], [0:64]}
  ROOT %r = bf16[2,64]{1,0} copy(%s)
}

ENTRY %main.1 (p: bf16[2,256,64], q: f32[8]) -> (bf16[2,64], f32[8]) {
  %p = bf16[2,256,64]{2,1,0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %fusion = bf16[2,64]{1,0} fusion(%p), kind=kLoop, calls=%fused_a
  %copy.1 = f32[8]{0} copy(%q), metadata={op_name="copy"}
  %k = (f32[8]{0}, f32[8]{0}) custom-call(%q), custom_call_target="__gpu$xla.gpu.triton", \
backend_config={grid_x = 8 : i32, ir = "ML\\EFR\\22, na", name = "attend_rows", num_warps = 4 : i32}
  ROOT %t = (bf16[2,64]{1,0}, f32[8]{0}) tuple(%fusion, %copy.1)
}
"""


def test_only_the_root_of_a_fusion_counts_as_written():
    found = [(m.op, m.shape, m.bytes, m.written) for m in moves(MODULE)]
    assert found == [
        ("slice", "bf16[2,128,64]", 2 * 128 * 64 * 2, False),
        ("copy", "bf16[2,64]", 256, True),
        ("copy", "f32[8]", 32, True),
    ]


def test_every_part_of_a_fusion_with_several_results_counts_as_written():
    module = MODULE.replace(
        "ROOT %r = bf16[2,64]{1,0} copy(%s)",
        "%r = bf16[2,64]{1,0} copy(%s)\n  ROOT %t.9 = (bf16[2,64]{1,0}, bf16[2,128,64]{2,1,0}) "
        "tuple(%r, %s)",
    )
    found = [m.op for m in moves(module) if m.written]
    assert found == ["slice", "copy", "copy"]


def test_custom_calls_are_counted_by_target_and_kernels_by_name():
    assert custom_calls(MODULE) == {"__gpu$xla.gpu.triton": 1}
    assert kernel_calls(MODULE) == {"attend_rows": 1}
    assert kernel_calls(MODULE.replace("__gpu$xla.gpu.triton", "__cublas$gemm")) == {}


def test_branches_are_counted_where_they_are_taken():
    branch = "  %c = f32[8]{0} conditional(%i, %q, %q), branch_computations={%a, %b}\n"
    assert host_choices(MODULE) == 0
    assert host_choices(MODULE.replace("  %k =", branch + "  %k =")) == 1


@pytest.mark.parametrize(
    ("dtype", "width"), [("bf16", 16), ("f32", 32), ("pred", 8), ("s4", 4), ("f8e4m3fn", 8)]
)
def test_widths_of_element_types(dtype, width):
    assert bits(dtype) == width


def test_launches_and_entries_are_read_from_the_compiler_dump():
    line = "001: kCustomKernel [a | b] drift_1 grid: [4, 2, 1] threads: [256, 1, 1]  "
    found = THUNK.search(line + "shared_memory: 6144 bytes")
    assert found is not None
    assert found.groups() == ("drift_1", "4", "2", "1", "256", "1", "1", "6144")
    assert ENTRY.findall(".visible .entry drift_1(\n") == ["drift_1"]
