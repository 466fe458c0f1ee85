"""The demo: its questions, and what it prints."""

import importlib.resources
import re
import shutil
from pathlib import Path

import pytest

import polestar_jax
from benchmarks.embedded.demo_rows import QUICK, demo_rows
from benchmarks.tasks import TASKS, is_held_out
from polestar_jax.cli import demo as module


def test_every_question_is_held_out_and_has_one_right_answer():
    asked = module.questions()
    assert len({q.prompt for q in asked}) == len(asked) > 0
    for question in asked:
        assert is_held_out(question.prompt)
        assert not TASKS[question.task].many_answers


def test_the_questions_are_those_the_generator_makes():
    made = [module.Question(**row) for row in demo_rows(QUICK)]
    assert module.questions() == made


def replies_of(text, policy):
    """(right or wrong, NFE) of every answer that the output shows for a policy."""
    return re.findall(rf"^   {policy} +(right|wrong) +NFE +(\d+) ", text, re.MULTILINE)


def row_of(text, policy):
    """The policy's line of the closing table, split into columns."""
    return re.findall(rf"^{policy} .*$", text, re.MULTILINE)[-1].split()


def test_the_table_sums_up_the_answers_shown(run):
    text = run("demo", "--policy", "parallel").stdout
    shown = replies_of(text, "parallel")
    right, nfe = row_of(text, "parallel")[1:3]
    assert len(shown) == len(module.questions())
    assert right == f"{sum(mark == 'right' for mark, _ in shown)}/{len(shown)}"
    assert int(nfe) == sum(int(passes) for _, passes in shown)


def test_no_time_shown_is_that_of_a_first_run(run, monkeypatch):
    """Every question is answered unseen, by every policy, before the first one that is timed."""
    given, answered = module.answer, []

    def answer(model, question, config):
        answered.append(question.prompt)
        return given(model, question, config)

    monkeypatch.setattr(module, "answer", answer)
    run("demo", "--policy", "parallel")
    prompts = [question.prompt for question in module.questions()]
    assert answered == prompts * 2


def test_an_answer_is_right_exactly_when_it_is_the_expected_text(run, monkeypatch):
    """Questions whose expected answers are what the model says, but for the last."""
    text = run("demo", "--policy", "parallel").stdout
    said = re.findall(r"^     -> (.*(?:\n {8}.*)*)$", text, re.MULTILINE)
    expected = [re.sub(r"\n {8}", "\n", answer) for answer in said]
    expected[-1] += "!"
    asked = [
        module.Question(q.task, q.asks, q.prompt, answer)
        for q, answer in zip(module.questions(), expected, strict=True)
    ]
    monkeypatch.setattr(module, "questions", lambda: asked)
    marks = [mark for mark, _ in replies_of(run("demo", "--policy", "parallel").stdout, "parallel")]
    assert marks == ["right"] * (len(asked) - 1) + ["wrong"]


@pytest.mark.slow
def test_both_default_policies_answer_and_the_second_needs_fewer_passes(run):
    text = run("demo").stdout
    rows = [row_of(text, policy) for policy in module.DEFAULT_POLICIES]
    for row in rows:
        right, asked = map(int, row[1].split("/"))
        assert right > asked / 2
    assert int(rows[1][2]) < int(rows[0][2]) / 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", None, "embedded has no weights"),
        ("model.safetensors", b"\x00" * 40, "model.safetensors"),
        ("config.json", None, "config.json"),
        ("tokenizer.json", b"{", "the tokenizer in"),
        ("tokenizer.json", None, "has no tokenizer"),
    ],
)
def test_missing_and_damaged_files_of_the_embedded_model_are_named(
    run, tmp_path, monkeypatch, name, content, message
):
    assets = Path(polestar_jax.__file__).parent / "assets"
    shutil.copytree(assets, tmp_path / "assets")
    damaged = tmp_path / "assets" / "embedded" / name
    damaged.unlink() if content is None else damaged.write_bytes(content)
    monkeypatch.setattr(importlib.resources, "files", lambda _: tmp_path)
    result = run("demo", "--policy", "parallel")
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.strip().count("\n") == 0
