"""Milliseconds of every kind of Polestar pass, where they go, and the memory of the state.

    python -m benchmarks.passes [--rounds 15] [--out FILE]

Shapes: the embedded model's, and 8 layers x 512 at T = 256 and T = 1,024, random weights, batch 1,
one block of 32 in the middle of the canvas. Timings are taken in turn, round after round, and the
median is reported, so that a machine whose speed drifts treats all alike. A refresh pass is judged
against 1.15 x (L + rows) / L plain passes plus 10 %, `rows` being what it recomputed per layer.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
from jax import Array

import polestar_jax as pj
from benchmarks.frontier.environment import environment, revision
from polestar_jax.decoding import loop
from polestar_jax.decoding.cache.clusters import centroid_queries
from polestar_jax.decoding.context import Context
from polestar_jax.decoding.decode import context_of, start_program
from polestar_jax.decoding.ops import proxy_attention
from polestar_jax.drift.clustering import kmeans, split_clusters, strided_rows
from polestar_jax.models.attention import attend
from polestar_jax.models.transformer import params_from_flat, random_flat

BLOCK = 32


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model and a sequence: T rows of which `generated` are canvas."""

    name: str
    layers: int
    width: int
    heads: int
    mlp: int
    vocab: int
    total: int
    generated: int

    def model_config(self) -> pj.ModelConfig:
        return pj.ModelConfig(
            family="llada", vocab_size=self.vocab, embedding_rows=self.vocab, width=self.width,
            num_layers=self.layers, num_heads=self.heads, num_kv_heads=self.heads,
            head_dim=self.width // self.heads, mlp_width=self.mlp, rope_theta=10_000.0,
            norm_eps=1e-5, max_length=8192, qkv_bias=False, tied_head=False, shift_logits=False,
            mask_token=self.vocab - 1, eos_token=self.vocab - 2, pad_token=self.vocab - 2,
        )  # fmt: skip


SHAPES = (
    Shape("embedded 4x128, T 192", 4, 128, 4, 384, 360, 192, 128),
    Shape("8x512, T 256", 8, 512, 8, 2048, 4096, 256, 128),
    Shape("8x512, T 1024", 8, 512, 8, 2048, 4096, 1024, 256),
)


