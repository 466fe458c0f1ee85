"""`polestar-jax demo`: the embedded model answers real prompts under two policies."""

import dataclasses
import importlib.resources
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from polestar_jax.cli.job import interruptible
from polestar_jax.cli.options import compilation_cache_option
from polestar_jax.cli.settings import EMBEDDED_LENGTHS
from polestar_jax.cli.timing import measure
from polestar_jax.decoding.config import DecodeConfig
from polestar_jax.decoding.decode import decode
from polestar_jax.decoding.presets import PRESETS, preset
from polestar_jax.errors import PolestarError
from polestar_jax.models.transformer import parameter_shapes

if TYPE_CHECKING:
    from polestar_jax.weights import Model

DEFAULT_POLICIES = ("vanilla", "polestar" if "polestar" in PRESETS else "fast-dllm-dual")


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt with exactly one right answer, and what it asks in words."""

    task: str
    asks: str
    prompt: str
    answer: str


@dataclasses.dataclass(frozen=True)
class Reply:
    """What one policy answered to one question; `seconds` without compilation."""

    text: str
    right: bool
    nfe: int
    answer_tokens: int
    seconds: float


def questions() -> list[Question]:
    """The demo's questions: rows of the kind the model was trained on, all held out."""
    file = importlib.resources.files("polestar_jax") / "assets" / "demo.jsonl"
    return [Question(**json.loads(line)) for line in file.read_text("utf-8").splitlines()]


@click.command()
@click.option(
    "--policy",
    "policies",
    multiple=True,
    help=f"Presets to compare  [default: {' and '.join(DEFAULT_POLICIES)}].",
)
@compilation_cache_option
def demo(policies: tuple[str, ...]) -> None:
    """Let a small model that comes with the package answer prompts, under two policies.

    For each answer: right or wrong, forward passes (NFE), answer tokens per forward pass, and
    time without compilation.
    """
    from polestar_jax.weights import load

    names = policies or DEFAULT_POLICIES
    configs = {name: preset(name, **EMBEDDED_LENGTHS) for name in names}
    if len(configs) < len(names):
        raise PolestarError(f"--policy gives {', '.join(names)}; name each policy once")
    model = load("embedded", dtype="float32")
    asked = questions()
    click.echo(introduction(model, len(asked)))
    replies: dict[str, list[Reply]] = {name: [] for name in names}
    # Unseen, each question is answered once first: compiling and starting up are not timed.
    compiling = {name: warm_up(model, asked, config) for name, config in configs.items()}
    width = max(map(len, names))
    for number, question in enumerate(asked, 1):
        click.echo(f"\n{number}. {question.asks}\n   {indented(question.prompt)}")
        for name, config in configs.items():
            reply = answer(model, question, config)
            replies[name].append(reply)
            click.echo(f"   {name:<{width}}  {line(reply)}\n     -> {indented(reply.text, 8)}")
    click.echo("\n" + table(replies, compiling))


def introduction(model: "Model", count: int) -> str:
    c = model.config
    millions = sum(math.prod(shape) for shape in parameter_shapes(c).values()) / 1e6
    return (
        f"A diffusion language model of {millions:.2f} million parameters ({c.num_layers} layers, "
        f"width {c.width}), trained for this demo, answers {count} prompts it has never seen."
    )


def warm_up(model: "Model", asked: Sequence[Question], config: DecodeConfig) -> float:
    """Run everything once, every kind of pass included; seconds that compiling took."""
    with measure() as watch:
        for question in asked:
            answer(model, question, config)
    return watch.compiling


def answer(model: "Model", question: Question, config: DecodeConfig) -> Reply:
    """Decode one question alone, so that its time is its own (less what compiling took)."""
    with measure() as watch:
        result = interruptible(lambda: decode(model, [question.prompt], config))
    if result.text is None:
        raise PolestarError("the embedded model has no tokenizer; reinstall polestar-jax")
    return Reply(
        text=result.text[0],
        right=result.text[0].strip() == question.answer.strip(),
        nfe=int(result.nfe[0]),
        answer_tokens=int(result.stats.generated[0]),
        seconds=watch.computing,
    )


def indented(text: str, spaces: int = 3) -> str:
    return text.replace("\n", "\n" + " " * spaces)


def line(reply: Reply) -> str:
    mark = click.style("right", fg="green") if reply.right else click.style("wrong", fg="red")
    return (
        f"{mark}  NFE {reply.nfe:3d}  {reply.answer_tokens / max(reply.nfe, 1):5.2f} tokens/forward"
        f"  {1e3 * reply.seconds:7.1f} ms"
    )


def table(replies: Mapping[str, Sequence[Reply]], compiling: Mapping[str, float]) -> str:
    """One line per policy: sums over all questions."""
    head = ("policy", "right", "NFE", "tokens/forward", "seconds", "tokens/s", "compiling (s)")
    rows: list[tuple[Any, ...]] = [head]
    for name, of_policy in replies.items():
        nfe, tokens = sum(r.nfe for r in of_policy), sum(r.answer_tokens for r in of_policy)
        seconds = sum(r.seconds for r in of_policy)
        rows.append(
            (
                name,
                f"{sum(r.right for r in of_policy)}/{len(of_policy)}",
                nfe,
                f"{tokens / max(nfe, 1):.2f}",
                f"{seconds:.3f}",
                f"{tokens / max(seconds, 1e-9):.0f}",
                f"{compiling[name]:.2f}",
            )
        )
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(f"{row[i]!s:{'<' if i == 0 else '>'}{width}}" for i, width in enumerate(widths))
        for row in rows
    )
