"""Decode programs of 8-billion-parameter models, compiled for cards that need not be there."""

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import jax
import pytest
from decoding.helpers import small_config

from polestar_jax.kernels.aot import in_own_process
from polestar_jax.kernels.decode_program import (
    DEFAULT,
    GIB,
    WHOLE,
    Case,
    abstract_arguments,
    cases,
    compile_case,
    decode_config,
    faults,
    program,
    square_arrays,
)
from polestar_jax.kernels.hlo import kernel_calls

ROOT = Path(__file__).parents[2]


def row(program="denoise", **changes):
    """A program without a fault."""
    plain = {
        "model": "llada-8b", "policy": "fast-dllm-dual", "program": program, "batch": 1,
        "implementation": "xla", "gpu": "H200", "layers": 32, "compile_seconds": 20.0,
        "compile_processor_seconds": 20.0, "temporary_bytes": 16 * 2**20,
        "logits_bytes": 15 * 2**20, "cache_bytes": 640 * 2**20, "aliased_bytes": 641 * 2**20,
        "kernels": {}, "copies": {}, "transposes": {}, "square_arrays": [],
        "host_choices": 0,
    }  # fmt: skip
    return plain | changes


@pytest.mark.parametrize("program", ["denoise", WHOLE])
def test_a_program_within_its_limits_has_no_fault(program):
    assert faults(row(program)) == []


@pytest.mark.parametrize(
    ("program", "changes", "words"),
    [
        ("denoise", {"temporary_bytes": int(0.07 * GIB)}, "temporary memory"),
        (WHOLE, {"temporary_bytes": int(0.41 * GIB)}, "temporary memory"),
        ("denoise", {"copies": {"copy bf16[1,32,1280,128]": 1}}, "copies"),
        ("denoise", {"transposes": {"transpose bf16[1,32,1280,128]": 1}}, "transposes"),
        (WHOLE, {"transposes": {"transpose bf16[1,32,1280,128]": 66}}, "transposes"),
        ("denoise", {"aliased_bytes": 639 * 2**20}, "in place"),
        (WHOLE, {"aliased_bytes": 0}, "in place"),
        ("denoise", {"implementation": "pallas"}, "expected ['attend_rows']"),
        ("denoise", {"kernels": {"attend_rows": 3}}, "expected none"),
        ("denoise", {"host_choices": 31}, "host chooses"),
        (WHOLE, {"square_arrays": ["f32[32,1280,1280]"]}, "all rows at once"),
        (WHOLE, {"compile_seconds": 61.0, "compile_processor_seconds": 61.0}, "compiled in"),
    ],
)
def test_each_fault_alone_is_found(program, changes, words):
    found = faults(row(program, **changes))
    assert len(found) == 1
    assert words in found[0]


@pytest.mark.parametrize(
    ("program", "seconds", "count"),
    [("refresh", 59.0, 0), ("refresh", 61.0, 1), (WHOLE, 179.0, 0), (WHOLE, 181.0, 1)],
)
def test_a_generation_by_polestar_may_compile_longer_its_passes_may_not(program, seconds, count):
    kernels = dict.fromkeys(Case("llada-8b", "polestar", program, DEFAULT).kernels, 32)
    slow = {"policy": "polestar", "implementation": DEFAULT, "kernels": kernels}
    times = {"compile_seconds": seconds, "compile_processor_seconds": seconds}
    assert len(faults(row(program, **slow, **times))) == count


def test_attention_over_all_rows_is_recognised_in_a_program():
    hlo = "%a = f32[32,1280,1280]{2,1,0} dot(%q, %k)\n%b = f32[32,128,1280]{2,1,0} dot(%c, %k)"
    assert square_arrays(hlo, 1280) == ["f32[32,1280,1280]"]


def cpu_program(policy, name, implementation):
    """The text of a small model's program, compiled for this machine's processor."""
    config, decode = small_config("llada"), decode_config(policy, implementation)
    arguments = abstract_arguments(config, decode, 1)
    return jax.jit(program(config, decode, name)).lower(*arguments).compile().as_text()


STEPS = [
    pytest.param("fast-dllm-dual", "denoise"),
    pytest.param("polestar", "refresh", marks=pytest.mark.slow),
]
SCOPES = ("stream_attention/", "gather_rows/", "scatter_rows/")  # around the kernels' operations


@pytest.mark.parametrize(("policy", "name"), STEPS)
def test_with_nothing_named_no_kernel_is_in_the_step_compiled_for_the_cpu(policy, name):
    text = cpu_program(policy, name, DEFAULT)
    assert " dot(" in text
    assert not kernel_calls(text)
    assert not [scope for scope in SCOPES if scope in text]


@pytest.mark.slow
def test_kernels_named_for_the_interpreter_are_seen_in_the_step_compiled_for_the_cpu():
    """What the test above looks for is there when the kernels are."""
    text = cpu_program("polestar", "refresh", "interpret")
    assert [scope for scope in SCOPES if scope in text] == list(SCOPES)


@pytest.mark.gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("card", ["H200", "A100"])
@pytest.mark.parametrize("policy", ["vanilla", "fast-dllm-prefix", "fast-dllm-dual", "polestar"])
@pytest.mark.parametrize("model", ["llada-8b", "dream-7b"])
def test_two_layers_of_every_policy_are_without_fault(model, policy, card):
    """With nothing named, so the kernels are there by default, each that the policy calls for."""
    case = cases(model, policy, DEFAULT)[-1]
    assert case.program == WHOLE
    assert "attend_rows" in case.kernels
    assert faults(in_own_process(compile_case, case, card, 2)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", ["--gpu H200 --gpu A100 --implementation pallas", "--gpu H200 --implementation xla"]
)
def test_whole_models_compile_within_their_limits(options, tmp_path):
    """By the make target, which brings its own Python with the newest JAX and the compiler."""
    command = ["make", "--no-print-directory", "program-check"]
    probe = subprocess.run(
        [*command, "-n"], cwd=ROOT, capture_output=True, text=True, check=False
    )  # fmt: skip
    if shutil.which("make") is None or "test -n ''" in probe.stdout:
        pytest.skip("no Python >= 3.12 on this machine")
    wanted = f"--program denoise --program {shlex.quote(WHOLE)} --out {tmp_path} {options}"
    done = subprocess.run(
        [*command, f"ARGS={wanted}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    files = sorted(tmp_path.glob("gpu_program_*.json"))
    assert [f.stem for f in files] == [
        "gpu_program_dream-7b_fast-dllm-dual", "gpu_program_llada-8b_fast-dllm-dual",
    ]  # fmt: skip
    for file in files:
        programs = json.loads(file.read_text())["programs"]
        assert {p["program"] for p in programs} == {"denoise", WHOLE}
        assert all(p["layers"] in (28, 32) for p in programs)
