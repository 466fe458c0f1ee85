"""The decode program of an 8-billion-parameter model, compiled for a GPU that need not be there.

    python -m benchmarks.gpu_program [--model llada-8b] [--policy polestar] [--gpu H200]

Shapes only: no weight is allocated, nothing runs, so no time of a pass is measured. What the
compiler plans is: memory beside arguments and results, which data it copies, whether the caches are
updated in place, how long it takes. Needs the extra `gpu-check` (Python >= 3.12). Every model and
card is compiled in a process of its own.
"""

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.frontier.environment import environment, now, revision
from polestar_jax.kernels import aot
from polestar_jax.kernels.decode_program import (
    BLOCK,
    GENERATED,
    MODELS,
    PROMPT,
    WHOLE,
    cases,
    compile_case,
    faults,
    table,
)

RESULTS = Path(__file__).parent / "results"


def compile_group(
    model: str, policy: str, implementation: str, gpu: str, programs: Sequence[str]
) -> list[dict[str, Any]]:
    """A policy's programs (all, if none is named) for one card; runs in a process of its own."""
    return [
        compile_case(case, gpu)
        for case in cases(model, policy, implementation)
        if not programs or case.program in programs
    ]


def write(path: Path, document: dict[str, Any]) -> None:
    """Write JSON beside `path`, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(document, indent=1) + "\n")
    draft.replace(path)


@click.command(help=__doc__.splitlines()[0])
@click.option("--model", "models", multiple=True, type=click.Choice(list(MODELS)))
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
    for model, policy in itertools.product(models or MODELS, policies):
        rows = [
            row
            for implementation, gpu in itertools.product(implementations, gpus)
            for row in aot.in_own_process(
                compile_group, model, policy, implementation, gpu, programs
            )
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
