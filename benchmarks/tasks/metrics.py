"""Marks for answers, equal to ParallelBench's own metrics (arXiv 2510.04767).

Every metric takes the answer's text and the truth and returns 1.0 or 0.0. The default reading is
the benchmark's lenient one, which finds the list or the grid inside surrounding words; `strict`
accepts nothing but the list. Tasks with several right answers accept every one of them.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

Metric = Callable[..., float]


def parse_list(text: str, strict: bool = False) -> list[str] | None:
    """The last bracketed list in `text`; None where a strict reader finds no proper list."""
    if strict and not ("[" in text and "]" in text):
        return None
    inner = text.rsplit("[", 1)[-1].split("]", 1)[0]
    if not strict:
        parts = inner.strip("[]").split(",")
        return [part.strip('" ') for part in parts if part.strip()]
    items = []
    for part in inner.split(", "):
        if not (part.startswith('"') and part.endswith('"')):
            return None
        item = part[1:-1]
        if '"' in item:
            return None
        items.append(item)
    return items


def list_match_score(text: str, truth: str, strict: bool = False) -> float:
    """The list is exactly the expected one."""
    return float(parse_list(text, strict) == parse_list(truth))


def list_shuffle_score(text: str, truth: Mapping[str, Any], strict: bool = False) -> float:
    """The same people in any order but the given one."""
    names = parse_list(text, strict)
    given = list(truth["input"])
    return float(names is not None and sorted(names) == sorted(given) and names != given)


def list_random_insert_score(text: str, truth: Mapping[str, Any], strict: bool = False) -> float:
    """The given list with the new person anywhere in it."""
    names = parse_list(text, strict)
    if names is None or truth["word"] not in names:
        return 0.0
    names.remove(truth["word"])
    return float(names == list(truth["input"]))


def list_random_remove_score(text: str, truth: Mapping[str, Any], strict: bool = False) -> float:
    """The given list without one person, whoever it is."""
    names, given = parse_list(text, strict), list(truth["input"])
    if names is None or len(names) != len(given) - 1:
        return 0.0
    gone = set(given) - set(names)
    if len(gone) != 1:
        return 0.0
    given.remove(gone.pop())
    return float(names == given)


def list_random_replace_score(text: str, truth: Mapping[str, Any], strict: bool = False) -> float:
    """The given list with one person, whoever it is, replaced by the new one."""
    names, given = parse_list(text, strict), list(truth["input"])
    word = truth["word"]
    if names is None or len(names) != len(given) or word not in names:
        return 0.0
    given[names.index(word)] = word
    return float(names == given)


def latin_square_score(text: str, truth: Mapping[str, Any], strict: bool = False) -> float:
    """The first rows that hold every symbol form a square whose columns do too."""
    del strict  # the benchmark has one reading only
    symbols = set(truth["symbols"])
    rows = [[cell.strip() for cell in line.split(",")] for line in text.split("\n")]
    rows = [row for row in rows if set(row) == symbols][: len(symbols)]
    columns = list(zip(*rows))
    return float(len(rows) == len(symbols) and all(set(column) == symbols for column in columns))


def parse_grid(text: str, strict: bool = False) -> list[list[int]] | None:
    """Four rows of four digits, or None."""
    lines = [line.strip() for line in text.strip().split("\n") if line.strip()]
    if strict:
        rows = [[int(c) for c in line] for line in lines if re.fullmatch("[0-9]{4}", line)]
        return rows if len(rows) == len(lines) == 4 else None
    rows = [[int(c) for c in re.findall(r"[0-9]", line)] for line in lines]
    rows = [row for row in rows if len(row) == 4]
    return rows if len(rows) == 4 else None


def sudoku_score(text: str, truth: str, strict: bool = False) -> float:
    """The grid is the solution."""
    return float(parse_grid(text, strict) == parse_grid(truth, strict=True))


def math_op_score(text: str, truth: str, strict: bool = False) -> float:
    """The number is in the answer; a strict reader wants the answer to be the number."""
    text = text.replace(",", "").strip()
    return float(text == str(int(truth))) if strict else float(str(int(truth)) in text)


METRICS: dict[str, Metric] = {
    metric.__name__: metric
    for metric in (
        list_match_score,
        list_shuffle_score,
        list_random_insert_score,
        list_random_remove_score,
        list_random_replace_score,
        latin_square_score,
        sudoku_score,
        math_op_score,
    )
}
