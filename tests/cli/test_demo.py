"""The demo: its questions, and what it prints."""

from benchmarks.tasks import TASKS, Task, held_out_examples, is_held_out
from polestar_jax.cli import demo as module


def words(task: Task, fields) -> str:
    return task.template.format(**fields)


def test_every_question_is_held_out_and_its_answer_is_the_right_one():
    asked = module.questions()
    assert len({q.prompt for q in asked}) == len(asked) == 8
    for question in asked:
        task = TASKS[question.task]
        example = next(e for e in held_out_examples(task, 40) if e.prompt == question.prompt)
        assert is_held_out(question.prompt)
        assert example.answer == question.answer
        assert not task.many_answers
