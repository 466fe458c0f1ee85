"""The scripts for a machine with a GPU, tried without one: the kernels are interpreted."""

import dataclasses
import json

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import gpu_step
from benchmarks import kernels as benchmark
from polestar_jax.kernels.cases import cases

CASES = {case.op: case for case in cases() if case.name.endswith("/embedded/float32")}
OPS = [
    pytest.param(op, marks=() if op in ("gather_rows", "scatter_cache") else pytest.mark.slow)
    for op in CASES
]


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_equals_its_reference_on_the_inputs_that_are_timed(op):
    timing = benchmark.measure(CASES[op], 1e9, "interpret", 3)
    assert timing.error is not None
    assert not timing.wrong, timing
    assert min(timing.reference, timing.kernel, timing.floor) > 0


def test_a_wrong_kernel_is_found_and_fails_the_run(monkeypatch, tmp_path):
    """One value of the rows that the kernel gathers is off by a little."""
    case = CASES["gather_rows"]

    def run(*args, implementation):
        rows = case.run(*args, implementation="xla")
        return rows if implementation == "xla" else rows.at[0, 1, 2].add(1e-3)

    broken = dataclasses.replace(case, run=run)
    timing = benchmark.measure(broken, 1e9, "interpret", 3)
    assert timing.wrong
    assert "WRONG" in benchmark.table([timing])
    monkeypatch.setattr(benchmark, "measure", lambda *_: timing)
    options = ["--only", case.name, "--reference", "--json", str(tmp_path / "out.json")]
    assert CliRunner().invoke(benchmark.main, options).exit_code == 1
    (row,) = json.loads((tmp_path / "out.json").read_text())["microseconds"]
    assert row["wrong"] is True


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_output_that_is_not_finite_is_wrong(value):
    want = np.ones((2, 3), np.float32)
    got = want.copy()
    assert benchmark.relative_error([got], [want]) == 0
    got[1, 2] = value
    assert benchmark.relative_error([got], [want]) == np.inf


def test_without_a_gpu_both_scripts_say_so():
    for command, options in ((benchmark.main, []), (gpu_step.main, ["--model", "llada-8b"])):
        done = CliRunner().invoke(command, options)
        assert done.exit_code == 1
        assert "no NVIDIA GPU" in done.output


@pytest.mark.slow
def test_the_passes_of_a_small_model_are_timed_with_and_without_kernels(tmp_path):
    path = tmp_path / "out.json"
    options = ["--model", "tiny", "--repeats", "2", "--json", str(path)]
    done = CliRunner().invoke(gpu_step.main, options)
    assert done.exit_code == 0, done.output
    assert "these times say nothing" in done.output
    document = json.loads(path.read_text())
    assert document["on_gpu"] is False
    assert [(row["phase"], row["implementation"]) for row in document["passes"]] == [
        (phase, name)
        for name in ("interpret", "xla")
        for phase in ("open_full", "cached", "refresh")
    ]
    assert all(row["milliseconds"] >= row["fastest"] > 0 for row in document["passes"])
