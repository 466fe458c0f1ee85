"""Reading prompts: every source, ids kept, every bad row named by its line."""

import pytest

from polestar_jax.cli.prompts import Prompt, read_prompts
from polestar_jax.errors import PolestarError


def jsonl(tmp_path, text):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    return read_prompts(None, None, path)


def test_an_argument_is_one_prompt():
    assert read_prompts("hello", None, None) == [Prompt(0, "hello")]


def test_a_text_file_is_one_prompt_with_its_line_breaks(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("first\nsecond\n")
    assert read_prompts(None, path, None) == [Prompt(0, "first\nsecond\n")]


def test_a_list_in_plain_text_has_one_prompt_per_line_and_skips_empty_ones(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("eins\r\n\nzwei mit \u2028 darin\n".encode())
    assert read_prompts(None, None, path) == [Prompt(0, "eins"), Prompt(1, "zwei mit \u2028 darin")]


def test_jsonl_keeps_ids_of_both_kinds_and_numbers_rows_without(tmp_path):
    rows = '{"id": "a", "prompt": "x"}\n\n{"prompt": "y", "more": 1}\n{"id": 7, "prompt": [3, 4]}\n'
    assert jsonl(tmp_path, rows) == [Prompt("a", "x"), Prompt(1, "y"), Prompt(7, (3, 4))]


def test_a_byte_order_mark_is_no_part_of_the_prompt(tmp_path):
    assert jsonl(tmp_path, '\ufeff{"prompt": "x"}') == [Prompt(0, "x")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ("\n  \n", "holds no prompt"),
        ('{"prompt": "x"}\n{"prompt": ', "line 2 .* is not valid JSON"),
        ('["x"]', 'line 1 .* must be an object with the field "prompt"'),
        ('{"text": "x"}', 'line 1 .* must be an object with the field "prompt"'),
        ('{"prompt": 3}', "prompt in line 1 .* must be text or a list of token ids, got 3"),
        ('{"prompt": [1, true]}', "must be text or a list of token ids"),
        ('{"prompt": "x", "id": 1.5}', "the id in line 1 .* got 1.5"),
        ('{"prompt": "x", "id": true}', "the id in line 1 .* got True"),
        ('{"prompt": "x", "id": 1}\n\n{"prompt": "y", "id": 1}', "lines 1 and 3 .* share the id 1"),
        ('{"prompt": "x", "id": 1}\n{"prompt": "y"}', "lines 1 and 2 .* share the id 1"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path, text, message):
    with pytest.raises(PolestarError, match=message):
        jsonl(tmp_path, text)


def test_a_file_that_is_missing_or_not_text_is_one_sentence(tmp_path):
    with pytest.raises(PolestarError, match="cannot read .*nowhere: No such file"):
        read_prompts(None, tmp_path / "nowhere", None)
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(PolestarError, match=r"not UTF-8 text \(byte 3\)"):
        read_prompts(None, tmp_path / "latin", None)


def test_no_source_and_two_sources_are_refused(tmp_path):
    for sources in [(None, None, None), ("x", tmp_path, None)]:
        with pytest.raises(PolestarError, match="one source of prompts"):
            read_prompts(*sources)
