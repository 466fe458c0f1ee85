"""Questions for `polestar-jax demo`, made from held-out rows.

python -m benchmarks.embedded.demo_rows > polestar_jax/assets/demo.jsonl
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.tasks import get_task, held_out_examples

_ASKS: dict[str, Callable[[Any], str]] = {
    "copy": lambda f: "Repeat the line of people.",
    "reverse": lambda f: "Reverse the line.",
    "sort": lambda f: "Sort the line by name.",
    "insert_index": lambda f: f"Insert {f['word']} at position {f['index']} (counting from 0).",
    "remove_index": lambda f: f"Remove the person at position {f['index']} (counting from 0).",
    "replace_index": lambda f: (
        f"Put {f['word']} in the place of the person at position {f['index']} (counting from 0)."
    ),
    "sudoku": lambda f: "Solve the 4 x 4 Sudoku (0 is an empty cell).",
    "add": lambda f: "Add the two numbers.",
}

# Task -> how many questions.
QUICK = {"reverse": 1, "sort": 1, "insert_index": 1, "replace_index": 1, "sudoku": 1}


def demo_rows(counts: dict[str, int]) -> Iterator[dict[str, str]]:
    """Rows with exactly one right answer each, and the question in words."""
    for name, count in counts.items():
        for row in held_out_examples(get_task(name), count):
            yield {
                "task": name,
                "asks": _ASKS[name](row.fields),
                "prompt": row.prompt,
                "answer": row.answer,
            }


if __name__ == "__main__":
    for row in demo_rows(QUICK):
        print(json.dumps(row))
