"""Which tensor of a checkpoint becomes which parameter: one table of names per family.

`{}` stands for the layer number. Matrices lie as [out, in] in PyTorch and as [in, out] here.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from polestar_jax.convert.reader import DTYPES, Stored
from polestar_jax.errors import PolestarError
from polestar_jax.models.config import ModelConfig
from polestar_jax.models.transformer import parameter_shapes

HEAD = "head"
SHOWN = 8  # names listed per kind of problem


@dataclass(frozen=True)
class Rule:
    """Tensor name, parameter name, and whether the matrix is turned over."""

    tensor: str
    parameter: str
    transpose: bool = False


def _llada() -> Iterable[Rule]:
    root, block = "model.transformer", "model.transformer.blocks.{}"
    yield Rule(f"{root}.wte.weight", "embed")
    yield Rule(f"{root}.ln_f.weight", "norm")
    yield Rule(f"{root}.ff_out.weight", HEAD, True)
    yield Rule(f"{block}.attn_norm.weight", "layers.{}.attn_norm")
    yield Rule(f"{block}.ff_norm.weight", "layers.{}.mlp_norm")
    for theirs, ours in (
        ("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("attn_out", "o"),
        ("ff_proj", "gate"), ("up_proj", "up"), ("ff_out", "down"),
    ):  # fmt: skip
        yield Rule(f"{block}.{theirs}.weight", f"layers.{{}}.{ours}", True)
    for name in "qkv":
        yield Rule(f"{block}.{name}_proj.bias", f"layers.{{}}.{name}_bias")


def _dream() -> Iterable[Rule]:
    block = "model.layers.{}"
    yield Rule("model.embed_tokens.weight", "embed")
    yield Rule("model.norm.weight", "norm")
    yield Rule("lm_head.weight", HEAD, True)
    yield Rule(f"{block}.input_layernorm.weight", "layers.{}.attn_norm")
    yield Rule(f"{block}.post_attention_layernorm.weight", "layers.{}.mlp_norm")
    for name in "qkvo":
        yield Rule(f"{block}.self_attn.{name}_proj.weight", f"layers.{{}}.{name}", True)
    for name in "qkv":
        yield Rule(f"{block}.self_attn.{name}_proj.bias", f"layers.{{}}.{name}_bias")
    for name in ("gate", "up", "down"):
        yield Rule(f"{block}.mlp.{name}_proj.weight", f"layers.{{}}.{name}", True)


TABLES: dict[str, tuple[Rule, ...]] = {"llada": tuple(_llada()), "dream": tuple(_dream())}

# Rotary frequencies, saved by old versions as buffers; they follow from rope_theta.
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Entry:
    """Where a parameter comes from."""

    stored: Stored
    transpose: bool


def lookup(family: str, tensor: str) -> Rule | None:
    """The rule for a tensor name, its layer number filled in, or None."""
    for rule in TABLES[family]:
        pattern = re.escape(rule.tensor).replace(r"\{\}", r"(0|[1-9]\d*)")
        if match := re.fullmatch(pattern, tensor):
            layer = match.groups()
            return Rule(tensor, rule.parameter.format(*layer), rule.transpose)
    return None


def tensor_name(family: str, parameter: str) -> str:
    """The tensor that provides a parameter: the inverse of `lookup`, for messages."""
    layer = re.match(r"layers\.(\d+)\.", parameter)
    generic = parameter.replace(layer.group(0), "layers.{}.") if layer else parameter
    rule = next(r for r in TABLES[family] if r.parameter == generic)
    return rule.tensor.format(*layer.groups()) if layer else rule.tensor


def match(
    config: ModelConfig, tensors: Mapping[str, Stored], duplicates: Iterable[str] = ()
) -> tuple[dict[str, Entry], Entry | None]:
    """Assign a tensor to every parameter of the model.

    Returns the entries by parameter name, and the head tensor of a checkpoint whose head is tied
    (it must then equal the embedding). Raises one PolestarError that lists every unknown, missing,
    duplicate, wrong-shaped and wrong-typed tensor.
    """
    expected = parameter_shapes(config)
    shapes = expected | {HEAD: (config.width, config.embedding_rows)}  # a tied head may be stored
    entries: dict[str, Entry] = {}
    unknown, shape, dtype = [], [], []
    for name, stored in tensors.items():
        rule = lookup(config.family, name)
        if rule is None or rule.parameter not in shapes:
            if not IGNORED.fullmatch(name):
                unknown.append(name)
            continue
        entries[rule.parameter] = Entry(stored, rule.transpose)
        wanted = shapes[rule.parameter][:: -1 if rule.transpose else 1]
        if stored.shape != wanted:
            shape.append(f"{name} {list(stored.shape)} instead of {list(wanted)}")
        if stored.dtype not in DTYPES:
            dtype.append(f"{name} ({stored.dtype})")
    _check_family(config, tensors, entries)
    missing = [tensor_name(config.family, p) for p in expected if p not in entries]
    _report(
        {
            "missing": missing,
            "unknown": unknown,
            "duplicate": list(duplicates),
            "of the wrong shape": shape,
            "of a dtype other than bfloat16, float16 and float32": dtype,
        }
    )
    tied = entries.pop(HEAD, None) if config.tied_head else None
    return {p: entries[p] for p in expected}, tied


def _check_family(
    config: ModelConfig, tensors: Mapping[str, Stored], entries: Mapping[str, Entry]
) -> None:
    for family in TABLES:
        if family != config.family and not entries and any(lookup(family, t) for t in tensors):
            raise PolestarError(
                f"config.json says {config.family}, but the tensors are named like those of a "
                f"{family} checkpoint; use the config.json that belongs to the weights"
            )


def _report(problems: Mapping[str, list[str]]) -> None:
    parts = []
    for kind, names in problems.items():
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            parts.append(f"{len(names)} {kind}: {', '.join(sorted(names)[:SHOWN])}{more}")
    if parts:
        raise PolestarError(f"the tensors do not fit config.json: {'; '.join(parts)}")
