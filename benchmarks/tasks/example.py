"""What a task is and what one of its rows holds."""

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.tasks.metrics import METRICS


@dataclasses.dataclass(frozen=True)
class Example:
    """One row.

    prompt: the compact prompt of the embedded model, e.g. `copy ["A B", "C D"]`.
    answer: one right answer; where several are right, a random one.
    fields: the parts of the prompt by name (`context`, `word`, `index`, ...).
    truth: what the metric compares with.
    instruction: the same question in a sentence, for a general model's chat template.
    """

    task: str
    prompt: str
    answer: str
    fields: Mapping[str, Any]
    truth: Any
    instruction: str


@dataclasses.dataclass(frozen=True)
class Task:
    """One family of rows.

    build: random generator -> (fields, answer, truth).
    compact: fields -> the part of the compact prompt behind the task's name.
    many_answers: whether several answers are right.
    """

    name: str
    metric: str
    build: Callable[[random.Random], tuple[dict[str, Any], str, Any]]
    compact: Callable[[Mapping[str, Any]], str]
    template: str
    many_answers: bool = False

    def prompt(self, fields: Mapping[str, Any]) -> str:
        """The compact prompt of a row with these fields."""
        return f"{self.name}{self.compact(fields)}"

    def example(
        self, fields: Mapping[str, Any], answer: str, truth: Any, instruction: str | None = None
    ) -> Example:
        text = self.template.format(**fields) if instruction is None else instruction
        return Example(self.name, self.prompt(fields), answer, fields, truth, text)

    def generate(self, rng: random.Random) -> Example:
        """A random row of either split; `benchmarks.tasks.split` keeps the splits apart."""
        return self.example(*self.build(rng))

    def score(self, example: Example, text: str, strict: bool = False) -> float:
        """1.0 where `text` is a right answer, else 0.0."""
        return METRICS[self.metric](text, example.truth, strict)
