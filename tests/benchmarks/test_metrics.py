"""The metrics are ParallelBench's own: hand-written right, wrong and borderline answers."""

import pytest

from benchmarks.tasks.metrics import METRICS, parse_grid, parse_list

LINE = ["Ann Lee", "Bob Ray", "Cy Poe"]
TEXT = '["Ann Lee", "Bob Ray", "Cy Poe"]'
INSERT = {"input": LINE, "word": "New One"}


@pytest.mark.parametrize(
    ("metric", "text", "truth", "lenient", "strict"),
    [
        ("list_match_score", TEXT, TEXT, 1, 1),
        ("list_match_score", f"Sure: {TEXT}.", TEXT, 1, 1),
        ("list_match_score", "Ann Lee, Bob Ray, Cy Poe", TEXT, 1, 0),
        ("list_match_score", '["Ann Lee", "Bob Ray"]', TEXT, 0, 0),
        ("list_match_score", '["Bob Ray", "Ann Lee", "Cy Poe"]', TEXT, 0, 0),
        ("list_match_score", f'["x"] then {TEXT}', TEXT, 1, 1),
        ("list_shuffle_score", '["Bob Ray", "Ann Lee", "Cy Poe"]', {"input": LINE}, 1, 1),
        ("list_shuffle_score", TEXT, {"input": LINE}, 0, 0),
        ("list_shuffle_score", '["Bob Ray", "Bob Ray", "Cy Poe"]', {"input": LINE}, 0, 0),
        (
            "list_random_insert_score",
            '["Ann Lee", "New One", "Bob Ray", "Cy Poe"]',
            INSERT,
            1,
            1,
        ),
        ("list_random_insert_score", TEXT, INSERT, 0, 0),
        (
            "list_random_insert_score",
            '["New One", "Ann Lee", "New One", "Bob Ray", "Cy Poe"]',
            INSERT,
            0,
            0,
        ),
        ("list_random_remove_score", '["Ann Lee", "Cy Poe"]', {"input": LINE}, 1, 1),
        ("list_random_remove_score", '["Cy Poe", "Ann Lee"]', {"input": LINE}, 0, 0),
        ("list_random_remove_score", TEXT, {"input": LINE}, 0, 0),
        ("list_random_remove_score", '["Ann Lee", "Ann Lee"]', {"input": LINE}, 0, 0),
        ("list_random_replace_score", '["Ann Lee", "New One", "Cy Poe"]', INSERT, 1, 1),
        ("list_random_replace_score", '["New One", "New One", "Cy Poe"]', INSERT, 0, 0),
        ("list_random_replace_score", TEXT, INSERT, 0, 0),
        ("latin_square_score", "A,B\nB,A", {"symbols": ["A", "B"]}, 1, 1),
        ("latin_square_score", "here:\nA, B\nB, A\n", {"symbols": ["A", "B"]}, 1, 1),
        ("latin_square_score", "A,B\nA,B", {"symbols": ["A", "B"]}, 0, 0),
        ("latin_square_score", "A,B", {"symbols": ["A", "B"]}, 0, 0),
        ("sudoku_score", "1 2 3 4\n3412\n2143\n4321", "1234\n3412\n2143\n4321", 1, 0),
        ("sudoku_score", "1234\n3412\n2143\n4312", "1234\n3412\n2143\n4321", 0, 0),
        ("math_op_score", "= 816", "816", 1, 0),
        ("math_op_score", "816", "816", 1, 1),
        ("math_op_score", "815", "816", 0, 0),
    ],
)
def test_metric_accepts_every_right_answer_and_no_other(metric, text, truth, lenient, strict):
    assert METRICS[metric](text, truth) == lenient
    assert METRICS[metric](text, truth, strict=True) == strict


@pytest.mark.parametrize("text", ["", "[", "]", "[]", "][", '["', "\n\n", "12345", ",,,", "١٢٣٤"])
def test_degenerate_answers_are_marked_wrong_without_an_exception(text):
    truths = {"latin_square_score": {"symbols": ["A", "B"]}, "math_op_score": "77"}
    truths |= {"sudoku_score": "1234\n3412\n2143\n4321", "list_match_score": TEXT}
    for name, metric in METRICS.items():
        for strict in (False, True):
            assert metric(text, truths.get(name, INSERT), strict=strict) == 0.0, name


def test_strict_readers_refuse_what_lenient_ones_repair():
    assert parse_list("[Ann Lee, Bob]") == ["Ann Lee", "Bob"]
    assert parse_list("[Ann Lee, Bob]", strict=True) is None
    assert parse_grid("1,2,3,4\n3412\n2143\n4321") is not None
    assert parse_grid("1,2,3,4\n3412\n2143\n4321", strict=True) is None
