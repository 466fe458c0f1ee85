"""The model card: written from what the run and the evaluation recorded, nothing by hand."""

import csv
import json
import math
from pathlib import Path
from typing import Any

from benchmarks.embedded.plan import Plan
from benchmarks.embedded.run import LOG, Run
from benchmarks.tasks import TASKS
from polestar_jax.models.transformer import parameter_shapes

ACCURACY = "accuracy.json"
CARD = "README.md"


def write_card(folder: Path) -> None:
    """Write `README.md` into an exported run."""
    run = Run.load(folder)
    plan = run.read_plan()
    with (folder / LOG).open(newline="") as file:
        log = list(csv.DictReader(file))
    path = folder / ACCURACY
    accuracy = json.loads(path.read_text()) if path.exists() else {}
    (folder / CARD).write_text("\n".join([*_head(run, plan, log), *_scores(accuracy), ""]))


def _head(run: Run, plan: Plan, log: list[dict[str, str]]) -> list[str]:
    c = plan.model_config()
    count = sum(math.prod(shape) for shape in parameter_shapes(c).values())
    tasks = ", ".join(f"`{name}`" for name in TASKS if name in plan.tasks)
    kept_out = (
        f", nor any of the {run.excluded} rows of a ParallelBench copy (`--exclude COPY`)"
        if run.excluded
        else ""
    )
    last = log[-1]
    earlier = f" after the {run.parent.steps:,} of its parent" if run.parent else ""
    return [
        "---",
        "license: apache-2.0",
        "tags: [llada, diffusion-language-model]",
        "---",
        "# The embedded model",
        "",
        f"A LLaDA of {count:,} parameters ({c.num_layers} layers, width {c.width}, "
        f"{c.num_heads} heads, MLP {c.mlp_width}, {c.vocab_size} tokens), trained from scratch on "
        "rows of small tasks with a known right answer, so that decoding policies can be compared "
        "on any machine. It knows nothing else.",
        "",
        '**Prompts** are `task [index] ["new person"] list`, e.g. '
        '`insert_index 2 "Ann Lee" ["John Smith", "Mary Jones", "Paul Hill"]`, '
        "`latin [H, 4, C, A]`, `sudoku` and four rows, `add 218 + 598`; the answer follows in the "
        "same notation, then EOS.",
        "",
        f"**Data.** Generated rows of {tasks}. One prompt in twenty, chosen by the SHA-256 of its "
        f"text, is held out and never trained on{kept_out}.",
        "",
        f"**Training.** {run.steps:,} steps{earlier}, {int(last['tokens']):,} tokens, seed "
        f"{run.seed}, {float(last['seconds']) / 60:.0f} minutes on a share of {run.machine}; "
        f"final loss {last['loss']}. Masked diffusion: response tokens hidden with probability t, "
        "loss weighted by 1/t; Muon for the matrices, Adam for the rest; `training_log.csv` has "
        "the curve, overall and per task. To train it again:",
        "",
        "```",
        *_commands(run, "DIR"),
        "```",
        "",
        *_notes(run),
    ]


def _commands(run: Run, folder: str) -> list[str]:
    """The commands that repeat the run, its parents' first."""
    before = _commands(run.parent, f"{folder}-parent") if run.parent else []
    init = f" --init {folder}-parent" if run.parent else ""
    exclude = " --exclude COPY" if run.excluded else ""
    return [
        *before,
        f"python -m benchmarks.embedded.train --plan {run.plan} --steps {run.steps} "
        f"--seed {run.seed}{init}{exclude} --out {folder}",
    ]


def _notes(run: Run) -> list[str]:
    """What the runs' notes say, the parents' first."""
    before = _notes(run.parent) if run.parent else []
    return [*before, run.note, ""] if run.note else before


def _scores(accuracy: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    if not accuracy:
        return []
    sources = list(accuracy)
    names = [name for name in TASKS if any(name in accuracy[s] for s in sources)]
    lines = [
        "**Accuracy**, one token a pass, 64 tokens in blocks of 32, float32 (right / rows):",
        "",
        f"| task | {' | '.join(sources)} |",
        f"|---|{'---|' * len(sources)}",
    ]
    for name in names:
        cells = [_cell(accuracy[source].get(name)) for source in sources]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, "", "Measured by `python -m benchmarks.embedded.evaluate --model DIR`."]


def _cell(score: dict[str, Any] | None) -> str:
    if score is None:
        return "–"
    return f"{100 * score['right'] / score['rows']:.1f} % ({score['right']}/{score['rows']})"
