"""Accuracy per task of a model, decoded by the package itself.

    python -m benchmarks.embedded.evaluate --model DIR|embedded [--data PARALLELBENCH_DIR]

Rows are held-out ones of our generator and, with `--data`, all of the user's ParallelBench rows.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

import polestar_jax as pj
from benchmarks.embedded.card import ACCURACY, write_card
from benchmarks.tasks import TASKS, Example, get_task, held_out_examples
from benchmarks.tasks.parallelbench import read_directory
from polestar_jax.errors import PolestarError

GEN_LENGTH, BLOCK_LENGTH = 64, 32
BATCH = 50


@dataclasses.dataclass(frozen=True)
class Score:
    """One task under one policy: how many rows, how many right (also by the strict reading), mean
    passes a row, answer tokens per pass over all rows."""

    rows: int
    right: int
    strictly_right: int
    passes: float
    tokens_per_forward: float


def score_rows(
    model: pj.Model, config: pj.DecodeConfig, rows: Sequence[Example], progress: bool = False
) -> Score:
    """Decode `rows`, all of one task, in batches and mark the answers."""
    task = get_task(rows[0].task)
    right, strict, nfe, tokens = 0.0, 0.0, 0, 0
    for start in tqdm(range(0, len(rows), BATCH), desc=task.name, disable=not progress):
        part = rows[start : start + BATCH]
        # The last batch is filled up, so that every batch has the same compiled program.
        padded = [row.prompt for row in part] + [part[-1].prompt] * (BATCH - len(part))
        result = pj.decode(model, padded, config)
        if result.text is None:
            raise PolestarError("the model has no tokenizer, so its answers cannot be marked")
        for row, text in zip(part, result.text):
            right += task.score(row, text)
            strict += task.score(row, text, strict=True)
        nfe += int(np.sum(result.nfe[: len(part)]))
        tokens += int(np.sum(result.stats.generated[: len(part)]))
    return Score(len(rows), int(right), int(strict), nfe / len(rows), tokens / nfe)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.embedded.evaluate", description=__doc__
    )
    parser.add_argument("--model", default="embedded", help="directory, or 'embedded'")
    parser.add_argument("--data", type=Path, help="directory of ParallelBench files")
    parser.add_argument("--tasks", help="comma-separated; all by default")
    parser.add_argument("--limit", type=int, default=200, help="held-out rows a task")
    parser.add_argument("--policy", default="vanilla", choices=sorted(pj.PRESETS))
    parser.add_argument(
        "--card", action="store_true", help="write the scores into DIR's model card"
    )
    args = parser.parse_args(arguments)
    if args.limit < 1:
        parser.error(f"--limit must be at least 1, got {args.limit}")
    if args.card and args.policy != "vanilla":
        parser.error("--card is for the vanilla policy's scores")
    names = args.tasks.split(",") if args.tasks else list(TASKS)
    model = pj.load(args.model, dtype="float32")
    config = pj.preset(
        args.policy, gen_length=GEN_LENGTH, block_length=BLOCK_LENGTH, prompt_bucket=32
    )
    sources = {"held-out": {n: held_out_examples(get_task(n), args.limit) for n in names}}
    if args.data:
        theirs = read_directory(args.data)
        sources["ParallelBench"] = {name: theirs[name] for name in names if name in theirs}
    scores: dict[str, dict[str, Score]] = {}
    for source, tasks in sources.items():
        for name, rows in tasks.items():
            score = score_rows(model, config, rows, progress=sys.stderr.isatty())
            scores.setdefault(source, {})[name] = score
            print(
                f"{source:14s} {name:15s} {100 * score.right / score.rows:5.1f} % of {score.rows}"
                f"   {score.passes:5.1f} passes, {score.tokens_per_forward:.2f} tokens a pass",
                flush=True,
            )
    if args.card:
        plain = {s: {n: dataclasses.asdict(x) for n, x in t.items()} for s, t in scores.items()}
        folder = Path(args.model)
        (folder / ACCURACY).write_text(json.dumps(plain, indent=2) + "\n")
        write_card(folder)


if __name__ == "__main__":
    try:
        main()
    except PolestarError as error:
        sys.exit(f"error: {error}")
