"""Generators, split and the reading of ParallelBench directories."""

import dataclasses
import itertools
import json
import random

import numpy as np
import pytest

from benchmarks.tasks import TASKS, get_task, held_out_examples, is_held_out, training_example
from benchmarks.tasks.parallelbench import read_directory
from benchmarks.tasks.puzzles import latin_squares, sudoku_grids
from polestar_jax.errors import PolestarError


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_generated_answer_is_right_and_a_foreign_one_is_not(task):
    rng = random.Random(1)
    rows = [task.generate(rng) for _ in range(60)]
    assert all(task.score(row, row.answer, strict=True) == 1.0 for row in rows)
    assert sum(task.score(row, other.answer) for row, other in itertools.pairwise(rows)) <= 1
    assert all(row.prompt.startswith(task.name) and row.instruction for row in rows)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_training_rows_are_never_held_out_and_held_out_rows_always_are(task):
    rng = random.Random(2)
    training = {training_example(task, rng).prompt for _ in range(200)}
    assert not any(map(is_held_out, training))
    held = [row.prompt for row in held_out_examples(task, 20)]
    assert all(map(is_held_out, held))
    assert len(set(held)) == 20
    assert held == [row.prompt for row in held_out_examples(task, 20)]


def test_excluded_prompts_are_not_drawn_for_training():
    task = get_task("add")
    first = training_example(task, random.Random(3))
    again = training_example(task, random.Random(3), excluded=frozenset([first.prompt]))
    assert again.prompt != first.prompt


def test_more_held_out_rows_than_a_task_has_are_refused_at_once():
    few = dataclasses.replace(
        get_task("add"), build=lambda rng: ({"a": rng.randrange(9), "b": 1}, "", "")
    )
    with pytest.raises(PolestarError, match=r"task 'add' has little more than \d+ held-out rows"):
        held_out_examples(few, 9)


def test_one_prompt_in_twenty_is_held_out():
    share = np.mean([is_held_out(f"prompt {i}") for i in range(20_000)])
    assert abs(share - 0.05) < 0.005


def test_every_choice_of_a_random_task_occurs_equally_often():
    task, rng = get_task("remove_random"), random.Random(4)
    gone = []
    for _ in range(1200):
        row = task.generate(rng)
        line, answer = row.truth["input"], json.loads(row.answer)
        if len(line) == 3:
            gone.append(next(i for i, person in enumerate(line) if person not in answer))
    assert np.all(np.abs(np.bincount(gone) / len(gone) - 1 / 3) < 0.1)


def test_puzzle_tables_are_complete():
    assert len(np.unique(latin_squares().reshape(576, 16), axis=0)) == 576
    grids = sudoku_grids().reshape(-1, 4, 4)
    assert len(grids) == 288
    for part in (grids, grids.transpose(0, 2, 1), grids[:, :2, :2].reshape(-1, 1, 4)):
        assert (np.sort(part, axis=-1) == [1, 2, 3, 4]).all()


def test_sudokus_have_one_solution():
    rng = random.Random(5)
    grids = sudoku_grids()
    for _ in range(50):
        row = get_task("sudoku").generate(rng)
        cells = np.array([int(c) for c in row.fields["sudoku"].replace("\n", "")])
        assert (cells == 0).sum() == 4
        assert (grids[:, cells > 0] == cells[cells > 0]).all(axis=1).sum() == 1


def test_unknown_task_is_named_with_the_known_ones():
    with pytest.raises(PolestarError, match="unknown task 'sorting'; known: copy, reverse"):
        get_task("sorting")


CONFIG = """
waiting_line/insert_random:
  icl_example_count: 1
  metric: list_random_insert_score
  prompt: 'Insert "{word}" anywhere into {context}. '
"""
ROW = {
    "input": {
        "context": '["Ann Lee", "Bob Ray"]',
        "word": "Cy Poe",
        "icl_examples": [
            {
                "input": {"context": '["Dee Fox"]', "word": "Al Day"},
                "answer": {"input": ["Dee Fox"], "word": "Al Day", "example": '["Al Day", "..."]'},
            }
        ],
    },
    "answer": {
        "input": ["Ann Lee", "Bob Ray"],
        "word": "Cy Poe",
        "example": '["Cy Poe", "Ann Lee", "Bob Ray"]',
    },
}


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "waiting_line.task_config.yaml").write_text(CONFIG)
    (tmp_path / "waiting_line.insert_random.jsonl").write_text(json.dumps(ROW) + "\n")
    return tmp_path


def test_parallelbench_row_becomes_compact_prompt_instruction_and_truth(directory):
    (row,) = read_directory(directory)["insert_random"]
    assert row.prompt == 'insert_random "Cy Poe" ["Ann Lee", "Bob Ray"]'
    assert row.instruction == (
        'Insert "Al Day" anywhere into ["Dee Fox"].\n["Al Day", "..."]\n\n'
        'Insert "Cy Poe" anywhere into ["Ann Lee", "Bob Ray"]. '
    )
    task = get_task("insert_random")
    assert task.score(row, '["Ann Lee", "Bob Ray", "Cy Poe"]') == 1.0
    assert task.score(row, '["Ann Lee", "Bob Ray"]') == 0.0


def test_missing_directory_is_a_clear_error(tmp_path):
    with pytest.raises(PolestarError, match="is not a directory of ParallelBench files"):
        read_directory(tmp_path / "absent")


def test_empty_directory_is_a_clear_error(tmp_path):
    with pytest.raises(PolestarError, match="holds no ParallelBench rows"):
        read_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("waiting_line.insert_random.jsonl", "{", "insert_random.jsonl:1 is not a row of task"),
        ("waiting_line.insert_random.jsonl", '{"input": {}}', "is not a row of task"),
        ("waiting_line.dance.jsonl", "{}", "belongs to no known task"),
        ("waiting_line.copy.jsonl", "{}", "no task_config.yaml entry for waiting_line/copy"),
        ("waiting_line.task_config.yaml", CONFIG.replace("insert_score", "x"), "metric 'list_ran"),
        ("waiting_line.task_config.yaml", "", "holds no entries of tasks"),
        ("waiting_line.task_config.yaml", "a: [", "cannot be read as YAML"),
        ("waiting_line.task_config.yaml", CONFIG.replace("metric", "m"), "metric None is not"),
    ],
)
def test_unfit_file_is_named(directory, name, content, message):
    (directory / name).write_text(content)
    with pytest.raises(PolestarError, match=message):
        read_directory(directory)
