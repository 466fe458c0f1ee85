"""Read a directory of ParallelBench files (arXiv 2510.04767): the user's own copy.

The directory holds `<family>.<task>.jsonl` files and `<family>.task_config.yaml` with their prompts
and metrics. Rows are matched to our tasks; the data itself is for measuring only.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from benchmarks.tasks.example import Example, Task
from benchmarks.tasks.lines import LINE_TASKS
from benchmarks.tasks.puzzles import PUZZLE_TASKS
from polestar_jax.errors import PolestarError

# Their file's task name -> ours, where the two differ.
_RENAMED = {"latin_square_n4": "latin", "sudoku_n4_12": "sudoku"}
_OURS = {task.name: task for task in (*LINE_TASKS, *PUZZLE_TASKS)}


def read_directory(folder: str | Path) -> dict[str, list[Example]]:
    """Our task name -> the rows of its file, in file order.

    Each row's `instruction` is ParallelBench's own prompt with one worked example, where the
    configuration asks for one. Raises PolestarError for a missing or empty directory, a file of
    an unknown task, or a row that does not fit its task.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise PolestarError(f"{folder} is not a directory of ParallelBench files")
    files = sorted(folder.glob("*.*.jsonl"))
    if not files:
        raise PolestarError(
            f"{folder} holds no ParallelBench rows; expected files such as waiting_line.copy.jsonl"
        )
    configs: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.task_config.yaml")):
        configs |= _task_config(path)
    found = {}
    for path in files:
        family, theirs = path.name.removesuffix(".jsonl").split(".", 1)
        task = _OURS.get(_RENAMED.get(theirs, theirs))
        config = configs.get(f"{family}/{theirs}")
        if task is None:
            raise PolestarError(f"{path} belongs to no known task; known: {', '.join(_OURS)}")
        if config is None:
            raise PolestarError(f"{folder} has no task_config.yaml entry for {family}/{theirs}")
        if config.get("metric") != task.metric:
            raise PolestarError(
                f"{path}: metric {config.get('metric')!r} is not this task's {task.metric!r}"
            )
        found[task.name] = [
            _row(task, config, line, f"{path}:{number}")
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if line.strip()
        ]
    return found


def _task_config(path: Path) -> dict[str, dict[str, Any]]:
    try:
        value = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise PolestarError(f"{path} cannot be read as YAML: {error!s:.200}") from None
    if not isinstance(value, dict) or not all(isinstance(v, dict) for v in value.values()):
        raise PolestarError(f"{path} holds no entries of tasks; copy it from ParallelBench again")
    return value


def _row(task: Task, config: dict[str, Any], line: str, where: str) -> Example:
    try:
        row = json.loads(line)
        fields = {name: value for name, value in row["input"].items() if name != "icl_examples"}
        truth = row["answer"]
        answer = truth if isinstance(truth, str) else truth["example"]
        prompt = str(config["prompt"]).replace("\\n", "\n")
        shots = row["input"].get("icl_examples", [])[: config.get("icl_example_count", 0)]
        asked = "".join(_shot(prompt, shot) for shot in shots) + prompt.format(**fields)
        return task.example(fields, answer, truth, asked)
    except (KeyError, TypeError, ValueError) as error:
        raise PolestarError(f"{where} is not a row of task {task.name!r}: {error!r}") from None


def _shot(prompt: str, shot: dict[str, Any]) -> str:
    """A worked example: the same prompt with its answer behind it."""
    answer = shot["answer"] if isinstance(shot["answer"], str) else shot["answer"]["example"]
    return f"{prompt.format(**shot['input']).rstrip()}\n{answer}\n\n"
