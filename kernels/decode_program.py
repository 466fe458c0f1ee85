"""Decode programs of real models, compiled for cards that need not be there.

Shapes only: no weight is allocated and nothing runs. What the compiler plans can be read off:
memory beside arguments and results, which data it copies, whether caches are updated in place,
which kernels are in the program, how long it takes. `faults` holds that against the limits.
"""

import dataclasses
import functools
import math
import re
import resource
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polestar_jax.decoding import loop
from polestar_jax.decoding.cache.polestar import PolestarCache
from polestar_jax.decoding.config import DecodeConfig
from polestar_jax.decoding.decode import context_of, start_program
from polestar_jax.decoding.presets import preset
from polestar_jax.kernels import aot
from polestar_jax.kernels.hlo import host_choices, kernel_calls
from polestar_jax.models.config import ModelConfig
from polestar_jax.models.transformer import abstract_transformer, parameter_shapes

LLADA_8B = ModelConfig(
    family="llada", vocab_size=126464, embedding_rows=126464, width=4096, num_layers=32,
    num_heads=32, num_kv_heads=32, head_dim=128, mlp_width=12288, rope_theta=500_000.0,
    norm_eps=1e-5, max_length=4096, qkv_bias=False, tied_head=False, shift_logits=False,
    mask_token=126336, eos_token=126081, pad_token=126081, eot_token=126348,
)  # fmt: skip
DREAM_7B = ModelConfig(
    family="dream", vocab_size=152064, embedding_rows=152064, width=3584, num_layers=28,
    num_heads=28, num_kv_heads=4, head_dim=128, mlp_width=18944, rope_theta=1_000_000.0,
    norm_eps=1e-6, max_length=131072, qkv_bias=True, tied_head=False, shift_logits=True,
    mask_token=151666, eos_token=151643, pad_token=151643,
)  # fmt: skip

MODELS = {"llada-8b": LLADA_8B, "dream-7b": DREAM_7B}
PROMPT, GENERATED, BLOCK = 1024, 256, 32
GIB = 2**30
STEP_LIMIT = 0.05  # GiB of a denoising pass beyond its logits
PROGRAM_LIMIT = 0.4  # GiB of the whole generation
COMPILE_LIMIT = 60.0  # seconds
POLESTAR_COMPILE_LIMIT = 180.0  # of a generation with four kinds of pass, each with all layers
WHOLE = "whole generation"
DEFAULT = "default"
COPIES = ("copy", "copy-start", "slice", "dynamic-slice", "concatenate", "pad")
# Phases of Polestar-Cache and the kernels in them; every other policy has the attention alone.
KERNELS = {
    "open": {"attend_rows", "proxy_drift", "drift_attention"},
    "cached": {"attend_rows", "drift_attention"},
    "refresh": {"attend_rows", "proxy_drift", "drift_attention", "gather_rows", "scatter_rows"},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One program: a policy's pass or its whole generation, of one model at batch `batch`."""

    model: str
    policy: str
    program: str  # name of a phase, or WHOLE
    implementation: str  # of the hot operations: "pallas", "xla", or DEFAULT: none is named
    batch: int = 1

    @property
    def name(self) -> str:
        return f"program/{self.model}/{self.policy}/{self.program}"

    @property
    def opening(self) -> bool:
        """Whether passes over all T rows are in the program."""
        return self.program.startswith("open") or self.program == WHOLE or self.policy == "vanilla"

    @property
    def kernels(self) -> set[str]:
        """Names of the kernels that must be in the program."""
        if self.implementation == "xla":
            return set()
        if self.policy != "polestar":
            return {"attend_rows"}
        return KERNELS.get(self.program.split("_")[0], set().union(*KERNELS.values()))


def decode_config(policy: str, implementation: str) -> DecodeConfig:
    return preset(
        policy, gen_length=GENERATED, block_length=BLOCK, prompt_bucket=PROMPT,
        implementation=None if implementation == DEFAULT else implementation,
    )  # fmt: skip


def phase_names(policy: str) -> list[str]:
    return [phase.name for phase in decode_config(policy, "xla").cache.phases()]


def cases(model: str, policy: str, implementation: str) -> list[Case]:
    """Every phase of a policy alone, then the whole generation."""
    return [Case(model, policy, name, implementation) for name in (*phase_names(policy), WHOLE)]


def abstract_arguments(config: ModelConfig, decode: DecodeConfig, batch: int) -> tuple:
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


def program(config: ModelConfig, decode: DecodeConfig, name: str) -> Callable:
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
    config = MODELS[case.model]
    config = dataclasses.replace(config, num_layers=layers or config.num_layers)
    decode = decode_config(case.policy, case.implementation)
    with aot.card_in_scope(gpu):  # what a cache holds depends on whether kernels read it
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
        "logits_bytes": case.batch * logit_rows(case, config, decode) * config.embedding_rows * 4,
        "cache_bytes": size(state.cache),
        "aliased_bytes": compiled.alias,
        "kernels": kernel_calls(compiled.hlo),
        "copies": moved(compiled, config, cache, COPIES),
        "transposes": moved(compiled, config, cache, ("transpose",)),
        "square_arrays": square_arrays(compiled.hlo, PROMPT + GENERATED),
        "host_choices": host_choices(compiled.hlo),
    }


