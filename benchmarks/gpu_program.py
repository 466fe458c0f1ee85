"""The decode program of an 8-billion-parameter model, compiled for a GPU that need not be there.

    python -m benchmarks.gpu_program [--model llada-8b] [--policy polestar] [--gpu H200]

Shapes only: no weight is allocated, nothing runs, so no time of a pass is measured. What the
compiler plans is: memory beside arguments and results, which data it copies, whether the caches are
updated in place, how long it takes. Needs the extra `gpu-check` (Python >= 3.12). Every model and
card is compiled in a process of its own.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import re
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp

import polestar_jax as pj
from benchmarks.frontier.environment import environment, now, revision
from benchmarks.shapes import LARGE
from polestar_jax.decoding import loop
from polestar_jax.decoding.decode import context_of, start_program
from polestar_jax.kernels import aot
from polestar_jax.model import abstract_transformer, parameter_shapes

PROMPT, GENERATED, BLOCK = 1024, 256, 32
GIB = 2**30
STEP_LIMIT = 0.05  # GiB of a denoising pass beyond its logits
PROGRAM_LIMIT = 0.4  # GiB of the whole generation
COMPILE_LIMIT = 60.0  # seconds
WHOLE = "whole generation"
COPIES = ("copy", "copy-start", "slice", "dynamic-slice", "concatenate", "pad")
KERNEL_TARGETS = ("__gpu$xla.gpu.triton", "triton_kernel_call", "mosaic_gpu_v2")
RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Case:
    """One program: a policy's pass or its whole generation, of one model at batch `batch`."""

    model: str
    policy: str
    program: str  # name of a phase, or WHOLE
    implementation: str  # of the hot operations: "pallas" or "xla"
    batch: int = 1

    @property
    def opening(self) -> bool:
        """Whether passes over all T rows are in the program."""
        return self.program.startswith("open") or self.program == WHOLE or self.policy == "vanilla"


def decode_config(policy: str, implementation: str) -> pj.DecodeConfig:
    return pj.preset(
        policy, gen_length=GENERATED, block_length=BLOCK, prompt_bucket=PROMPT,
        implementation=implementation,
    )  # fmt: skip


def phase_names(policy: str) -> list[str]:
    return [phase.name for phase in decode_config(policy, "xla").cache.phases()]


def cases(model: str, policy: str, implementation: str) -> list[Case]:
    """Every phase of a policy alone, then the whole generation."""
    return [Case(model, policy, name, implementation) for name in (*phase_names(policy), WHOLE)]


def abstract_arguments(config: pj.ModelConfig, decode: pj.DecodeConfig, batch: int) -> tuple:
    """Parameters (bfloat16) and state as shapes."""
    _, params = abstract_transformer(config, jnp.bfloat16)
    state = jax.eval_shape(
        functools.partial(start_program, model=config, config=decode, trace=False),
        params,
        jax.ShapeDtypeStruct((batch, PROMPT + GENERATED), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch)),
    )
    return params, state


def program(config: pj.ModelConfig, decode: pj.DecodeConfig, name: str) -> Callable:
    """(parameters, state) -> state for a phase's pass or the whole generation."""
    if name == WHOLE:
        return lambda params, state: loop.generate(
            context_of(config, params, decode, state.tokens, state.pad), state
        )
    phase = next(p for p in decode.cache.phases() if p.name == name)
    return lambda params, state: loop.run_pass(
        context_of(config, params, decode, state.tokens, state.pad), state, phase
    )[0]


