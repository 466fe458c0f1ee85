"""Train the embedded model on this machine and export it.

    python -m benchmarks.embedded.train --minutes 10 --out DIR      # steps from the measured speed
    python -m benchmarks.embedded.train --plan full --steps 3000 --init DIR --out OTHER

Run again with the same DIR, an interrupted training goes on from its last checkpoint.
"""

import argparse
import functools
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from tqdm import tqdm

import polestar_jax as pj
from benchmarks.embedded.data import Batch, Batches
from benchmarks.embedded.export import export
from benchmarks.embedded.network import Stacked, initial, loss, stacked
from benchmarks.embedded.optimizer import optimizer
from benchmarks.embedded.plan import PLANS, Plan
from benchmarks.embedded.run import DESCRIPTION, Log, Run, load_checkpoint, save_checkpoint
from benchmarks.tasks import TASKS
from benchmarks.tasks.parallelbench import read_directory
from polestar_jax.errors import PolestarError
from polestar_jax.models.transformer import params_to_flat

CHECKPOINT_SECONDS = 60.0
LOG_CALLS = 5  # a log row every so many compiled calls
MEASURED_CALLS = 4


class State(NamedTuple):
    params: Stacked
    moments: Any
    step: Array


Call = Callable[[State, Batch], tuple[State, Array, Array]]


def start(plan: Plan, seed: int, steps: int, params: Stacked | None = None) -> tuple[State, Call]:
    """The initial state, with new parameters or the given ones, and the compiled training function.

    It takes a state and `steps_per_call` batches stacked along a leading axis; returns the state,
    the losses [steps_per_call] and each row's share of them [steps_per_call, B].
    """
    config = plan.model_config()
    if params is None:
        params = initial(config, jax.random.key(seed))
    rule = optimizer(plan, steps, params)

    def one(state: State, batch: Batch) -> tuple[State, tuple[Array, Array]]:
        gradient = jax.value_and_grad(functools.partial(loss, config), has_aux=True)
        (value, rows), slope = gradient(state.params, batch)
        change, moments = rule.update(slope, state.moments, state.params)
        params = optax.apply_updates(state.params, change)
        return State(params, moments, state.step + 1), (value, rows)

    @functools.partial(jax.jit, donate_argnums=0)
    def call(state: State, batches: Batch) -> tuple[State, Array, Array]:
        state, (values, rows) = jax.lax.scan(one, state, batches)
        return state, values, rows

    return State(params, rule.init(params), jnp.int32(0)), call


def stack(batches: Batches, first: int, count: int) -> Batch:
    """The batches of `count` steps from `first` on, stacked."""
    return Batch(*map(np.stack, zip(*(batches(first + i) for i in range(count)))))


def measured_steps(plan: Plan, seed: int, minutes: float, excluded: frozenset[str]) -> int:
    """How many steps fit into `minutes` at the speed of a few calls, both canvases weighed."""
    state, call = start(plan, seed, 10_000)
    seconds = []
    for long in (False, True):
        first = int(plan.long_from * 10_000) + plan.steps_per_call if long else 0
        batches = Batches(plan, seed, 10_000, excluded)
        state, *_ = jax.block_until_ready(call(state, stack(batches, first, plan.steps_per_call)))
        began = time.perf_counter()
        for _ in range(MEASURED_CALLS):
            several = stack(batches, first, plan.steps_per_call)
            state, *_ = jax.block_until_ready(call(state, several))
        seconds.append((time.perf_counter() - began) / MEASURED_CALLS)
    share = (1 - plan.long_from) / 2
    calls = 60 * minutes / (seconds[0] * (1 - share) + seconds[1] * share)
    return max(int(calls), 1) * plan.steps_per_call


def task_losses(batches: Batch, rows: np.ndarray) -> dict[str, float]:
    """Mean loss per task over stacked batches, scaled so that an average row weighs 1."""
    share = rows * rows.shape[-1]
    return {
        name: float(share[batches.task == number].mean())
        for number, name in enumerate(TASKS)
        if (batches.task == number).any()
    }


def trained(folder: Path, plan: Plan) -> Stacked:
    """The exported parameters of another run, for a plan of the same shape."""
    model = pj.load(folder, dtype="float32")
    config = plan.model_config()
    if model.config != config:
        raise PolestarError(
            f"the model in {folder} does not have the shape of plan {plan.name!r}; "
            "start from a run of a plan with the same width, layers, heads and MLP"
        )
    return stacked(config, params_to_flat(model.params))


