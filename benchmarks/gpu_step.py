"""Milliseconds of every pass of an 8-billion-parameter model, with and without the kernels.

    python -m benchmarks.gpu_step [--model llada-8b] [--json FILE]

Random bfloat16 weights made on the card, prompt of 1,024 and 256 generated tokens (T = 1,280),
batch 1, warm, median of many. The floor of a pass is the time that reading the weights it uses
takes at the copy bandwidth measured here. A small model (--model tiny) runs anywhere, with the
kernels interpreted: that tries the script, its times mean nothing.
"""

import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp

import polestar_jax as pj
from benchmarks.frontier.environment import environment, now, revision
from benchmarks.frontier.store import write_text
from benchmarks.kernels import copy_bandwidth
from benchmarks.shapes import SMALL
from polestar_jax.decoding import loop
from polestar_jax.decoding.decode import context_of, start_program
from polestar_jax.kernels.decode_program import MODELS
from polestar_jax.models.transformer import parameter_shapes, params_from_flat

PROMPT, GENERATED, BLOCK = 1024, 256, 32
POLICY = "polestar"


def random_params(config: pj.ModelConfig, key: jax.Array) -> Any:
    """Weights made where they are used, one at a time; norms 1, matrices N(0, 1/fan in)."""

    def make(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        scale = 1.0 if len(shape) == 1 else shape[0] ** -0.5
        return (jax.random.normal(key, shape, jnp.float32) * scale).astype(jnp.bfloat16)

    made = jax.jit(make, static_argnums=1)
    flat = {}
    for index, (name, shape) in enumerate(parameter_shapes(config).items()):
        if name.endswith("norm"):
            flat[name] = jnp.ones(shape, jnp.bfloat16)
        else:
            flat[name] = made(jax.random.fold_in(key, index), shape)
    return params_from_flat(config, flat)


class Passes:
    """Every phase of the policy under one implementation of the ops."""

    def __init__(
        self, model: pj.ModelConfig, params: Any, implementation: str, prompt: int
    ) -> None:
        self.model, self.params, self.prompt = model, params, prompt
        # A threshold that random logits never reach: every pass commits one token.
        config = pj.preset(POLICY, gen_length=GENERATED, block_length=BLOCK, threshold=0.999)
        self.config = dataclasses.replace(config, implementation=implementation)
        row = jax.random.randint(jax.random.key(1), (1, prompt), 0, model.vocab_size - 2)
        row = jnp.where(row == model.mask_token, 0, row)
        canvas = jnp.full((1, GENERATED), model.mask_token)
        self.tokens = jnp.concatenate([row, canvas], axis=1).astype(jnp.int32)

    def start(self) -> pj.DecodeState:
        """The state in front of a pass over block 2, right after its opening."""
        state = start_program(
            self.params, self.tokens, jnp.zeros(1, jnp.int32),
            jax.random.split(jax.random.key(2), 1),
            model=self.model, config=self.config, trace=False,
        )  # fmt: skip
        return dataclasses.replace(state, block=jnp.int32(2), block_passes=jnp.int32(1))

    def time_phase(self, phase: Any, state: pj.DecodeState, repeats: int) -> dict[str, Any]:
        """Compile and time one phase. The state is donated, so its buffers are reused."""

        def one(params: Any, state: pj.DecodeState) -> pj.DecodeState:
            context = context_of(self.model, params, self.config, state.tokens, state.pad)
            return loop.run_pass(context, state, phase)[0]

        def fresh(state: pj.DecodeState) -> pj.DecodeState:
            many = jnp.full(1, 5, jnp.int32)
            return dataclasses.replace(
                state, tokens=jnp.array(self.tokens), last_commits=many, since_refresh=many + 0
            )

        program = jax.jit(one, donate_argnums=1)
        begun = time.perf_counter()
        state = jax.block_until_ready(program(self.params, fresh(state)))
        compiled = time.perf_counter() - begun
        seconds = []
        for _ in range(repeats):
            ready = jax.block_until_ready(fresh(state))
            begun = time.perf_counter()
            state = jax.block_until_ready(program(self.params, ready))
            seconds.append(time.perf_counter() - begun)
        self.state = state
        return {
            "phase": phase.name,
            "milliseconds": statistics.median(seconds) * 1e3,
            "fastest": min(seconds) * 1e3,
            "first_call_seconds": compiled,
        }

    def measure(self, repeats: int, names: tuple[str, ...]) -> list[dict[str, Any]]:
        """The named phases, in the policy's order: an opening first, so that caches are filled."""
        self.state = self.start()
        phases = [p for p in self.config.cache.phases() if p.name in names]
        return [self.time_phase(p, self.state, repeats) for p in phases]


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| pass | ops | ms | fastest | floor | first call s |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {r['phase']} | {r['implementation']} | {r['milliseconds']:.3f} | {r['fastest']:.3f} "
        f"| {r['floor']:.3f} | {r['first_call_seconds']:.0f} |"
        for r in rows
    ]
    return "\n".join(lines)


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--model", default="llada-8b", type=click.Choice([*MODELS, *SMALL]))
@click.option("--phase", "names", multiple=True, default=("open_full", "cached", "refresh"),
              show_default=True)  # fmt: skip
@click.option("--repeats", default=30, show_default=True, type=click.IntRange(2))
@click.option("--json", "path", type=click.Path(path_type=Path), help="Also write JSON here.")
def main(model: str, names: tuple[str, ...], repeats: int, path: Path | None) -> None:
    on_gpu = jax.default_backend() == "gpu"
    if model in MODELS and not on_gpu:
        raise click.ClickException(f"no NVIDIA GPU for {model}; --model tiny tries the script")
    config = (MODELS | SMALL)[model]
    facts = environment()
    bandwidth = copy_bandwidth(size=2**30 if on_gpu else 2**24)
    params = jax.block_until_ready(random_params(config, jax.random.key(0)))
    embedding = config.embedding_rows * config.width
    read = sum(x.size for x in jax.tree.leaves(params)) - (0 if config.tied_head else embedding)
    floor = read * 2 / bandwidth * 1e3
    rows = []
    for implementation in ("pallas" if on_gpu else "interpret", "xla"):
        passes = Passes(config, params, implementation, PROMPT if on_gpu else 32)
        for row in passes.measure(repeats, names):
            rows.append(row | {"implementation": implementation, "floor": floor})
            click.echo(table(rows[-1:]).splitlines()[-1], err=True)
    click.echo(f"{facts['device']}: {model}, weights read in {floor:.3f} ms at best")
    if not on_gpu:
        click.echo("No GPU: kernels were interpreted; these times say nothing.")
    click.echo(table(rows))
    if path:
        document = {
            "benchmark": "gpu_step",
            "created": now(),
            "revision": revision(),
            "environment": facts,
            "model": model,
            "on_gpu": on_gpu,
            "copy_bytes_per_second": bandwidth,
            "passes": rows,
        }
        write_text(path, json.dumps(document, indent=1) + "\n")
    sys.exit(0)


if __name__ == "__main__":
    main()
