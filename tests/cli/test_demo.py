"""The demo: its questions, and what it prints."""

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
