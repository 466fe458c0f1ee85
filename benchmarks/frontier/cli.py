"""The command line: options, errors as one sentence, interruption."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from benchmarks.frontier.plots import draw
from benchmarks.frontier.report import markdown
from benchmarks.frontier.runner import Request, execute, prepare
from benchmarks.frontier.settings import KNOBS, Canvas, Setting, frontier_settings
from benchmarks.frontier.store import write_text
from benchmarks.frontier.workload import check_tasks
from benchmarks.tasks import TASKS
from polestar_jax.errors import PolestarError

RESULTS = Path(__file__).parent.parent / "results"
LIMIT = 500
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
QUICK_LIMIT = 40
QUICK = {"threshold": "0.7,0.9", "factor": "1", "tokens_per_pass": "1"}

Make = Callable[[Canvas], list[Setting]]


def common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of `benchmarks.frontier` and `benchmarks.ablations` alike."""
    for option in reversed(
        (
            click.option("--model", default="embedded", show_default=True,
                         help="A converted or Hugging Face directory."),
            click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]),
                         default="float32", show_default=True),
            click.option("--limit", type=click.IntRange(1),
                         help=f"Prompts a task family and seed.  [default: {LIMIT}]"),
            click.option("--seeds", default="0", show_default=True,
                         help="Comma-separated; each has rows and random keys of its own."),
            click.option("--data", type=click.Path(path_type=Path),
                         help="Directory of ParallelBench files to take the rows from."),
            click.option("--prompts", type=click.Choice(["auto", "compact", "chat"]),
                         default="auto", show_default=True,
                         help="Compact ones, or sentences in the model's chat template."),
            click.option("--gen-length", type=click.IntRange(1), default=32, show_default=True),
            click.option("--batch-size", type=click.IntRange(1), default=16, show_default=True),
            click.option("--out", type=click.Path(path_type=Path, file_okay=False),
                         default=RESULTS, help="Directory of the results."),
            click.option("--name", default="", help="Put behind the names of the files."),
            click.option("--restart", is_flag=True, help="Measure again what is there already."),
            click.option("--quiet", is_flag=True, help="No progress bar."),
        )
    ):  # fmt: skip
        command = option(command)
    return command


@click.command()
@common_options
@click.option("--policies", default="all", show_default=True, help=f"Of: {', '.join(KNOBS)}.")
@click.option("--tasks", default="all", show_default=True, help=f"Of: {', '.join(TASKS)}.")
@click.option("--block-length", type=click.IntRange(1), default=8, show_default=True)
@click.option("--thresholds", help="Values in place of the usual ones.")
@click.option("--factors", help="Values in place of the usual ones.")
@click.option("--tokens-per-pass", help="Values in place of the usual ones (vanilla).")
@click.option("--quick", is_flag=True, help="A few minutes: 40 prompts a family, fewer values.")
@click.option("--trace/--no-trace", default=True, help="Also measure drift over passes.")
def frontier(
    policies: str,
    tasks: str,
    thresholds: str | None,
    factors: str | None,
    tokens_per_pass: str | None,
    quick: bool,
    **options: Any,
) -> None:
    """Accuracy against tokens per forward, arithmetic and time of every decoding policy.

    Writes a JSON file, a Markdown report and pictures. An interrupted run resumes where it was.
    """
    given = {
        "threshold": thresholds, "factor": factors, "tokens_per_pass": tokens_per_pass,
    }  # fmt: skip
    if quick:
        given = {name: text or QUICK[name] for name, text in given.items()}
        if options["limit"] is None:
            options["limit"] = QUICK_LIMIT
    values = {
        name: numbers(text, name, int if name == "tokens_per_pass" else float)
        for name, text in given.items()
        if text is not None
    }
    chosen = names(policies, KNOBS, "policy")
    run(
        "frontier", names(tasks, TASKS, "task"), options, quick,
        lambda canvas: frontier_settings(chosen, canvas, values),
    )  # fmt: skip


def run(kind: str, tasks: Sequence[str], options: dict[str, Any], quick: bool, make: Make) -> None:
    """Measure `make(canvas)` on `tasks` and write everything; says where."""
    check_tasks(tasks)
    options["limit"] = options["limit"] or LIMIT
    out: Path = options.pop("out")
    source = options["data"] and "parallelbench"
    parts = (
        kind,
        Path(options["model"]).resolve().name,
        source,
        quick and "quick",
        options.pop("name"),
    )
    stem = "_".join(part for part in parts if part)
    request = Request(
        kind=kind,
        tasks=tuple(tasks),
        seeds=seed_numbers(options.pop("seeds")),
        path=out / f"{stem}.json",
        command=f"python -m benchmarks.{kind} {shlex.join(sys.argv[1:])}".rstrip(),
        **options,
    )
    # Settings that cannot work are refused before anything is loaded.
    make(Canvas(request.gen_length, request.block_length))
    prepared = prepare(request)
    settings = make(prepared.canvas)
    finished = execute(prepared, settings, request)
    fresh = sum(r["date"] >= prepared.run["created"] for r in finished["records"].values())
    click.echo(f"{fresh} of {len(settings)} settings measured now, the rest before", err=True)
    report = out / f"{stem}.md"
    write_text(report, markdown(finished))
    pictures = draw(finished, out / stem)
    for path in (request.path, report, *pictures):
        click.echo(path)


def names(text: str, known: Sequence[str] | dict[str, Any], what: str) -> tuple[str, ...]:
    """A comma-separated list of names, "all" for every known one."""
    if text == "all":
        return tuple(known)
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise PolestarError(f"no {what} given; known: {', '.join(known)}")
    for name in found:
        if name not in known:
            raise PolestarError(f"unknown {what} {name!r}; known: {', '.join(known)}")
    return found


def numbers(text: str, what: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    """A comma-separated list of numbers."""
    try:
        found = tuple(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise PolestarError(f"{what} wants comma-separated numbers, got {text!r}") from None
    if min(found) < 0:
        raise PolestarError(f"{what} must not be negative, got {text!r}")
    return found


def seed_numbers(text: str) -> tuple[int, ...]:
    """Comma-separated seeds that a random key can be made from."""
    found = numbers(text, "seed", int)
    if max(found) >= 2**63:
        raise PolestarError(f"seed must be below 2**63, got {max(found)}")
    return found


def run_command(command: click.Command, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command; user errors end in one sentence and exit code 2, Ctrl-C in 130."""
    try:
        code = command.main(arguments, standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        code = 2
    except PolestarError as error:
        click.echo(f"Error: {error}", err=True)
        code = 2
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        click.echo("Error: the device ran out of memory; lower --batch-size", err=True)
        code = 2
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted; the same command resumes", err=True)
        # A program may still be running on the device; an orderly exit would wait for its end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)
    sys.exit(code)
