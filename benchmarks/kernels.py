"""Every kernel against XLA's own fusion of its reference, and against the memory's speed.

    python -m benchmarks.kernels [--only llada-8b] [--json FILE]

Needs an NVIDIA GPU. Each op runs on several sets of inputs inside one program, so that launches
overlap as in a decode step and no set stays in the card's cache; warm, median of many. First the
results of both are compared. The floor is the time that the bytes an op must move take at the copy
bandwidth measured here. Without a GPU only the references are timed (--reference), and the output
says so.
"""

import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.frontier.environment import environment, now, revision
from benchmarks.frontier.store import write_text
from polestar_jax.kernels.cases import Case, cases, size_of
from polestar_jax.kernels.compile_check import SHARED_LIMIT
from polestar_jax.kernels.nvfp4 import quantise

SET_BYTES = 200 * 2**20  # of all input sets together: four times the L2 cache of an H200
MAX_SETS = 8
REPEATS = 30
# Largest error against the reference, relative to the largest value, by dtype.
ALLOWED = {"float32": 2e-4, "bfloat16": 3e-2}
EXACT = ("gather_rows", "gather_cache", "scatter_rows", "scatter_cache")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds per call; `kernel` and `error` are None where only the reference ran."""

    op: str
    shape: str
    dtype: str
    sets: int
    reference: float
    kernel: float | None
    floor: float
    error: float | None
    allowed: float

    @property
    def wrong(self) -> bool:
        return self.error is not None and not self.error <= self.allowed


def inputs(case: Case, seed: int) -> tuple[Any, ...]:
    """Random arguments: unit-normal arrays, distinct rows, all rows present, no pads."""
    rng = np.random.default_rng(seed)
    if case.op == "dequantise":
        _, centroids, labels = case.args
        rows = jax.ShapeDtypeStruct((*labels.shape, centroids.shape[2]), centroids.dtype)
        source = dataclasses.replace(case, op="quantise", args=(rows, centroids, labels))
        rows, centroids, labels = inputs(source, seed)
        return quantise(rows, centroids, labels, implementation="xla"), centroids, labels

    keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(case.args))))

    def array(x: jax.ShapeDtypeStruct) -> jax.Array:
        return normal(next(keys), x.shape, x.dtype)

    args: list[Any] = [
        jax.tree.map(array, x) if not _is_index(x) else x for x in case.args
    ]  # fmt: skip
    if case.op.startswith(("drift", "proxy")):
        return _attention(case, args, rng)
    index = [i for i, x in enumerate(case.args) if _is_index(x)]
    length = {"quantise": lambda: args[1].shape[1]}.get(case.op, lambda: args[0].shape[-2])()
    if case.op == "attend_rows":
        length = args[1].shape[2]
    for i in index:
        shape = case.args[i].shape
        if len(shape) == 2 and case.op == "quantise":
            args[i] = jnp.asarray(rng.integers(0, length, shape), jnp.int32)
        elif len(shape) == 2:
            rows = [np.sort(rng.choice(length, shape[1], False)) for _ in range(shape[0])]
            args[i] = jnp.asarray(np.stack(rows), jnp.int32)
        else:
            last = i == index[-1]
            args[i] = jnp.full(shape, case.args[index[0]].shape[1] if last else 0, jnp.int32)
    return tuple(args)


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Made on the card: the host would take longer than all measurements."""
    return jax.random.normal(key, shape).astype(dtype)


def _is_index(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct) and x.dtype == jnp.int32


def _attention(case: Case, args: list[Any], rng: np.random.Generator) -> tuple[Any, ...]:
    """Positions of a block near the end; the previous pass's normaliser belongs to its scores."""
    length = args[1].shape[2]
    for i, x in enumerate(case.args):
        if _is_index(x):
            start = max(0, length - 2 * args[0].shape[1])
            rows = start + np.arange(args[0].shape[1])
            args[i] = jnp.asarray(np.broadcast_to(rows, x.shape) if len(x.shape) == 2 else
                                  np.zeros(x.shape), jnp.int32)  # fmt: skip
    if isinstance(args[-1], tuple):
        scores = args[-1][0]
        args[-1] = (scores, jax.nn.logsumexp(scores, axis=-1))
    return tuple(args)


def program(case: Case, implementation: str) -> Callable:
    """All sets in one program: (arguments written in place, others) -> results per set."""

    def every(moving: list[tuple], fixed: list[tuple]) -> list[Any]:
        results = []
        for own, rest in zip(moving, fixed, strict=True):
            args, own_left, rest_left = [], list(own), list(rest)
            for i in range(len(own) + len(rest)):
                args.append((own_left if i in case.donate else rest_left).pop(0))
            results.append(case.run(*args, implementation=implementation))
        return results

    return jax.jit(every, donate_argnums=0)


def split(case: Case, args: tuple) -> tuple[tuple, tuple]:
    """Arguments written in place, and the others."""
    own = tuple(x for i, x in enumerate(args) if i in case.donate)
    return own, tuple(x for i, x in enumerate(args) if i not in case.donate)


