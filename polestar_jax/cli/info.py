"""`polestar-jax info`: what a model is and what decoding with it needs."""

import json
import math
from typing import Any

import click

from polestar_jax.cli.options import dtype_option
from polestar_jax.cli.settings import build_config, parse_assignments
from polestar_jax.convert.checkpoint import open_checkpoint
from polestar_jax.convert.reader import read_json, read_manifest
from polestar_jax.convert.writer import FORMAT, MANIFEST, MODEL_CONFIG
from polestar_jax.decoding.config import DecodeConfig
from polestar_jax.errors import PolestarError
from polestar_jax.memory import WEIGHTS, memory_plan, size_text
from polestar_jax.models.config import ModelConfig
from polestar_jax.models.transformer import parameter_shapes
from polestar_jax.weights import locate

NAMES = {"llada": "LLaDA", "dream": "Dream"}


@click.command()
@click.argument("model")
@dtype_option
@click.option("--policy", default="fast-dllm-dual", show_default=True, help="A preset.")
@click.option("--prompt-length", type=click.IntRange(0), help="[default: up to 512]")
@click.option("--gen-length", type=click.IntRange(1), help="[default: up to 256]")
@click.option("--block-length", type=click.IntRange(1), help="[default: up to 32]")
@click.option("--batch-size", type=click.IntRange(1), multiple=True, help="May be repeated.")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Any other field of the configuration or its policies; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def info(
    model: str,
    dtype: str | None,
    policy: str,
    prompt_length: int | None,
    gen_length: int | None,
    block_length: int | None,
    batch_size: tuple[int, ...],
    assignments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Describe MODEL, a directory or "embedded", and the memory that decoding needs.

    Nothing is loaded: sizes follow from the configuration and the program's own shapes.
    """
    config, stored = read_model(model)
    # What was not asked for fits the model and what was.
    block = block_length or math.gcd(gen_length or 32, 32)
    if not gen_length:
        block = block_length or min(32, max(1, config.max_length // 4))
        gen_length = max(min(256, config.max_length // 2) // block * block, block)
    fields = {"gen_length": gen_length, "block_length": block}
    given = parse_assignments(assignments)
    if twice := sorted(set(given) & set(fields)):
        raise PolestarError(f"set {twice[0]} by its own option, not by --set")
    decoding = build_config(policy, None, None, given | fields)
    prompt = prompt_length
    if prompt is None:
        prompt = max(0, min(512, config.max_length - decoding.gen_length))
    if prompt + decoding.gen_length > config.max_length:
        raise PolestarError(
            f"prompt_length {prompt} and gen_length {decoding.gen_length} exceed the model's "
            f"maximum of {config.max_length} tokens; choose shorter ones"
        )
    used = dtype or stored
    numbers = {
        "family": NAMES[config.family],
        "parameters": parameter_count(config),
        "stored_dtype": stored,
        "dtype": used,
        "policy": policy,
        **{name: value for name, value in config.to_dict().items() if name != "family"},
        "memory": memory(config, decoding, prompt, used, batch_size or (1, 4, 16)),
    }
    click.echo(json.dumps(numbers) if as_json else table(numbers, prompt, decoding))


def read_model(path: str) -> tuple[ModelConfig, str]:
    """Configuration and stored dtype of a model, without its weights."""
    directory = locate(path)
    if (directory / MANIFEST).exists():
        _, stored = read_manifest(directory / MANIFEST, FORMAT)
        return ModelConfig.from_dict(read_json(directory / MODEL_CONFIG)), str(stored)
    checkpoint = open_checkpoint(directory)
    return checkpoint.config, str(checkpoint.dtype)


def memory(
    config: ModelConfig,
    decoding: DecodeConfig,
    prompt_length: int,
    dtype: str,
    batches: tuple[int, ...],
) -> dict[str, Any]:
    """Bytes of the weights and, for each batch size, the memory plan."""
    plans = {str(b): memory_plan(config, decoding, b, prompt_length, dtype) for b in batches}
    first = next(iter(plans.values()))
    return {
        "weights": first.part(WEIGHTS).device,
        "batches": {b: plan.to_dict() for b, plan in plans.items()},
    }


def parameter_count(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def table(numbers: dict[str, Any], prompt_length: int, decoding: DecodeConfig) -> str:
    """The numbers for a reader."""
    n, need = numbers, numbers["memory"]
    head = "tied to the embedding" if n["tied_head"] else "a matrix of its own"
    lines = [
        ("family", n["family"]),
        ("parameters", f"{count(n['parameters'])} ({n['parameters']:,})"),
        ("stored as", n["stored_dtype"]),
        ("layers", f"{n['num_layers']} of width {n['width']}, MLP {n['mlp_width']}"),
        (
            "attention",
            f"{n['num_heads']} heads and {n['num_kv_heads']} key/value heads of {n['head_dim']}",
        ),
        ("vocabulary", f"{n['vocab_size']} tokens; head {head}"),
        ("special tokens", f"mask {n['mask_token']}, end {n['eos_token']}, pad {n['pad_token']}"),
        ("longest", f"{n['max_length']} tokens, prompt and generation together"),
        ("", ""),
        (
            "memory",
            f"{n['policy']}, {n['dtype']}, prompt {prompt_length} + generation "
            f"{decoding.gen_length}, blocks of {decoding.block_length}; activations come on top",
        ),
        ("", f"{'':<28}{'device':>12}{'host':>12}"),
        *(
            line
            for batch, plan in need["batches"].items()
            for line in (
                (f"batch of {batch}", columns("together", plan)),
                *(("", columns(f"  {part}", size)) for part, size in plan["parts"].items()),
            )
        ),
    ]
    return "\n".join(f"{name:<16}{value}".rstrip() for name, value in lines)


def count(number: int) -> str:
    """8.02 billion."""
    for value, unit in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= value:
            return f"{number / value:.2f} {unit}"
    return str(number)


def columns(name: str, bytes_: dict[str, Any]) -> str:
    """A line of the memory table."""
    host = size_text(bytes_["host"]) if bytes_["host"] else "-"
    return f"{name:<28}{size_text(bytes_['device']):>12}{host:>12}"