def train(
    run: Run,
    folder: Path,
    excluded: frozenset[str] = frozenset(),
    params: Stacked | None = None,
) -> Stacked:
    """Train to the end, resuming from `folder`, and export there; returns the parameters.

    `params`: what to start from instead of new parameters.
    """
    plan = run.read_plan()
    state, call = start(plan, run.seed, run.steps, params)
    state = load_checkpoint(folder, state) or state
    batches = Batches(plan, run.seed, run.steps, excluded)
    done = int(state.step)
    log = Log(folder, ["step", "seconds", "tokens", "loss", *TASKS], done)
    began = saved = time.monotonic()
    recent: list[tuple[float, dict[str, float]]] = []
    bar = tqdm(total=run.steps, initial=done, unit="step", file=sys.stderr, mininterval=5)
    while done < run.steps:
        several = stack(batches, done, plan.steps_per_call)
        state, values, rows = call(state, several)
        recent.append((float(values.mean()), task_losses(several, np.asarray(rows))))
        done += plan.steps_per_call
        bar.update(plan.steps_per_call)
        if not np.isfinite(recent[-1][0]):
            raise PolestarError(f"the loss is no longer finite at step {done}; lower the rate")
        now = time.monotonic()
        if len(recent) == LOG_CALLS or done >= run.steps:
            row: dict[str, Any] = {name: _mean(name, recent) for name in TASKS}
            row["loss"] = f"{np.mean([value for value, _ in recent]):.4f}"
            row["step"], row["tokens"] = done, done * plan.batch * plan.short_canvas
            row["seconds"] = f"{log.seconds + now - began:.0f}"
            log.add(row)
            bar.set_postfix(loss=row["loss"], refresh=False)
            recent = []
        if now - saved > CHECKPOINT_SECONDS or done >= run.steps:
            save_checkpoint(folder, jax.device_get(state))
            saved = now
    bar.close()
    export(plan, state.params, folder)
    return state.params


def _mean(name: str, recent: list[tuple[float, dict[str, float]]]) -> str:
    values = [losses[name] for _, losses in recent if name in losses]
    return f"{np.mean(values):.4f}" if values else ""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.embedded.train", description=__doc__
    )
    parser.add_argument("--plan", choices=sorted(PLANS), default="quick")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="measure the speed and choose the steps")
    length.add_argument("--steps", type=int, help="exact length; reproducible")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="directory of the run")
    parser.add_argument(
        "--exclude", type=Path, help="directory of ParallelBench files whose prompts to keep out"
    )
    parser.add_argument("--init", type=Path, help="run whose exported model to start from")
    args = parser.parse_args(arguments)
    excluded: frozenset[str] = frozenset()
    if args.exclude:
        rows = read_directory(args.exclude)
        excluded = frozenset(row.prompt for examples in rows.values() for row in examples)
    args.out.mkdir(parents=True, exist_ok=True)
    if (args.out / DESCRIPTION).exists():
        run = Run.load(args.out)
    else:
        plan = PLANS[args.plan]
        if args.steps is None:
            minutes = 10.0 if args.minutes is None else args.minutes
            if not 0 < minutes < float("inf"):
                parser.error(f"--minutes must be positive, got {minutes}")
            steps = measured_steps(plan, args.seed, minutes, excluded)
        elif args.steps < 1 or args.steps % plan.steps_per_call:
            parser.error(f"--steps must be a multiple of {plan.steps_per_call}, got {args.steps}")
        else:
            minutes, steps = None, args.steps
        machine = f"{os.cpu_count()} CPU cores, {platform.machine()}, JAX {jax.__version__}"
        parent = Run.load(args.init) if args.init else None
        run = Run(args.plan, args.seed, steps, minutes, len(excluded), machine, parent)
        run.save(args.out)
    print(f"{run.steps} steps of plan {run.plan!r}, seed {run.seed}, into {args.out}", flush=True)
    params = trained(args.init, run.read_plan()) if args.init else None
    train(run, args.out, excluded, params)


if __name__ == "__main__":
    try:
        main()
    except PolestarError as error:
        sys.exit(f"error: {error}")
