"""What host memory and four-bit rows cost and change.

    python -m benchmarks.store cost     [--out FILE]    milliseconds of passes, by T and batch
    python -m benchmarks.store accuracy [--out FILE]    the embedded model on 500 held-out rows
    python -m benchmarks.store error    [--out FILE]    what four bits lose, random and real rows

`cost` runs random weights of 8 layers x 512. The four ways of keeping rows are timed in turn,
round after round; a ratio is the median over rounds of a pass divided by the same pass with all
rows on the device in the model's dtype; of processor time too, which other processes on the machine
disturb least. On a CPU "host" memory is the same memory, so what shows is the price of the
program's shape, not of a bus.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np

import polestar_jax as pj
from benchmarks.frontier.environment import environment, revision
from benchmarks.passes import BLOCK, SHAPES, Shape
from benchmarks.tasks import TASKS, Example, get_task, held_out_examples
from polestar_jax.decoding import loop
from polestar_jax.decoding.decode import context_of, start_program
from polestar_jax.kernels.nvfp4 import dequantise
from polestar_jax.models.transformer import params_from_flat, random_flat
from polestar_jax.store.rows import quantise_rows, row_bytes

WAYS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"hidden_store": "host"},
    "device, nvfp4": {"hidden_dtype": "nvfp4"},
    "host, nvfp4": {"hidden_store": "host", "hidden_dtype": "nvfp4"},
}
KEYS_AWAY = {"all keys and values on the host": {"kv_store": "host"}}
PHASES = ("open_full", "cached", "refresh")


class Passes:
    """The passes of one way of keeping rows, at one shape and batch."""

    def __init__(self, shape: Shape, batch: int, stores: dict[str, Any]) -> None:
        self.model = shape.model_config()
        self.params = params_from_flat(self.model, random_flat(self.model, jax.random.key(0)))
        # A threshold that random logits never reach: every pass commits one token.
        self.config = pj.preset(
            "polestar", gen_length=shape.generated, block_length=BLOCK, threshold=0.999,
            capacities=(1_000_000,), **stores,
        )  # fmt: skip
        prompt = jax.random.randint(
            jax.random.key(1), (batch, shape.total - shape.generated), 0, shape.vocab - 2
        )
        canvas = jnp.full((batch, shape.generated), self.model.mask_token)
        self.tokens = jnp.concatenate([prompt, canvas], axis=1).astype(jnp.int32)
        self.state = start_program(
            self.params, self.tokens, jnp.zeros(batch, jnp.int32),
            jax.random.split(jax.random.key(2), batch), model=self.model, config=self.config,
            trace=False,
        )  # fmt: skip
        self.programs = {p.name: self.program(p) for p in self.config.cache.phases()}
        for name in PHASES:
            self.milliseconds(name)

    def program(self, phase: Any) -> Callable[..., pj.DecodeState]:
        def one(params: Any, state: pj.DecodeState) -> pj.DecodeState:
            ctx = context_of(self.model, params, self.config, state.tokens, state.pad)
            return loop.run_pass(ctx, state, phase)[0]

        return jax.jit(one, donate_argnums=1)

    def milliseconds(self, name: str) -> tuple[float, float]:
        """One pass, in the middle of the canvas: by the clock, and of all processors."""
        batch = self.tokens.shape[0]
        committed = jnp.full(batch, 5 if name == "refresh" else 0, jnp.int32)
        state = dataclasses.replace(
            self.state, tokens=jnp.array(self.tokens), block=jnp.int32(2),
            block_passes=jnp.int32(name != "open_full"), last_commits=committed,
            since_refresh=jnp.array(committed),
        )  # fmt: skip
        jax.block_until_ready(state)
        start, used = time.perf_counter(), time.process_time()
        self.state = jax.block_until_ready(self.programs[name](self.params, state))
        return 1000 * (time.perf_counter() - start), 1000 * (time.process_time() - used)


def cost_of(shape: Shape, batch: int, ways: dict[str, dict], rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of every pass and the ratio to "device"."""
    benches = {way: Passes(shape, batch, stores) for way, stores in ways.items()}
    times: dict[tuple[str, str], list[tuple[float, float]]] = {
        (w, p): [] for w in ways for p in PHASES
    }
    for _ in range(rounds):
        for phase in PHASES:
            for way, bench in benches.items():
                times[way, phase].append(bench.milliseconds(phase))
    rows = []
    for (way, phase), taken in times.items():
        clock, used = np.transpose(taken)
        clock_here, used_here = np.transpose(times["device", phase])
        rows.append(
            {
                "shape": shape.name, "T": shape.total, "batch": batch, "rows kept": way,
                "pass": phase, "median_ms": round(float(np.median(clock)), 3),
                "least_ms": round(float(clock.min()), 3),
                "ratio": round(float(np.median(clock / clock_here)), 3),
                "ratio_of_least": round(float(clock.min() / clock_here.min()), 3),
                "processor_ratio": round(float(np.median(used / used_here)), 3),
            }
        )  # fmt: skip
    return rows


