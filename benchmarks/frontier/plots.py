"""Pictures of a run: the frontier by family and by task, acceptance by cause, drift over passes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from benchmarks.frontier.report import usual
from polestar_jax.decoding.state import CAUSES

Run = Mapping[str, Any]

# Black for the baseline, warm for rules without drift, cool for those with it.
STYLES: dict[str, tuple[str, str]] = {
    "vanilla": ("black", "s"),
    "parallel": ("tab:gray", "o"),
    "parallel-factor": ("tab:gray", "^"),
    "fast-dllm-prefix": ("tab:orange", "v"),
    "fast-dllm-dual": ("tab:red", "o"),
    "fast-dllm-factor": ("tab:red", "^"),
    "polestar-cache": ("tab:cyan", "o"),
    "polestar-commit": ("tab:purple", "o"),
    "polestar": ("tab:blue", "D"),
}
MEASURES = {
    "tokens_per_forward": ("answer tokens per forward", 1.0),
    "flops_per_token": ("MFLOP per answer token", 1e-6),
}
TASK_COLUMNS = 5
LEAST_SPAN = 20.0  # points of accuracy that a panel shows at least


def draw(run: Run, stem: Path) -> list[Path]:
    """Write the pictures that the run has data for, beside `stem`; returns their paths."""
    figures = {"_causes": causes(run)}
    if run["identity"]["kind"] == "frontier":
        figures[""] = frontier(run)
        figures["_tasks"] = by_task(run)
    if run["drift"] is not None:
        figures["_drift"] = drift(run["drift"])
    paths = []
    for suffix, figure in figures.items():
        path = stem.with_name(f"{stem.name}{suffix}.png")
        partial = path.with_name(f".{path.name}.partial")
        figure.savefig(partial, format="png", dpi=110)
        plt.close(figure)
        partial.replace(path)
        paths.append(path)
    return paths


def frontier(run: Run) -> Figure:
    """Accuracy over tokens per forward and over arithmetic, a column per family."""
    families = list(run["families"])
    figure, grid = plt.subplots(
        len(MEASURES), len(families), figsize=(3.6 * len(families) + 0.6, 6.4), squeeze=False,
        sharey="col", layout="constrained",
    )  # fmt: skip
    for column, family in enumerate(families):
        for row, measure in enumerate(MEASURES):
            _panel(grid[row, column], run, ("families", family), measure)
        grid[0, column].set_title(family)
    for row in range(len(MEASURES)):
        grid[row, 0].set_ylabel("accuracy, %")
    _legend(figure, grid[0, 0])
    return figure


def by_task(run: Run) -> Figure:
    """Accuracy over tokens per forward, a panel per task."""
    tasks = list(run["identity"]["tasks"])
    columns = min(TASK_COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(2.9 * columns + 0.6, 2.7 * rows + 0.7), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for task, axes in zip(tasks, grid.flat):
        _panel(axes, run, ("tasks", task), "tokens_per_forward")
        axes.set_title(task)
    for axes in list(grid.flat)[len(tasks) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel("accuracy, %")
    _legend(figure, grid[0, 0])
    return figure


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)


def _panel(axes: Axes, run: Run, of: tuple[str, str], measure: str) -> None:
    """One curve per policy for a family or task: of = ("families" or "tasks", name)."""
    label, scale = MEASURES[measure]
    records = list(run["records"].values())
    group, name = of
    for policy in dict.fromkeys(r["policy"] for r in records):
        points = [r[group][name] for r in records if r["policy"] == policy]
        points.sort(key=lambda p: p[measure])
        accuracy = [100 * p["accuracy"] for p in points]
        low = [a - 100 * p["accuracy_interval"][0] for a, p in zip(accuracy, points)]
        high = [100 * p["accuracy_interval"][1] - a for a, p in zip(accuracy, points)]
        color, marker = STYLES.get(policy, ("tab:green", "."))
        axes.errorbar(
            [p[measure] * scale for p in points], accuracy,
            yerr=[[max(x, 0) for x in low], [max(x, 0) for x in high]],
            label=policy, color=color, marker=marker, markersize=4, linewidth=1.2, elinewidth=0.7,
            alpha=0.85,
        )  # fmt: skip
    low, high = axes.get_ylim()
    spare = max(LEAST_SPAN - (high - low), 0.0) / 2
    axes.set_ylim(max(low - spare, -3.0), min(high + spare, 103.0))
    axes.set_xlabel(label)
    if all(r[group][name][measure] > 0 for r in records):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)


def causes(run: Run) -> Figure:
    """Tokens of the canvas by the rule that committed them, at the usual settings."""
    records = usual(list(run["records"].values()))
    names = [f"{r['policy']}\n{r['knob'].replace('_', ' ')} {r['value']}" for r in records]
    figure, axes = plt.subplots(figsize=(7, 0.5 * len(records) + 1.4), layout="constrained")
    left = [0.0] * len(records)
    for cause, color in zip(CAUSES, ("tab:gray", "tab:blue", "tab:cyan", "gainsboro")):
        width = [r["all"]["commits"][cause] for r in records]
        label = "fill behind EOS" if cause == "eos" else cause
        axes.barh(names, width, left=left, label=label, color=color)
        left = [a + b for a, b in zip(left, width)]
    axes.invert_yaxis()
    axes.set_xlabel("tokens of the canvas, mean per prompt")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure


def drift(data: Mapping[str, Any]) -> Figure:
    """Left: quartiles of drift by pass. Right: stability with the gate open and shut."""
    figure, (over, stable) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    kinds = ((True, "tab:blue", "committed in this pass"), (False, "tab:gray", "left masked"))
    for committed, color, label in kinds:
        chosen = [c for c in data["curves"] if c["committed"] is committed]
        numbers = [c["pass"] for c in chosen]
        low, middle, high = ([c["quartiles"][i] for c in chosen] for i in range(3))
        over.plot(numbers, middle, color=color, marker="o", label=label)
        over.fill_between(numbers, low, high, color=color, alpha=0.2)
    over.set_xlabel("pass of the block (0 opens it)")
    over.set_ylabel("attention drift of a row, nats")
    over.legend(frameon=False)
    over.grid(alpha=0.3)
    entries = [e for e in data["gate"] if e["stable"] is not None]
    for index, entry in enumerate(entries):
        low, high = entry["interval"]
        share = entry["stable"]
        stable.bar(
            index, 100 * share,
            yerr=[[100 * max(share - low, 0)], [100 * max(high - share, 0)]],
            color="tab:blue" if entry["gate_open"] else "tab:gray", capsize=3,
        )  # fmt: skip
    labels = [
        f"confidence {e['confidence'][0]:.2f} to {e['confidence'][1]:.2f}\n"
        f"gate {'open' if e['gate_open'] else 'shut'}, {e['rows']} rows"
        for e in entries
    ]
    stable.set_xticks(range(len(entries)), labels, fontsize=6)
    stable.set_ylabel("prediction is the final token, %")
    return figure