def compile_case(case: Case, gpu: str, layers: int | None = None) -> dict[str, Any]:
    """Compile one program and read its plan; `layers` shrinks the model. Sizes in bytes."""
    config = LARGE[case.model]
    config = dataclasses.replace(config, num_layers=layers or config.num_layers)
    decode = decode_config(case.policy, case.implementation)
    params, state = abstract_arguments(config, decode, case.batch)
    before = processor_seconds()
    compiled = aot.compile_for(
        program(config, decode, case.program), (params, state), gpu, donate_argnums=1
    )
    cache = 0  # bytes of one layer's keys
    if jax.tree.leaves(state.cache):
        cache = case.batch * config.num_kv_heads * (PROMPT + GENERATED) * config.head_dim * 2
    return {
        **dataclasses.asdict(case),
        "gpu": gpu,
        "layers": config.num_layers,
        "compile_seconds": round(compiled.seconds, 1),
        "compile_processor_seconds": round(processor_seconds() - before, 1),
        "temporary_bytes": compiled.temp,
        "logits_bytes": case.batch * BLOCK * config.embedding_rows * 4,
        "cache_bytes": size(state.cache),
        "aliased_bytes": compiled.alias,
        "kernels": sum(compiled.custom_calls.get(target, 0) for target in KERNEL_TARGETS),
        "copies": moved(compiled, config, cache, COPIES),
        "transposes": moved(compiled, config, cache, ("transpose",)),
        "square_arrays": square_arrays(compiled.hlo, PROMPT + GENERATED),
    }


def moved(
    compiled: aot.Program, config: pj.ModelConfig, cache: int, ops: Sequence[str]
) -> dict[str, int]:
    """How often arrays of a K/V cache's size (or of several) or a weight's or larger are moved."""
    weight = min(math.prod(s) for s in parameter_shapes(config).values() if len(s) > 1) * 2
    found: dict[str, int] = {}
    for move in compiled.large_moves(min(cache or weight, weight)):
        if move.op in ops and (move.bytes >= weight or (cache and move.bytes % cache == 0)):
            name = f"{move.op} {move.shape}"
            found[name] = found.get(name, 0) + 1
    return found


def square_arrays(hlo: str, total: int) -> list[str]:
    """Arrays with two axes of T rows: attention that was not taken in tiles."""
    shapes = set(re.findall(r"\b\w+\[[\d,]+\]", hlo))
    return sorted(s for s in shapes if s.split("[")[1].rstrip("]").split(",").count(str(total)) > 1)