class Bench:
    """Programs of one shape, each a function of nothing that returns something to wait for."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.model = shape, shape.model_config()
        flat = random_flat(self.model, jax.random.key(0))
        self.params = params_from_flat(self.model, flat)
        prompt = shape.total - shape.generated
        tokens = jax.random.randint(jax.random.key(1), (1, prompt), 0, shape.vocab - 2)
        canvas = jnp.full((1, shape.generated), self.model.mask_token)
        self.tokens = jnp.concatenate([tokens, canvas], axis=1).astype(jnp.int32)
        self.compile_seconds: dict[str, float] = {}
        self.rows_per_layer = 0.0

    def config(self, policy: str) -> pj.DecodeConfig:
        # A threshold that random logits never reach: every pass commits one token.
        return pj.preset(
            policy, gen_length=self.shape.generated, block_length=BLOCK, threshold=0.999
        )

    def state(self, config: pj.DecodeConfig) -> pj.DecodeState:
        return start_program(
            self.params, self.tokens, jnp.zeros(1, jnp.int32),
            jax.random.split(jax.random.key(2), 1), model=self.model, config=config, trace=False,
        )  # fmt: skip

    def context(self, params: Any, config: pj.DecodeConfig, state: pj.DecodeState) -> Context:
        return context_of(self.model, params, config, state.tokens, state.pad)

    def reset(self, state: pj.DecodeState, committed: int) -> pj.DecodeState:
        """The state in front of a pass of block 2 whose predecessor committed `committed`."""
        return dataclasses.replace(
            state, tokens=jnp.array(self.tokens), block=jnp.int32(2), block_passes=jnp.int32(1),
            last_commits=jnp.full(1, committed, jnp.int32),
            since_refresh=jnp.full(1, committed, jnp.int32), refreshed_rows=jnp.zeros(1, jnp.int32),
        )  # fmt: skip

    def passes(self, policy: str) -> dict[str, Callable[[], Array]]:
        """One function per phase of the policy; the state is threaded and its buffers reused."""
        config = self.config(policy)
        box = {"state": self.reset(self.state(config), 0)}
        made = {}
        for phase in config.cache.phases():

            def one(params: Any, state: pj.DecodeState, phase: Any = phase) -> pj.DecodeState:
                return loop.run_pass(self.context(params, config, state), state, phase)[0]

            program = jax.jit(one, donate_argnums=1)
            committed = 5 if phase.name == "refresh" else 0

            def timed(program: Any = program, committed: int = committed, name: str = phase.name):
                box["state"] = jax.block_until_ready(self.reset(box["state"], committed))
                start = time.perf_counter()
                box["state"] = jax.block_until_ready(program(self.params, box["state"]))
                elapsed = time.perf_counter() - start
                if name == "refresh":
                    rows = int(box["state"].refreshed_rows[0])
                    self.rows_per_layer = rows / self.shape.layers
                return elapsed

            start = time.perf_counter()
            timed()
            self.compile_seconds[f"{policy}: {phase.name}"] = time.perf_counter() - start
            made[f"{policy}: {phase.name}"] = timed
        self.last = box
        return made

    def parts(self) -> dict[str, Callable[[], float]]:
        """The pieces of a pass alone, over all layers, on the state the passes left."""
        config = self.config("polestar")
        s = self.shape
        rows = round(self.rows_per_layer)

        def matmuls(count: int) -> Callable[[Any, pj.DecodeState], Array]:
            def run(params: Any, state: pj.DecodeState) -> Array:
                model = self.context(params, config, state).model
                x = jnp.ones((1, count, s.width))
                for layer in range(s.layers):
                    q = model.query(layer, x).reshape(1, count, -1)
                    k, v = model.key_value(layer, x)
                    block = model.layers[layer]
                    x = block.project("o", q + (k + v).reshape(1, count, -1))
                    x = block.project("down", block.project("gate", x) * block.project("up", x))
                return model.logits(x[:, :BLOCK])

            return run

        def attention(params: Any, state: pj.DecodeState) -> Array:
            ctx = self.context(params, config, state)
            q = jnp.ones((1, BLOCK, s.heads, s.width // s.heads))
            caches = state.cache.layers
            return sum(attend(q, c.k, c.v, ctx.key_mask) for c in caches)

        def proxy(params: Any, state: pj.DecodeState) -> Array:
            ctx = self.context(params, config, state)
            total = jnp.zeros(())
            for layer, (own, cached) in enumerate(zip(state.cache.clusters, state.cache.layers)):
                q = ctx.model.query(layer, centroid_queries(ctx, layer, own.centroids))
                scores, _, drift = proxy_attention(ctx, q, cached, (own.scores, own.normaliser))
                total += jnp.sum(drift) + jnp.sum(scores)
            return total

        def clustering(params: Any, state: pj.DecodeState) -> Array:
            ctx = self.context(params, config, state)
            window = config.cache.window(ctx, state.block)
            parts = split_clusters(window, config.cache.num_clusters)
            first = strided_rows(parts)
            return sum(jnp.sum(kmeans(h.data, parts, first, 5)[1]) for h in state.cache.hidden)

        pieces = {
            f"matrix products, {BLOCK} rows": matmuls(BLOCK),
            f"matrix products, {BLOCK} + {rows} rows": matmuls(BLOCK + rows),
            f"matrix products, {s.total} rows": matmuls(s.total),
            f"attention of {BLOCK} rows": attention,
            "proxy attention and drift": proxy,
            "k-means": clustering,
        }
        made = {}
        for name, piece in pieces.items():
            program = jax.jit(piece)
            jax.block_until_ready(program(self.params, self.last["state"]))

            def timed(program: Any = program) -> float:
                start = time.perf_counter()
                jax.block_until_ready(program(self.params, self.last["state"]))
                return time.perf_counter() - start

            made[name] = timed
        return made

    def memory(self) -> dict[str, int]:
        """Bytes of the Polestar state by part, and of the weights."""
        config = self.config("polestar")
        state = jax.eval_shape(lambda: self.state(config))

        def size(tree: Any) -> int:
            return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

        caches, clusters = state.cache.layers, state.cache.clusters
        return {
            "weights": size(self.params),
            "keys and values": size([(c.k, c.v) for c in caches]),
            "keys before rotation": size([c.raw for c in caches]),
            "hidden inputs of the window": size(state.cache.hidden),
            "centroids, labels, counts": size(
                [(c.centroids, c.labels, c.counts) for c in clusters]
            ),
            "proxy attention": size([(c.scores, c.normaliser) for c in clusters]),
            "last-layer attention": size(state.memory),
        }


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    """All figures of one shape."""
    bench = Bench(shape)
    timers = bench.passes("fast-dllm-dual") | bench.passes("polestar")
    timers |= bench.parts()
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            times[name].append(timer())
    median = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    plain, refresh = median["polestar: cached"], median["polestar: refresh"]
    share = (BLOCK + bench.rows_per_layer) / BLOCK
    # Pairwise within a round, so that the machine's drift cancels.
    pairs = zip(times["polestar: refresh"], times["polestar: cached"])
    ratio = statistics.median(a / b for a, b in pairs)
    return {
        "shape": dataclasses.asdict(shape),
        "rounds": rounds,
        "milliseconds": {name: round(value, 3) for name, value in median.items()},
        "refreshed_rows_per_layer": bench.rows_per_layer,
        "refresh_over_plain": round(refresh / plain, 3),
        "refresh_over_plain_pairwise": round(ratio, 3),
        "limit": round(1.15 * share + 0.1, 3),
        "compile_seconds": {k: round(v, 1) for k, v in bench.compile_seconds.items()},
        "state_bytes": bench.memory(),
    }


def table(result: dict[str, Any]) -> str:
    """Markdown of one shape's figures."""
    lines = [f"### {result['shape']['name']}", "", "| what | ms |", "|---|---|"]
    lines += [f"| {name} | {value:.2f} |" for name, value in result["milliseconds"].items()]
    lines += [
        "",
        f"refresh / plain: {result['refresh_over_plain_pairwise']} (limit {result['limit']}, "
        f"{result['refreshed_rows_per_layer']:.1f} rows a layer)",
        "",
        "state: " + ", ".join(f"{k} {v / 2**20:.2f} MiB" for k, v in result["state_bytes"].items()),
    ]
    return "\n".join(lines)


@click.command(help=__doc__.splitlines()[0])
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(3))
@click.option("--shape", "names", multiple=True, type=click.Choice([s.name for s in SHAPES]))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False))
def main(rounds: int, names: tuple[str, ...], out: Path | None) -> None:
    results = []
    for shape in SHAPES:
        if names and shape.name not in names:
            continue
        results.append(measure(shape, rounds))
        click.echo(table(results[-1]) + "\n")
    if out is not None:
        record = {
            "benchmark": "passes",
            "revision": revision(),
            "environment": environment(),
            "results": results,
        }
        draft = out.with_suffix(".tmp")
        draft.write_text(json.dumps(record, indent=1) + "\n")
        draft.replace(out)


if __name__ == "__main__":
    main()
