"""The kernels compiled ahead of time for A100 and H200: resources, places, judgements."""

import shutil
import subprocess
from pathlib import Path

import pytest

from polestar_jax.kernels import aot
from polestar_jax.kernels.cases import cases
from polestar_jax.kernels.compile_check import Row, judge, markdown, programs
from polestar_jax.kernels.plan import Plan, power_of_two
from polestar_jax.kernels.ptx import Kernel

ROOT = Path(__file__).parents[2]
CARDS = ("A100", "H200")


def kernel(**changes):
    plain = {
        "name": "k", "registers": 100, "stack": 0, "spilled": 0, "shared": 1024, "threads": 256,
        "blocks": 1, "matrix": 8, "target": "sm_80",
    }  # fmt: skip
    return Kernel(**plain | changes)


def test_a_kernel_is_refused_for_each_fault_alone():
    assert not list(judge(kernel(), "A100", matrix=True))
    assert list(judge(kernel(spilled=4), "A100", matrix=True)) == ["4 bytes spilled"]
    assert list(judge(kernel(matrix=0), "A100", matrix=True)) == ["no matrix instruction"]
    assert not list(judge(kernel(matrix=0), "A100", matrix=False))
    big = kernel(shared=200 * 1024)
    assert len(list(judge(big, "A100", matrix=True))) == 1
    assert not list(judge(big, "H200", matrix=True))


def test_the_table_says_what_is_wrong():
    row = Row("op", "s", "bfloat16", "A100", 1, 256, 168, 12, 2048, 32, 1.0, ("12 bytes spilled",))
    assert markdown([row]).splitlines()[-1] == (
        "| op | s | bfloat16 | A100 | 1 | 256 | 168 | 12 | 2,048 | 32 | 12 bytes spilled |"
    )


def test_every_op_is_checked_at_the_shapes_of_both_models():
    found = {(c.op, c.shape) for c in cases(("bfloat16",))}
    ops = {op for op, _ in found}
    assert len(ops) == 11
    wanted = {(op, shape) for op in ops for shape in ("llada-8b", "dream-7b", "embedded")}
    # The body for Hopper takes heads of 128 only; the embedded model's have 32.
    assert wanted - {("drift_attention_mosaic", "embedded")} <= found


def test_decode_programs_of_both_models_and_policies_are_checked():
    found = [case.name.removeprefix("program/") for case in programs()]
    assert found == [
        f"{model}/{policy}"
        for model in ("llada-8b", "dream-7b")
        for policy in (
            "fast-dllm-dual/denoise", "fast-dllm-dual/whole generation",
            "polestar/cached", "polestar/refresh", "polestar/whole generation",
        )
    ]  # fmt: skip


def test_plans_cover_all_rows_and_keys_with_no_empty_split():
    for groups in (1, 4, 32, 512):
        for rows in (1, 16, 33, 231):
            for length in (1, 64, 65, 1280, 4096):
                for itemsize in (2, 4):
                    plan = Plan.of(groups, rows, length, itemsize, rotary=True)
                    assert plan.rows == power_of_two(plan.rows) >= 16
                    assert plan.row_tiles * plan.rows >= rows
                    per_split = plan.tiles_per_split * plan.keys
                    assert plan.splits * per_split >= length > (plan.splits - 1) * per_split


def test_batch_one_fills_the_card():
    plan = Plan.of(32, 32, 1280, 2, rotary=True)
    assert 32 * plan.row_tiles * plan.splits >= 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "--only llada-8b/bfloat16",
        "--only program/dream-7b/polestar/refresh --gpu H200",
        pytest.param("", marks=pytest.mark.exhaustive),
    ],
)
def test_every_kernel_and_decode_program_fits_both_cards(options):
    """By the make target, which brings its own Python with the newest JAX and the compiler."""
    command = ["make", "--no-print-directory", "kernels-check", f"ARGS={options}"]
    probe = subprocess.run(
        [*command, "-n"], cwd=ROOT, capture_output=True, text=True, check=False
    )  # fmt: skip
    if shutil.which("make") is None or "test -n ''" in probe.stdout:
        pytest.skip("no Python >= 3.12 on this machine")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.strip().endswith(", 0 with problems")


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("card", CARDS)
def test_an_in_place_write_copies_nothing(card):
    case = next(c for c in cases() if c.name == "scatter_cache/embedded/bfloat16")
    program = aot.compile_for(case.run, case.args, card, case.donate)
    cache = 2 * 2 * 4 * 160 * 32 * 2
    assert program.alias == cache
    assert not program.copies
    assert program.custom_calls == {"__gpu$xla.gpu.triton": 1}


@pytest.mark.gpu_compiler
def test_the_reference_compiles_without_a_kernel():
    from functools import partial

    case = next(c for c in cases() if c.name == "gather_rows/embedded/bfloat16")
    program = aot.compile_for(partial(case.run, implementation="xla"), case.args, "A100")
    assert "__gpu$xla.gpu.triton" not in program.custom_calls
