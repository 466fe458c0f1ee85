"""Which part of Polestar does what: its ingredients one at a time, beside the other policies.

    python -m benchmarks.ablations --model embedded

The settings go through the same runner as the frontier. Blocks are short, so that answers span
several and caches, windows and openings matter.
"""

from collections.abc import Sequence
from typing import Any

import click

from benchmarks.frontier.cli import common_options, names, run, run_command
from benchmarks.frontier.settings import Canvas, Setting, policy_config
from benchmarks.tasks import TASKS

LIMIT = 168  # prompts a family: 504 of the three families below

# Tasks that leave room for error: an easy one would hide what a setting changes.
HARD = (
    "sort", "shuffle", "insert_random", "remove_random", "replace_random", "latin", "sudoku",
)  # fmt: skip

POLICIES = (
    "vanilla", "parallel", "fast-dllm-prefix", "fast-dllm-dual", "polestar-cache",
    "polestar-commit", "polestar",
)  # fmt: skip

OPENINGS: dict[str, tuple[bool, ...]] = {
    "none": (False,),
    "1 in 4": (False, False, False, True),
    "1 in 2": (False, True),
    "3 in 4": (False, True, True, True),
    "all but the first": (True,),  # block 0 always opens full
}

# Field of Polestar -> its values, the default among them.
FIELDS: dict[str, Sequence[Any]] = {
    "signal": ("kl", "cosine", "uncertainty", "random"),
    "early_threshold": (None, 0.5, 0.6, 0.7, 0.8),
    "history": (1, 2, 5, 10),
    "suffix": (True, False),
    "reembed_suffix_commits": (False, True),
}
CLUSTERS = ((1, 8), (2, 8), (4, 8), (8, 8), (2, 4), (8, 16))  # refreshed, of how many
WINDOWS = ((1, 0), (1, 1), (2, 0), (2, 1), (4, 2), (8, 8))  # blocks before, behind


def word(value: Any) -> float | int | str:
    """How a value stands in tables."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else value


def ablation_settings(canvas: Canvas, groups: Sequence[str]) -> list[Setting]:
    """The policies at their defaults, then Polestar with one thing changed at a time.

    Polestar's defaults stand in every group, so that each can be read alone; they are measured
    once.
    """
    found = []
    if "policies" in groups:
        found += [Setting(p, "policy", "default", policy_config(p, canvas)) for p in POLICIES]

    def add(knob: str, value: Any, **fields: Any) -> None:
        if knob in groups:
            config = policy_config("polestar", canvas, **fields)
            found.append(Setting("polestar", knob, value, config))

    for name, values in FIELDS.items():
        for value in values:
            add(name, word(value), **{name: value})
    for chosen, count in CLUSTERS:
        add("clusters", f"{chosen} of {count}", refresh_clusters=chosen, num_clusters=count)
    for before, after in WINDOWS:
        add("window", f"{before} + {after}", window_before=before, window_after=after)
    for name, pattern in OPENINGS.items():
        add("windowed_openings", name, windowed_openings=pattern)
    return found


GROUPS = ("policies", *FIELDS, "clusters", "window", "windowed_openings")


@click.command()
@common_options
@click.option("--tasks", default=",".join(HARD), show_default=True)
@click.option("--block-length", type=click.IntRange(1), default=8, show_default=True)
@click.option("--groups", default="all", show_default=True, help=f"Of: {', '.join(GROUPS)}.")
def ablations(tasks: str, groups: str, **options: Any) -> None:
    """Effect of each of Polestar's ingredients; same output as `benchmarks.frontier`."""
    chosen = names(groups, GROUPS, "group")
    options |= {"trace": False, "limit": options["limit"] or LIMIT}
    run(
        "ablations", names(tasks, TASKS, "task"), options, False,
        lambda canvas: ablation_settings(canvas, chosen),
    )  # fmt: skip


if __name__ == "__main__":
    run_command(ablations)