def time_program(
    case: Case, implementation: str, sets: list[tuple], repeats: int
) -> tuple[float, Any]:
    """Median microseconds per set, and the results of the first run on the host."""
    run = program(case, implementation)
    # In-place arguments are consumed: every program gets copies of its own, and then its results.
    moving = [tuple(x.copy() for x in split(case, args)[0]) for args in sets]
    fixed = [split(case, args)[1] for args in sets]
    results = jax.block_until_ready(run(moving, fixed))
    first = jax.tree.map(np.asarray, results[0])
    seconds = []
    for _ in range(repeats):
        if case.donate:
            moving = [x if isinstance(x, tuple) else (x,) for x in results]
        start = time.perf_counter()
        results = jax.block_until_ready(run(moving, fixed))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) / len(sets) * 1e6, first


def relative_error(got: Any, want: Any) -> float:
    """Largest difference of any output, relative to that output's largest finite value."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = a.astype(np.float64), b.astype(np.float64)
        kept = np.abs(b) < 1e29  # scores of masked keys
        if not np.isfinite(a[kept]).all():
            return float("inf")
        scale = np.abs(b[kept]).max(initial=0.0) or 1.0
        worst = max(worst, float(np.abs(a - b)[kept].max(initial=0.0)) / scale)
    return worst


def measure(case: Case, bandwidth: float, kernel: str | None, repeats: int) -> Timing:
    """Compare and time one case; `kernel` names the implementation, None times the reference."""
    number = max(2, min(MAX_SETS, -(-SET_BYTES // size_of(case.args))))
    sets = [inputs(case, seed) for seed in range(number if jax.default_backend() == "gpu" else 2)]
    reference, want = time_program(case, "xla", sets, repeats)
    took = error = None
    if kernel is not None:
        took, got = time_program(case, kernel, sets, repeats)
        error = relative_error(got, want)
    return Timing(
        case.op, case.shape, case.dtype, len(sets), reference, took,
        floor=case.moved / bandwidth * 1e6, error=error,
        allowed=0.0 if case.op in EXACT else ALLOWED[case.dtype],
    )  # fmt: skip


def copy_bandwidth(repeats: int = 20, size: int = 2**30) -> float:
    """Bytes a second that a copy reads and writes together, median."""
    source = jnp.zeros(size // 4, jnp.float32)
    copy = jax.jit(lambda x, shift: x + shift)
    jax.block_until_ready(copy(source, jnp.float32(0)))
    seconds = []
    for i in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(copy(source, jnp.float32(i)))
        seconds.append(time.perf_counter() - start)
    return 2 * size / statistics.median(seconds)


def table(timings: Sequence[Timing]) -> str:
    """Markdown, microseconds per call."""
    lines = [
        "| op | shape | dtype | kernel | XLA | XLA / kernel | floor | floor / kernel | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for t in timings:
        own = ("-", "-", "-", "-")
        if t.kernel is not None and t.error is not None:
            mark = " WRONG" if t.wrong else ""
            own = (
                f"{t.kernel:.1f}", f"{t.reference / t.kernel:.2f}",
                f"{t.floor / t.kernel:.2f}", f"{t.error:.1e}{mark}",
            )  # fmt: skip
        lines.append(
            f"| {t.op} | {t.shape} | {t.dtype} | {own[0]} | {t.reference:.1f} | {own[1]} "
            f"| {t.floor:.1f} | {own[2]} | {own[3]} |"
        )
    return "\n".join(lines)


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--only", default="bfloat16", show_default=True, help="Part of op/shape/dtype.")
@click.option("--repeats", default=REPEATS, show_default=True, type=click.IntRange(3))
@click.option("--reference", is_flag=True, help="Without a GPU: time the references alone.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Also write JSON here.")
def main(only: str, repeats: int, reference: bool, path: Path | None) -> None:
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not reference:
        raise click.ClickException(
            "no NVIDIA GPU: kernels can not be timed here; --reference times the references alone"
        )
    chosen = [case for case in cases() if only in case.name]
    if not chosen:
        raise click.ClickException(f"no case contains {only!r}")
    facts = environment()
    bandwidth = copy_bandwidth(size=2**30 if on_gpu else 2**27)
    click.echo(f"{facts['device']}: copies at {bandwidth / 1e9:.0f} GB/s")
    if not on_gpu:
        click.echo("No GPU: the kernels were not run; these are the references on the CPU.")
    timings = []
    card = next((c for c in SHARED_LIMIT if c in facts["device"]), "")
    for case in chosen:
        if case.kernel and card not in case.cards:
            continue
        timings.append(
            measure(case, bandwidth, (case.kernel or "pallas") if on_gpu else None, repeats)
        )
        click.echo(table(timings[-1:]).splitlines()[-1], err=True)
    click.echo(table(timings))
    if path:
        document = {
            "benchmark": "kernels",
            "created": now(),
            "revision": revision(),
            "environment": facts,
            "kernels_ran": on_gpu,
            "copy_bytes_per_second": bandwidth,
            "repeats": repeats,
            "microseconds": [dataclasses.asdict(t) | {"wrong": t.wrong} for t in timings],
        }
        write_text(path, json.dumps(document, indent=1) + "\n")
    sys.exit(1 if any(t.wrong for t in timings) else 0)


if __name__ == "__main__":
    main()