def size(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def processor_seconds() -> float:
    """Processor time of this process, its threads and finished children (the assembler)."""
    own, children = (
        resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def faults(row: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled program, in words; empty when all limits hold."""
    case = Case(**{field.name: row[field.name] for field in dataclasses.fields(Case)})
    where = f"{case.model} {case.policy} {case.program} ({case.implementation}) for {row['gpu']}"
    found = []
    temporary, limit = row["temporary_bytes"] / GIB, PROGRAM_LIMIT
    if not case.opening:
        temporary, limit = temporary - row["logits_bytes"] / GIB, STEP_LIMIT
    if temporary > limit:
        found.append(f"{where}: {temporary:.3f} GiB of temporary memory, allowed {limit}")
    if row["copies"]:
        found.append(f"{where}: copies of a weight's or cache's size: {row['copies']}")
    # A full pass turns its fresh keys and values from [T, heads, D] into the cache's [heads, T, D]:
    # that is how they get there. The kernels want queries so too, and results back.
    passes = 1 if row["program"] != WHOLE else len(full_passes(case.policy))
    each = 4 if case.implementation == "pallas" else 2
    allowed = each * row["layers"] * passes + 1 if case.opening else 0
    if sum(row["transposes"].values()) > allowed:
        found.append(f"{where}: more than {allowed} large transposes: {row['transposes']}")
    # An opening overwrites its caches without reading them, so alone it need not reuse them.
    if not case.program.startswith("open") and row["aliased_bytes"] < row["cache_bytes"]:
        found.append(
            f"{where}: {row['aliased_bytes']} bytes in place, caches have {row['cache_bytes']}"
        )
    if (row["kernels"] > 0) != (case.implementation == "pallas"):
        found.append(f"{where}: {row['kernels']} Pallas kernels in the program")
    if row["square_arrays"]:
        found.append(f"{where}: attention over all rows at once: {row['square_arrays']}")
    # A busy machine stretches the wall clock; on an idle one the processor time bounds it.
    if min(row["compile_seconds"], row["compile_processor_seconds"]) > COMPILE_LIMIT:
        found.append(f"{where}: compiled in {row['compile_seconds']} s")
    return found


def full_passes(policy: str) -> list[str]:
    """Phases of a policy that run all rows."""
    return [n for n in phase_names(policy) if policy == "vanilla" or n in ("open", "open_full")]


def compile_group(
    model: str, policy: str, implementation: str, gpu: str, programs: Sequence[str]
) -> list[dict[str, Any]]:
    """A policy's programs (all, if none is named) for one card; runs in a process of its own."""
    return [
        compile_case(case, gpu)
        for case in cases(model, policy, implementation)
        if not programs or case.program in programs
    ]


def in_own_process(function: Callable, *arguments: Any) -> Any:
    """Call a module-level function in a fresh interpreter and return what it returns."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def write(path: Path, document: dict[str, Any]) -> None:
    """Write JSON beside `path`, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(document, indent=1) + "\n")
    draft.replace(path)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown of compiled programs."""
    lines = [
        "| model | policy | program | GPU | kernels | temporary GiB | beyond logits | in place | "
        "large copies | compile s (processor) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        beyond = (r["temporary_bytes"] - r["logits_bytes"]) / GIB
        in_place = r["aliased_bytes"] >= r["cache_bytes"] > 0
        lines.append(
            f"| {r['model']} | {r['policy']} | {r['program']} | {r['gpu']} | {r['kernels']} "
            f"| {r['temporary_bytes'] / GIB:.4f} | {beyond:.4f} "
            f"| {'yes' if in_place else '-'} | {sum(r['copies'].values())} "
            f"| {r['compile_seconds']:.0f} ({r['compile_processor_seconds']:.0f}) |"
        )
    return "\n".join(lines)


@click.command(help=__doc__.splitlines()[0])
@click.option("--model", "models", multiple=True, type=click.Choice(list(LARGE)))
@click.option("--policy", "policies", multiple=True, default=("fast-dllm-dual",), show_default=True)
@click.option("--program", "programs", multiple=True, help=f"A phase or {WHOLE!r}.  [default: all]")
@click.option(
    "--implementation",
    "implementations",
    multiple=True,
    default=("pallas", "xla"),
    show_default=True,
    type=click.Choice(["pallas", "xla"]),
)
@click.option("--gpu", "gpus", multiple=True, default=("H200", "A100"), show_default=True)
@click.option("--out", default=RESULTS, show_default=True, type=click.Path(path_type=Path),
              help="Folder of the JSON files, one per model and policy.")  # fmt: skip
def main(
    models: Sequence[str],
    policies: Sequence[str],
    programs: Sequence[str],
    implementations: Sequence[str],
    gpus: Sequence[str],
    out: Path,
) -> None:
    reason = aot.available()
    if reason is not None:
        raise click.ClickException(reason)
    wrong = []
    for model, policy in itertools.product(models or LARGE, policies):
        rows = [
            row
            for implementation, gpu in itertools.product(implementations, gpus)
            for row in in_own_process(compile_group, model, policy, implementation, gpu, programs)
        ]
        click.echo(table(rows) + "\n")
        found = [fault for row in rows for fault in faults(row)]
        document = {
            "benchmark": "gpu_program",
            "created": now(),
            "revision": revision(),
            "environment": environment(),
            "shape": {
                "prompt": PROMPT,
                "generated": GENERATED,
                "block": BLOCK,
                "dtype": "bfloat16",
            },
            "programs": rows,
            "faults": found,
        }
        write(out / f"gpu_program_{model}_{policy}.json", document)
        wrong += found
    for fault in wrong:
        click.echo(fault, err=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