def logit_rows(case: Case, config: ModelConfig, decode: DecodeConfig) -> int:
    """Rows that a pass predicts at most: the block's, and in a refresh those of the window too."""
    cache = decode.cache
    if not isinstance(cache, PolestarCache) or case.program not in ("refresh", WHOLE):
        return BLOCK
    window = BLOCK * (cache.window_before + cache.window_after)
    return BLOCK + int(config.shift_logits) + window


def moved(
    compiled: aot.Program, config: ModelConfig, cache: int, ops: Sequence[str]
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
    each = 2 if case.implementation == "xla" else 4
    allowed = each * row["layers"] * passes + 1 if case.opening else 0
    if sum(row["transposes"].values()) > allowed:
        found.append(f"{where}: more than {allowed} large transposes: {row['transposes']}")
    # An opening overwrites its caches without reading them, so alone it need not reuse them.
    if not case.program.startswith("open") and row["aliased_bytes"] < row["cache_bytes"]:
        found.append(
            f"{where}: {row['aliased_bytes']} bytes in place, caches have {row['cache_bytes']}"
        )
    if set(row["kernels"]) != case.kernels:
        found.append(
            f"{where}: kernels {row['kernels']}, expected {sorted(case.kernels) or 'none'}"
        )
    if row["square_arrays"]:
        found.append(f"{where}: attention over all rows at once: {row['square_arrays']}")
    if row["host_choices"] and case.batch == 1:
        found.append(f"{where}: the host chooses between {row['host_choices']} sets of branches")
    # A busy machine stretches the wall clock; on an idle one the processor time bounds it.
    polestar = case.policy == "polestar" and case.program == WHOLE
    allowed_seconds = POLESTAR_COMPILE_LIMIT if polestar else COMPILE_LIMIT
    if min(row["compile_seconds"], row["compile_processor_seconds"]) > allowed_seconds:
        found.append(f"{where}: compiled in {row['compile_seconds']} s")
    return found


def full_passes(policy: str) -> list[str]:
    """Phases of a policy that run all rows."""
    return [n for n in phase_names(policy) if policy == "vanilla" or n in ("open", "open_full")]


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
            f"| {r['model']} | {r['policy']} | {r['program']} | {r['gpu']} "
            f"| {sum(r['kernels'].values())} "
            f"| {r['temporary_bytes'] / GIB:.4f} | {beyond:.4f} "
            f"| {'yes' if in_place else '-'} | {sum(r['copies'].values())} "
            f"| {r['compile_seconds']:.0f} ({r['compile_processor_seconds']:.0f}) |"
        )
    return "\n".join(lines)