def plans() -> list[dict[str, Any]]:
    """Bytes of LLaDA-8B's window and keys by place, and microseconds at bus rates."""
    wide = dataclasses.replace(
        SHAPES[0].model_config(), width=4096, num_layers=32, num_heads=32, num_kv_heads=32,
        head_dim=128, mlp_width=12288, vocab_size=126464, embedding_rows=126464,
    )  # fmt: skip
    window = 128  # rows: two blocks of 32 before, the block, one behind
    layer = {
        "hidden inputs, bfloat16": window * wide.width * 2,
        "hidden inputs, nvfp4": window * row_bytes(wide.width),
        "keys and values, T 1024": 2 * 1024 * wide.width * 2,
    }
    return [
        {
            "what": what, "bytes_a_layer": size,
            "us_at_25_GB_s": round(size / 25e3, 1), "us_at_55_GB_s": round(size / 55e3, 1),
        }
        for what, size in layer.items()
    ]  # fmt: skip


def held_out(count: int) -> list[Example]:
    """`count` held-out rows, dealt evenly to all tasks."""
    each = -(-count // len(TASKS))
    rows = [held_out_examples(get_task(name), each) for name in TASKS]
    return [row for group in zip(*rows) for row in group][:count]


def decode_rows(
    model: pj.Model, config: pj.DecodeConfig, rows: list[Example], batch: int
) -> dict[str, np.ndarray]:
    """Per row: right or not, passes, tokens, refreshes; and the traces needed for comparisons."""
    found: dict[str, list[np.ndarray]] = {}
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        result = pj.decode(model, [row.prompt for row in part], config, trace=True)
        assert result.text is not None
        assert result.trace is not None
        marks = [get_task(r.task).score(r, t) for r, t in zip(part, result.text)]
        trace = jax.device_get(result.trace)
        pieces = {
            "right": np.array(marks), "nfe": result.nfe, "generated": result.stats.generated,
            "refreshes": result.stats.passes["refresh"], "tokens": result.tokens,
            "refreshed_rows": result.stats.refreshed_rows,
            "canvas": trace.tokens.swapaxes(0, 1), "kind": trace.kind.swapaxes(0, 1),
            "active": trace.active.swapaxes(0, 1), "chosen": trace.details.chosen.swapaxes(0, 1),
        }  # fmt: skip
        for name, piece in pieces.items():
            found.setdefault(name, []).append(piece)
    return {name: np.concatenate(pieces) for name, pieces in found.items()}


def overlap(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> dict[str, float]:
    """Share of chosen clusters in common, in refresh passes that start from the same canvas."""
    common = total = passes = 0
    for row in range(len(a["nfe"])):
        for i in range(int(min(a["nfe"][row], b["nfe"][row]))):
            if i and (a["canvas"][row, i - 1] != b["canvas"][row, i - 1]).any():
                break
            if a["kind"][row, i] != 3 or b["kind"][row, i] != 3:
                continue
            passes += 1
            for mine, theirs in zip(a["chosen"][row, i], b["chosen"][row, i]):
                mine, theirs = set(mine[mine >= 0].tolist()), set(theirs[theirs >= 0].tolist())
                common, total = common + len(mine & theirs), total + len(mine)
    return {"refresh_passes_compared": passes, "clusters_in_common": round(common / total, 4)}


def judged(rows: dict[str, np.ndarray]) -> dict[str, float]:
    return {
        "rows": len(rows["right"]),
        "right": float(rows["right"].sum()),
        "accuracy": round(float(rows["right"].mean()), 4),
        "tokens_per_forward": round(float(rows["generated"].sum() / rows["nfe"].sum()), 4),
        "mean_passes": round(float(rows["nfe"].mean()), 3),
        "refresh_passes": int(rows["refreshes"].sum()),
        "refreshed_rows": int(rows["refreshed_rows"].sum()),
    }


def relative(error: np.ndarray, of: np.ndarray) -> float:
    return round(float(np.linalg.norm(error) / np.linalg.norm(of)), 5)


def there_and_back(rows: Any, labels: Any, centroids: Any) -> np.ndarray:
    """Rows [B, W, M] through the four-bit format."""
    stored = quantise_rows(rows, labels >= -1, labels, centroids, "xla")
    return np.asarray(dequantise(stored, centroids, labels, implementation="xla"))


def real_rows(model: pj.Model, prompts: list[str]) -> list[dict[str, float]]:
    """Error of the embedded model's own hidden inputs after a block's opening, by layer."""
    config = pj.preset("polestar", gen_length=128, block_length=32)
    state = pj.decode_step(model, pj.init_state(model, prompts, config), config)
    made = []
    for layer, (store, own) in enumerate(zip(state.cache.hidden, state.cache.clusters)):
        rows, labels = np.asarray(store.data, np.float32), np.asarray(own.labels)
        kept = labels >= 0
        rows = np.where(kept[..., None], rows, 0)
        near = there_and_back(rows, labels, np.asarray(own.centroids))
        raw = there_and_back(rows, np.full_like(labels, -1), np.asarray(own.centroids))
        made.append(
            {
                "layer": layer,
                "rest_to_centroid": relative((near - rows)[kept], rows[kept]),
                "raw_rows": relative((raw - rows)[kept], rows[kept]),
            }
        )
    return made


def write(out: Path | None, body: dict[str, Any]) -> None:
    body = {"revision": revision(), "environment": environment(), **body}
    text = json.dumps(body, indent=1) + "\n"
    click.echo(text)
    if out is not None:
        temporary = out.with_name(f".{out.name}.part")
        temporary.write_text(text)
        temporary.replace(out)


@click.group(help=__doc__)
def main() -> None:
    pass


out_option = click.option("--out", type=click.Path(path_type=Path, dir_okay=False))


@main.command()
@click.option("--rounds", default=15, type=click.IntRange(1))
@click.option("--total", "totals", multiple=True, type=int, default=(256, 1024))
@click.option("--batch", "batches", multiple=True, type=click.IntRange(1), default=(1, 4))
@click.option("--keys", is_flag=True, help="Also all keys and values on the host.")
@out_option
def cost(
    rounds: int, totals: tuple[int, ...], batches: tuple[int, ...], keys: bool, out: Path | None
) -> None:
    """Milliseconds of passes by place and dtype."""
    shapes = [s for s in SHAPES if s.width == 512 and s.total in totals]
    ways = WAYS | (KEYS_AWAY if keys else {})
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        for batch in batches:
            rows += cost_of(shape, batch, ways, rounds)
            for row in rows[-len(ways) * len(PHASES) :]:
                click.echo("  ".join(f"{v}" for v in row.values()), err=True)
            write(out, {"rounds": rounds, "passes": rows, "transfer": plans()})


@main.command()
@click.option("--rows", "count", default=500, type=click.IntRange(1))
@click.option("--batch", default=50, type=click.IntRange(1))
@click.option("--model", default="embedded")
@out_option
def accuracy(count: int, batch: int, model: str, out: Path | None) -> None:
    """Accuracy, tokens per forward and chosen clusters with and without four bits."""
    loaded = pj.load(model, dtype="float32")
    rows = held_out(count)
    found = {}
    for way in ("device", "device, nvfp4"):
        config = pj.preset("polestar", gen_length=64, block_length=32, **WAYS[way])
        found[way] = decode_rows(loaded, config, rows, batch)
        click.echo(f"{way}: {judged(found[way])}", err=True)
    a, b = found.values()
    write(
        out,
        {
            "model": model,
            "results": {way: judged(f) for way, f in found.items()},
            "same_tokens": round(float((a["tokens"] == b["tokens"]).mean()), 4),
            "same_text": round(float((a["tokens"] == b["tokens"]).all(1).mean()), 4),
            **overlap(a, b),
        },
    )


@main.command()
@click.option("--model", default="embedded")
@out_option
def error(model: str, out: Path | None) -> None:
    """Relative error of four-bit rows."""
    rng = np.random.default_rng(0)
    gaussian = rng.normal(size=(4, 128, 4096)).astype(np.float32)
    none = np.full((4, 128), -1, np.int32)
    back = there_and_back(gaussian, none, np.zeros((4, 8, 4096), np.float32))
    prompts = [row.prompt for row in held_out(64)]
    body = {
        "gaussian_rows": relative(back - gaussian, gaussian),
        "hidden_inputs": real_rows(pj.load(model, dtype="float32"), prompts),
        "transfer": plans(),
    }
    write(out, body)


if __name__ == "__main__":
    main()
