"""Latin squares, Sudokus of 4 x 4, and addition with carries."""

import functools
import itertools
import random
import string
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.tasks.example import Task
from benchmarks.tasks.lines import Built

SIZE = 4
SYMBOLS = string.ascii_uppercase + string.digits
BLANKS = 4


@functools.cache
def latin_squares() -> np.ndarray:
    """All 576 Latin squares of order 4, int8 [576, 4, 4] with values 0..3."""
    rows = list(itertools.permutations(range(SIZE)))
    squares = [
        square
        for square in itertools.product(rows, repeat=SIZE)
        if all(len(set(column)) == SIZE for column in zip(*square))
    ]
    return np.array(squares, np.int8)


@functools.cache
def sudoku_grids() -> np.ndarray:
    """All 288 solved grids, int8 [288, 16] with values 1..4: the squares whose boxes are full."""
    squares = latin_squares()
    boxes = squares.reshape(-1, 2, 2, 2, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 4, 4)
    full = (np.sort(boxes, axis=-1) == np.arange(SIZE)).all(axis=(1, 2))
    return squares[full].reshape(-1, SIZE * SIZE) + np.int8(1)


def _latin(rng: random.Random) -> Built:
    """The answer's rows and columns walk round the symbols, one step left or right at a time.

    These are 16 of the 576 right answers (the metric accepts them all): from two cells the others
    follow, so that a small model can learn to be consistent, but a decoder that commits several
    cells at once mixes squares.
    """
    symbols = rng.sample(SYMBOLS, SIZE)
    start, right, down = rng.randrange(SIZE), rng.choice((1, -1)), rng.choice((1, -1))
    square = [
        [symbols[(start + right * column + down * row) % SIZE] for column in range(SIZE)]
        for row in range(SIZE)
    ]
    answer = "\n".join(",".join(row) for row in square)
    fields = {"size": SIZE, "symbols": f"[{', '.join(symbols)}]"}
    return fields, answer, {"symbols": symbols}


def _sudoku(rng: random.Random) -> Built:
    """A grid with `BLANKS` zeros that has one solution only."""
    grids = sudoku_grids()
    while True:
        solution = grids[rng.randrange(len(grids))]
        clues = np.ones(SIZE * SIZE, bool)
        clues[rng.sample(range(SIZE * SIZE), BLANKS)] = False
        if (grids[:, clues] == solution[clues]).all(axis=1).sum() == 1:
            answer = _grid(solution)
            return {"sudoku": _grid(np.where(clues, solution, 0))}, answer, answer


def _grid(cells: np.ndarray) -> str:
    digits = "".join(map(str, cells))
    return "\n".join(digits[start : start + SIZE] for start in range(0, SIZE * SIZE, SIZE))


def _add(rng: random.Random) -> Built:
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    return {"a": a, "b": b}, str(a + b), str(a + b)


def _compact_sum(fields: Mapping[str, Any]) -> str:
    return f" {fields['a']} + {fields['b']}"


PUZZLE_TASKS = (
    Task(
        "latin",
        "latin_square_score",
        _latin,
        lambda fields: f" {fields['symbols']}",
        "Write a Latin square of size {size} over the symbols {symbols}, as comma-separated rows "
        "and nothing else.",
        many_answers=True,
    ),
    Task(
        "sudoku",
        "sudoku_score",
        _sudoku,
        lambda fields: f"\n{fields['sudoku']}",
        "Replace each 0 in this 4x4 grid by a digit from 1 to 4 so that no row, no column and no "
        "2x2 quarter holds a digit twice. Answer with the grid only.\n{sudoku}",
    ),
    Task("add", "math_op_score", _add, _compact_sum, "What is {a} + {b}? Only the number."),
)
