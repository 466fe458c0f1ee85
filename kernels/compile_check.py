"""Compile every op at every named shape for A100 and H200, on a machine without either.

    python -m polestar_jax.kernels.compile_check [--gpu H200] [--only SUBSTRING] [--json FILE]

Prints registers, spilled bytes, shared memory and matrix instructions of each kernel and fails
when one spills, needs more shared memory than its card has, multiplies bf16 matrices without the
tensor cores, is missing from the program, or when an in-place op copies its cache.

Then compiles the decode programs of LLaDA-8B and Dream-7B with the kernels in them, Fast-dLLM's
dual cache and Polestar: the denoising passes alone, and the whole generation. It fails when one
lacks a kernel, needs more temporary memory than it should, or copies a cache or a weight.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from polestar_jax.errors import PolestarError
from polestar_jax.kernels import aot, decode_program
from polestar_jax.kernels.cases import Case, cases, size_of
from polestar_jax.kernels.ptx import Kernel

CALLS = {None: "__gpu$xla.gpu.triton", "mosaic": "mosaic_gpu_v2"}
SHARED_LIMIT = {"A100": 163 * 1024, "H100": 227 * 1024, "H200": 227 * 1024}
# The kernel's name in the program, where it is not the op's.
KERNEL_OF = {
    "drift_attention_first": "drift_attention",
    "gather_cache": "gather_rows",
    "scatter_cache": "scatter_rows",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. `problems` is empty when the case passed."""

    op: str
    shape: str
    dtype: str
    gpu: str
    blocks: int
    threads: int
    registers: int
    spilled: int
    shared: int
    matrix: int
    seconds: float
    problems: tuple[str, ...]


def check(case: Case, gpu: str) -> Row:
    """Compile one case and judge its kernel."""
    run = partial(case.run, implementation=case.kernel)
    program = aot.compile_for(run, case.args, gpu, case.donate, resources=True)
    name = KERNEL_OF.get(case.op, case.op)
    ours = [k for k in program.kernels if k.name.startswith(name)]
    problems = []
    if not ours or not program.custom_calls.get(CALLS[case.kernel]):
        problems.append("the kernel is not in the program")
    if case.donate:
        target = size_of(*(case.args[i] for i in case.donate))
        if program.alias < target:
            problems.append(f"only {program.alias} of {target} bytes are written in place")
        problems += [
            f"{m.op} of {m.shape}"
            for m in program.large_moves(target // (2 * len(case.donate)))
        ]  # fmt: skip
    for kernel in ours:
        problems += judge(kernel, gpu, case.matrix and case.dtype != "float32")
    main = max(ours, key=lambda k: k.registers, default=None)
    return Row(
        case.op,
        case.shape,
        case.dtype,
        gpu,
        blocks=main.blocks if main else 0,
        threads=main.threads if main else 0,
        registers=main.registers if main else 0,
        spilled=sum(k.spilled for k in ours),
        shared=max((k.shared for k in ours), default=0),
        matrix=sum(k.matrix for k in ours),
        seconds=round(program.seconds, 2),
        problems=tuple(problems),
    )


def check_named(work: tuple[str, str]) -> Row:
    """`check` by name, as a process of its own receives it."""
    name, gpu = work
    case = next(case for case in cases() if case.name == name)
    if case.kernel == "mosaic":  # a process writes down the first of equal kernels only
        return aot.in_own_process(check_here, name, gpu)
    return check_here(name, gpu)


def check_here(name: str, gpu: str) -> Row:
    jax.config.update("jax_platforms", "cpu")
    return check(next(case for case in cases() if case.name == name), gpu)


def in_processes(function: Callable, work: Sequence[Any], jobs: int) -> Iterator[Any]:
    """Results in order, from `jobs` processes (XLA's compiler uses little more than one)."""
    if jobs <= 1 or len(work) < 4:
        yield from map(function, work)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(function, work)


def programs() -> list[decode_program.Case]:
    """Passes after a block's opening, and whole generations, as a user gets them: nothing named."""
    return [
        case
        for model in decode_program.MODELS
        for policy in ("fast-dllm-dual", "polestar")
        for case in decode_program.cases(model, policy, decode_program.DEFAULT)
        if case.program == decode_program.WHOLE or not case.opening
    ]


def check_program(work: tuple[decode_program.Case, str]) -> dict[str, Any]:
    """A decode program's row with its `faults`, as a process of its own returns it."""
    jax.config.update("jax_platforms", "cpu")
    row = decode_program.compile_case(*work)
    return row | {"faults": decode_program.faults(row)}


def judge(kernel: Kernel, gpu: str, matrix: bool) -> Iterator[str]:
    """What is wrong with a kernel on a card."""
    if kernel.spilled:
        yield f"{kernel.spilled} bytes spilled"
    if kernel.shared > SHARED_LIMIT[gpu]:
        yield f"{kernel.shared} bytes of shared memory, {gpu} has {SHARED_LIMIT[gpu]}"
    if matrix and not kernel.matrix:
        yield "no matrix instruction"


def markdown(rows: list[Row]) -> str:
    """The table of the README."""
    head = "op, shape, dtype, card, blocks, threads, registers, spilled, shared memory, matrix"
    titles = [*head.split(", "), ""]
    lines = [titles, ["---"] * len(titles)]
    for r in rows:
        numbers = (r.blocks, r.threads, r.registers, r.spilled, r.shared, r.matrix)
        judged = "; ".join(r.problems) or "ok"
        lines.append([r.op, r.shape, r.dtype, r.gpu, *(f"{n:,}" for n in numbers), judged])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_json(path: Path, rows: list[Row], compiled: list[dict[str, Any]]) -> None:
    """Atomically: a temporary sibling, then a rename."""
    body = {
        "jax": jax.__version__,
        "kernels": [dataclasses.asdict(r) for r in rows],
        "programs": compiled,
    }
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(json.dumps(body, indent=1) + "\n")
    temporary.replace(path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="append", choices=list(SHARED_LIMIT), default=None)
    parser.add_argument(
        "--only", default="", help="part of op/shape/dtype or program/model/policy/name"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", type=Path, help="also write the tables here")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    reason = aot.available()
    if reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    gpus = options.gpu or ["A100", "H200"]
    kernels = [
        (case.name, gpu)
        for gpu in gpus
        for case in cases()
        if gpu in case.cards and options.only in case.name
    ]
    wanted = [case for case in programs() if options.only in case.name]
    if not kernels and not wanted:
        print(f"error: no case contains {options.only!r}", file=sys.stderr)
        return 2
    rows, compiled = [], []
    try:
        for row in in_processes(check_named, kernels, options.jobs):
            rows.append(row)
            print(markdown([row]).splitlines()[-1], flush=True)
        work = [(case, gpu) for gpu in gpus for case in wanted]
        for program in in_processes(check_program, work, options.jobs):
            compiled.append(program)
            print(decode_program.table([program]).splitlines()[-1], flush=True)
    except PolestarError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        write_json(options.json, rows, compiled)
    for fault in (fault for program in compiled for fault in program["faults"]):
        print(fault)
    bad = sum(bool(r.problems) for r in rows) + sum(bool(p["faults"]) for p in compiled)
    print(f"{len(rows)} kernels and {len(compiled)} programs compiled, {bad} with problems")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
