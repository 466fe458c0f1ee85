"""Decoding speed: tokens/s and milliseconds per pass, over policies, model shapes and batches.

    python -m benchmarks.decode [--shape 8x512] [--policy polestar] [--batch 4] [--overhead-only]

Weights are random, so texts mean nothing; this shows what a pass costs. A random model is never
confident, hence threshold policies commit one token a pass, like `vanilla`: compare milliseconds
per pass (`benchmarks.frontier` measures tokens per pass, of a trained model on tasks). Compilation
is timed apart. Repetitions take turns over all cases, and medians are reported. The second table is
what a pass costs beyond its matrix products.
"""

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np

import polestar_jax as pj
from benchmarks import overhead
from benchmarks.frontier.environment import environment, now, revision
from benchmarks.frontier.schema import NUMBER, TEXT, array, fields, mapping
from benchmarks.frontier.store import write_text
from benchmarks.shapes import SMALL
from polestar_jax.decoding.decode import collect, decode_program, init_state

POLICIES = ("vanilla", "parallel", "fast-dllm-prefix", "fast-dllm-dual", "polestar")
RESULTS = Path(__file__).parent / "results"
COUNT = {"type": "integer", "minimum": 0}

CASE = fields(
    shape=TEXT,
    policy=TEXT,
    batch=COUNT,
    prompt_length=COUNT,
    gen_length=COUNT,
    block_length=COUNT,
    dtype=TEXT,
    repeats=COUNT,
    compile_seconds=NUMBER,
    seconds=array(NUMBER, 1),  # of each repetition, compilation and tokenization excluded
    passes=COUNT,  # of the whole batch: a pass serves every row with masks in the block
    nfe=array(COUNT, 1),
    generated=COUNT,  # tokens of all rows that are neither EOS nor padding
    tokens_per_second=NUMBER,
    milliseconds_per_pass=NUMBER,
)
OVERHEAD = fields(
    shape=TEXT,
    batch=COUNT,
    total=COUNT,
    rounds=COUNT,
    milliseconds=mapping(NUMBER),
    processor_milliseconds=mapping(NUMBER),
    pass_over_products=NUMBER,
    pass_over_products_processor=NUMBER,
)
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    **fields(
        benchmark={"const": "decode"},
        created=TEXT,
        revision=TEXT,
        environment={"type": "object"},  # versions and device
        seed=COUNT,
        cases=array(CASE),
        overhead=array(OVERHEAD),
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One generation to time: a model, prompts of one length, a policy."""

    shape: str
    policy: str
    model: pj.Model
    prompts: np.ndarray
    config: pj.DecodeConfig
    seed: int

    def run(self) -> tuple[float, int, pj.DecodeResult]:
        """Seconds from token ids to token ids, passes of the batch, result."""
        start = time.perf_counter()
        state = init_state(self.model, self.prompts, self.config, jax.random.key(self.seed))
        state = decode_program(
            self.model.params, state, model=self.model.config, config=self.config
        )
        result = collect(self.model, state)
        return time.perf_counter() - start, int(state.passes), result


def random_case(shape: str, model: pj.Model, policy: str, batch: int, seed: int,
                prompt: int, generated: int, block: int) -> Case:  # fmt: skip
    """A case of `batch` random prompts; every position of the canvas becomes an answer token."""
    config = pj.preset(
        policy, gen_length=generated, block_length=block, stop_at_eos=False, suppress_eos=True,
        prompt_bucket=prompt,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, model.config.eos_token, (batch, prompt))
    return Case(shape, policy, model, prompts, config, seed)


def measure(cases: Sequence[Case], repeats: int) -> list[dict[str, Any]]:
    """Compile every case, then time all in turn."""
    first = [case.run() for case in cases]
    seconds: list[list[float]] = [[] for _ in cases]
    for _ in range(repeats):
        for case, taken in zip(cases, seconds):
            taken.append(case.run()[0])
    rows = []
    for case, (cold, passes, result), taken in zip(cases, first, seconds):
        median = statistics.median(taken)
        generated = int(result.stats.generated.sum())
        rows.append(
            {
                "shape": case.shape,
                "policy": case.policy,
                "batch": len(case.prompts),
                "prompt_length": case.prompts.shape[1],
                "gen_length": case.config.gen_length,
                "block_length": case.config.block_length,
                "dtype": str(case.model.dtype),
                "repeats": repeats,
                "compile_seconds": round(max(cold - median, 0.0), 2),
                "seconds": [round(s, 4) for s in taken],
                "passes": passes,
                "nfe": result.nfe.tolist(),
                "generated": generated,
                "tokens_per_second": round(generated / median, 2),
                "milliseconds_per_pass": round(1e3 * median / max(passes, 1), 3),
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown of the cases."""
    lines = [
        "| shape | policy | batch | T | tokens/s | ms per pass | passes | compile s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['shape']} | {r['policy']} | {r['batch']} | {r['prompt_length'] + r['gen_length']} "
        f"| {r['tokens_per_second']:.1f} | {r['milliseconds_per_pass']:.2f} | {r['passes']} "
        f"| {r['compile_seconds']:.1f} |"
        for r in rows
    ]
    return "\n".join(lines)


def overheads(shapes: Sequence[str], totals: Sequence[int], rounds: int, seed: int) -> list[dict]:
    """The pass against its matrix products, per shape and length."""
    return [
        overhead.measure(
            shape,
            overhead.make_subject(SMALL[shape], total, min(128, total // 2), seed=seed),
            rounds,
        )
        for shape, total in itertools.product(shapes, totals)
    ]


def document(cases: list[dict], overhead_rows: list[dict], seed: int) -> dict[str, Any]:
    return {
        "benchmark": "decode",
        "created": now(),
        "revision": revision(),
        "environment": environment(),
        "seed": seed,
        "cases": cases,
        "overhead": overhead_rows,
    }


@click.command(help=__doc__.splitlines()[0])
@click.option("--shape", "shapes", multiple=True, type=click.Choice(list(SMALL)))
@click.option("--policy", "policies", multiple=True, default=POLICIES, show_default=True)
@click.option(
    "--batch", "batches", multiple=True, type=click.IntRange(1), default=(1, 4), show_default=True
)
@click.option("--prompt", default=128, show_default=True, type=click.IntRange(1))
@click.option("--gen", "generated", default=64, show_default=True, type=click.IntRange(1))
@click.option("--block", default=32, show_default=True, type=click.IntRange(1))
@click.option("--dtype", default="float32", show_default=True)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option(
    "--rounds", default=11, show_default=True, type=click.IntRange(1), help="Of the second table."
)
@click.option(
    "--total",
    "totals",
    multiple=True,
    type=click.IntRange(2),
    default=(256, 1024),
    show_default=True,
    help="Lengths T of the second table.",
)
@click.option("--overhead-only", is_flag=True, help="The second table only.")
@click.option("--seed", default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False),
              default=RESULTS / "decode_cpu.json", show_default=True)  # fmt: skip
def main(shapes: Sequence[str], policies: Sequence[str], batches: Sequence[int], prompt: int,
         generated: int, block: int, dtype: str, repeats: int, rounds: int, totals: Sequence[int],
         overhead_only: bool, seed: int, out: Path) -> None:  # fmt: skip
    rows: list[dict[str, Any]] = []
    for shape in () if overhead_only else shapes or tuple(SMALL):
        model = pj.Model.random(SMALL[shape], jax.random.key(seed), dtype)
        cases = [
            random_case(shape, model, policy, batch, seed, prompt, generated, block)
            for policy, batch in itertools.product(policies, batches)
        ]
        rows += measure(cases, repeats)
    if rows:
        click.echo(table(rows) + "\n")
    extra = overheads(shapes or ("8x512",), totals, rounds, seed)
    click.echo(overhead.table(extra))
    write_text(out, json.dumps(document(rows, extra, seed), indent=1) + "\n")


if __name__ == "__main__":
    main()
