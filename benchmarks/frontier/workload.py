"""Which rows are decoded: tasks, families, prompts as token ids, batches."""

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

import polestar_jax as pj
from benchmarks.tasks import TASKS, Example, get_task, held_out_examples
from benchmarks.tasks.parallelbench import read_directory
from polestar_jax.decoding.prompts import Prompts, prepare_prompts
from polestar_jax.errors import PolestarError

# Accuracy is read per family: tasks of one family ask for the same kind of skill.
FAMILIES: dict[str, tuple[str, ...]] = {
    "lines": ("copy", "reverse", "sort", "insert_index", "remove_index", "replace_index"),
    "free lines": ("shuffle", "insert_random", "remove_random", "replace_random"),
    "puzzles": ("latin", "sudoku"),
    "sums": ("add",),
}
BUCKET = 16  # prompts are padded to a multiple of this, one length for the whole run


@dataclasses.dataclass(frozen=True)
class Row:
    """A prompt with its token ids, its seed and its number among that seed's rows of the task."""

    example: Example
    ids: tuple[int, ...]
    seed: int
    number: int


@dataclasses.dataclass(frozen=True)
class Workload:
    """All rows of a run.

    Attributes:
        source: "held-out" (our generator) or "parallelbench".
        style: "compact" prompts of the embedded model, or "chat" (a sentence, chat template).
        rows: task name -> rows.
        prompt_bucket: length that holds every prompt.
        seconds: time spent tokenising.
    """

    source: str
    style: str
    rows: Mapping[str, tuple[Row, ...]]
    prompt_bucket: int
    seconds: float

    @property
    def families(self) -> dict[str, tuple[str, ...]]:
        """Families with the tasks of this run that belong to them."""
        found = {
            name: tuple(t for t in tasks if t in self.rows) for name, tasks in FAMILIES.items()
        }
        return {name: tasks for name, tasks in found.items() if tasks}

    @property
    def size(self) -> int:
        return sum(len(rows) for rows in self.rows.values())


def check_tasks(tasks: Sequence[str]) -> None:
    """Raise PolestarError for a task that does not exist or belongs to no family."""
    for name in tasks:
        get_task(name)
        if not any(name in family for family in FAMILIES.values()):
            raise PolestarError(f"task {name!r} belongs to no family of the frontier")


def choose_examples(
    tasks: Sequence[str], limit: int, seeds: Sequence[int], data: Path | None
) -> dict[str, list[tuple[int, Example]]]:
    """Task -> (seed, example): `limit` rows per family and seed, dealt evenly to its tasks.

    Without `data` the rows are held-out ones of our generators, others for every seed. With `data`
    they are the first ones of each file, at most `limit` a family, under the one seed given.

    Raises:
        PolestarError: a directory without the files, several seeds with `data`.
    """
    theirs: dict[str, list[Example]] | None = None
    if data is not None:
        if len(seeds) > 1:
            raise PolestarError(
                f"the rows of {data} are the same for every seed; give one seed, got {len(seeds)}"
            )
        theirs = read_directory(data)
        tasks = [name for name in tasks if name in theirs]
        if not tasks:
            raise PolestarError(
                f"{data} has no file of the chosen tasks; it has {', '.join(theirs)}"
            )
    counts = {name: math.ceil(limit / len(group)) for group in _present(tasks) for name in group}
    if theirs is not None:
        return {n: [(seeds[0], row) for row in theirs[n][: counts[n]]] for n in tasks}
    return {
        n: [(s, row) for s in seeds for row in held_out_examples(get_task(n), counts[n], s)]
        for n in tasks
    }


def _present(tasks: Sequence[str]) -> list[list[str]]:
    groups = [[name for name in tasks if name in family] for family in FAMILIES.values()]
    return [group for group in groups if group]


def make_workload(
    model: pj.Model,
    tasks: Sequence[str],
    limit: int,
    seeds: Sequence[int],
    data: Path | None = None,
    style: str = "auto",
) -> Workload:
    """Choose rows and tokenise their prompts; see `choose_examples` for the arguments.

    `style` "auto" takes compact prompts where the tokenizer knows the tasks' names as words.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise PolestarError("the model has no tokenizer, so it cannot read prompts or answer")
    if style == "auto":
        known = tokenizer.backend.get_vocab()
        style = "compact" if all(name in known for name in TASKS) else "chat"
    chosen = choose_examples(tasks, limit, seeds, data)
    started = time.perf_counter()
    rows: dict[str, tuple[Row, ...]] = {}
    for name, examples in chosen.items():
        per_seed = len(examples) // len(seeds)
        made = (
            Row(
                example,
                tuple(tokenizer.encode_prompt(_text(example, style))),
                seed,
                i % per_seed,
            )
            for i, (seed, example) in enumerate(examples)
        )
        # Sequences of a batch wait for each other; those of similar length wait less.
        rows[name] = tuple(sorted(made, key=lambda row: len(row.ids)))
    seconds = time.perf_counter() - started
    longest = max(len(row.ids) for group in rows.values() for row in group)
    bucket = -(-longest // BUCKET) * BUCKET
    source = "held-out" if data is None else "parallelbench"
    return Workload(source, style, rows, bucket, seconds)


def _text(example: Example, style: str) -> str:
    return example.prompt if style == "compact" else example.instruction


def batches(
    model: pj.Model, rows: Sequence[Row], size: int, config: pj.DecodeConfig
) -> Iterator[tuple[Sequence[Row], Prompts, jax.Array]]:
    """(rows, prompts, keys) of `size` sequences each; the last batch repeats its last row.

    A row's key depends on its seed and number alone, so the batch size changes no answer.
    """
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        filled = [*part, *[part[-1]] * (size - len(part))]
        prompts = prepare_prompts(model, [list(row.ids) for row in filled], config)
        roots = jax.vmap(jax.random.key)(jnp.asarray([row.seed for row in filled], jnp.uint32))
        numbers = jnp.asarray([row.number for row in filled], jnp.uint32)
        yield part, prompts, jax.vmap(jax.random.fold_in)(roots, numbers)
