"""The ten operations on a waiting line of three to six people, as ParallelBench defines them.

Positions count from 0. The `_random` tasks and `shuffle` have several right answers; the generated
answer is one of them: of all where a person may be chosen, of a family for `shuffle`.
"""

import json
import random
from collections.abc import Mapping
from typing import Any

from benchmarks.tasks.example import Task
from benchmarks.tasks.names import FIRST_NAMES, LAST_NAMES

Built = tuple[dict[str, Any], str, Any]
SHORTEST, LONGEST = 3, 6


def people(rng: random.Random, count: int) -> list[str]:
    """`count` people, no two with the same first or last name, as in the benchmark's lines."""
    first, last = rng.sample(FIRST_NAMES, count), rng.sample(LAST_NAMES, count)
    return [f"{one} {other}" for one, other in zip(first, last)]


def _newcomer(rng: random.Random, line: list[str]) -> str:
    """Someone who does not stand in the line yet; either name may occur in it."""
    while True:
        (person,) = people(rng, 1)
        if person not in line:
            return person


def _line(rng: random.Random) -> list[str]:
    return people(rng, rng.randint(SHORTEST, LONGEST))


def _copy(rng: random.Random) -> Built:
    line = json.dumps(_line(rng))
    return {"context": line}, line, line


def _reverse(rng: random.Random) -> Built:
    line = _line(rng)
    answer = json.dumps(line[::-1])
    return {"context": json.dumps(line)}, answer, answer


def _sort(rng: random.Random) -> Built:
    """By the whole name, hence by first name: no two agree in it, so that the order is unique.

    ParallelBench's question says "by last name", its labels are in this order; labels decide.
    """
    line = _line(rng)
    answer = json.dumps(sorted(line))
    return {"context": json.dumps(line)}, answer, answer


def _shuffle(rng: random.Random) -> Built:
    """The answer is the line closed to a circle and read from anywhere in either direction.

    These are 2n - 1 of the n! - 1 right answers (the metric accepts them all): few enough for a
    small model to learn which people go together, enough for a parallel decoder to mix them up.
    """
    line = _line(rng)
    other = line
    while other == line:
        start = rng.randrange(len(line))
        other = [*line[start:], *line[:start]][:: rng.choice((1, -1))]
    return {"context": json.dumps(line)}, json.dumps(other), {"input": line}


def _insert(rng: random.Random, free: bool) -> Built:
    line = _line(rng)
    word = _newcomer(rng, line)
    index = rng.randint(0, len(line))
    answer = json.dumps([*line[:index], word, *line[index:]])
    return _edited(line, answer, index, free, word)


def _remove(rng: random.Random, free: bool) -> Built:
    line = _line(rng)
    index = rng.randrange(len(line))
    answer = json.dumps([*line[:index], *line[index + 1 :]])
    return _edited(line, answer, index, free, None)


def _replace(rng: random.Random, free: bool) -> Built:
    line = _line(rng)
    word = _newcomer(rng, line)
    index = rng.randrange(len(line))
    answer = json.dumps([*line[:index], word, *line[index + 1 :]])
    return _edited(line, answer, index, free, word)


def _edited(line: list[str], answer: str, index: int, free: bool, word: str | None) -> Built:
    fields: dict[str, Any] = {"context": json.dumps(line)}
    truth: dict[str, Any] = {"input": line}
    if word is not None:
        fields["word"] = truth["word"] = word
    if free:
        return fields, answer, truth
    return fields | {"index": index}, answer, answer


def _compact(fields: Mapping[str, Any]) -> str:
    """` [index] ["word"] list`, each part where the task has it."""
    index = f" {fields['index']}" if "index" in fields else ""
    word = f' "{fields["word"]}"' if "word" in fields else ""
    return f"{index}{word} {fields['context']}"


_ONLY = " Answer with the resulting list only, in the same notation."
_QUEUE = "These people stand in a queue, first to last: {context}"

_SORT = "Order them alphabetically by first name."
_SHUFFLE = "Put them into a random order, different from the given one."
_INSERT = '"{word}" joins the queue and takes position {index}, counting from 0.'
_INSERT_RANDOM = '"{word}" joins the queue at a position of your choice.'
_REMOVE = "The person at position {index}, counting from 0, leaves."
_REMOVE_RANDOM = "One person of your choice leaves."
_REPLACE = '"{word}" takes the place of the person at position {index}, counting from 0.'
_REPLACE_RANDOM = '"{word}" takes the place of one person of your choice.'


def _task(name: str, metric: str, build: Any, sentence: str, many: bool = False) -> Task:
    return Task(name, metric, build, _compact, f"{_QUEUE}\n{sentence}{_ONLY}", many)


LINE_TASKS = (
    _task("copy", "list_match_score", _copy, "Repeat the queue as it stands."),
    _task("reverse", "list_match_score", _reverse, "Reverse the order of the queue."),
    _task("sort", "list_match_score", _sort, _SORT),
    _task("shuffle", "list_shuffle_score", _shuffle, _SHUFFLE, True),
    _task("insert_index", "list_match_score", lambda r: _insert(r, False), _INSERT),
    _task(
        "insert_random",
        "list_random_insert_score",
        lambda r: _insert(r, True),
        _INSERT_RANDOM,
        True,
    ),
    _task("remove_index", "list_match_score", lambda r: _remove(r, False), _REMOVE),
    _task(
        "remove_random",
        "list_random_remove_score",
        lambda r: _remove(r, True),
        _REMOVE_RANDOM,
        True,
    ),
    _task("replace_index", "list_match_score", lambda r: _replace(r, False), _REPLACE),
    _task(
        "replace_random",
        "list_random_replace_score",
        lambda r: _replace(r, True),
        _REPLACE_RANDOM,
        True,
    ),
)
