"""Tasks with a known right answer: waiting lines, Latin squares, Sudokus, sums."""

from benchmarks.tasks.example import Example, Task
from benchmarks.tasks.lines import LINE_TASKS
from benchmarks.tasks.puzzles import PUZZLE_TASKS
from benchmarks.tasks.split import held_out_examples, is_held_out, training_example
from polestar_jax.errors import PolestarError

TASKS: dict[str, Task] = {task.name: task for task in (*LINE_TASKS, *PUZZLE_TASKS)}


def get_task(name: str) -> Task:
    """The task of this name."""
    if name not in TASKS:
        raise PolestarError(f"unknown task {name!r}; known: {', '.join(TASKS)}")
    return TASKS[name]


__all__ = [
    "TASKS",
    "Example",
    "Task",
    "get_task",
    "held_out_examples",
    "is_held_out",
    "training_example",
]
