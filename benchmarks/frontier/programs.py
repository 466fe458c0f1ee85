"""Compiled decoding that takes thresholds and factors as arguments.

In `pj.decode` they are part of the program's identity. A sweep over them would compile the same
program for every value; here one program serves a policy's whole curve. The result is that of
`pj.decode`, token for token.
"""

import copy
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import polestar_jax as pj
from polestar_jax.decoding import loop
from polestar_jax.decoding.decode import collect, context_of, start_program
from polestar_jax.decoding.prompts import Prompts
from polestar_jax.models.config import ModelConfig
from polestar_jax.models.transformer import Params

# Fields that only enter comparisons and arithmetic, with the value that stands for "any".
TRACED = {
    pj.ThresholdCommit: {"threshold": 0.9},
    pj.FactorCommit: {"factor": 1.0},
    pj.PolestarCommit: {"threshold": 0.9, "early_threshold": 0.7},
}


def split_knobs(config: pj.DecodeConfig) -> tuple[pj.DecodeConfig, dict[str, float]]:
    """(structure, knobs): configurations of equal structure share a program.

    A None (no early commits) is structure, not a knob.
    """
    fields = TRACED.get(type(config.commit), {})
    knobs = {n: float(v) for n in fields if (v := getattr(config.commit, n)) is not None}
    commit: Any = config.commit
    commit = dataclasses.replace(commit, **{n: fields[n] for n in knobs})
    return dataclasses.replace(config, commit=commit), knobs


def with_knobs(structure: pj.DecodeConfig, knobs: dict[str, Any]) -> pj.DecodeConfig:
    """The structure with traced knobs. Unchecked: a traced value cannot be, and the concrete
    configuration it came from was."""
    commit, config = copy.copy(structure.commit), copy.copy(structure)
    for name, value in knobs.items():
        object.__setattr__(commit, name, value)
    object.__setattr__(config, "commit", commit)
    return config


@jax.jit(static_argnames=("model", "structure"), donate_argnames=("state",))
def knob_program(
    params: Params,
    state: pj.DecodeState,
    knobs: dict[str, jax.Array],
    *,
    model: ModelConfig,
    structure: pj.DecodeConfig,
) -> pj.DecodeState:
    """A whole generation; knobs are float32 scalars."""
    config = with_knobs(structure, knobs)
    return loop.generate(context_of(model, params, config, state.tokens, state.pad), state)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program for one structure and one shape of batch.

    Attributes:
        compiled: the executable.
        compile_seconds: tracing, lowering and compiling.
        memory_bytes: arguments (weights and state), results and temporaries as the compiler
            plans them; None where it does not say.
    """

    structure: pj.DecodeConfig
    shape: tuple[int, int]
    compiled: Any
    compile_seconds: float
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Timed:
    """A decoded batch and the time it took, start to finished tokens: wall and CPU seconds."""

    result: pj.DecodeResult
    wall: float
    cpu: float


def compile_program(model: pj.Model, config: pj.DecodeConfig, batch: Prompts) -> Program:
    """Compile for batches of this shape (int32 tokens [B, T])."""
    structure, knobs = split_knobs(config)
    started = time.perf_counter()
    keys = jax.random.split(jax.random.key(0), batch.tokens.shape[0])
    state = _start(model, structure, batch, keys)
    compiled = knob_program.lower(
        model.params, state, _scalars(knobs), model=model.config, structure=structure
    ).compile()
    seconds = time.perf_counter() - started
    return Program(structure, batch.tokens.shape, compiled, seconds, _memory(compiled))


def run_program(
    program: Program, model: pj.Model, config: pj.DecodeConfig, batch: Prompts, keys: jax.Array
) -> Timed:
    """Decode one batch; keys [B], one per sequence."""
    knobs = _scalars(split_knobs(config)[1])
    wall, cpu = time.perf_counter(), time.process_time()
    state = _start(model, program.structure, batch, keys)
    state = jax.block_until_ready(program.compiled(model.params, state, knobs))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Timed(collect(model, state), wall, cpu)


def _scalars(knobs: dict[str, float]) -> dict[str, jax.Array]:
    return {name: jnp.float32(value) for name, value in knobs.items()}


def _start(
    model: pj.Model, structure: pj.DecodeConfig, batch: Prompts, keys: jax.Array
) -> pj.DecodeState:
    return start_program(
        model.params, jnp.asarray(batch.tokens), jnp.asarray(batch.pad), keys,
        model=model.config, config=structure, trace=False,
    )  # fmt: skip


def _memory(compiled: Any) -> int | None:
    plan = compiled.memory_analysis()
    if plan is None:
        return None
    parts = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    total = sum(int(getattr(plan, name)) for name in parts) - int(plan.alias_size_in_bytes)
    return int(np.maximum(total, 0))
