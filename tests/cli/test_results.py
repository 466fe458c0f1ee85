"""The output file: complete rows are kept, torn ones cut, foreign ones refused."""

import errno
import json
import os

import pytest

from polestar_jax.cli import results as module
from polestar_jax.cli.prompts import Prompt
from polestar_jax.cli.results import open_results
from polestar_jax.errors import PolestarError

PROMPTS = [Prompt("a", "x"), Prompt(1, (3, 4)), Prompt("ü", "z")]
SETTINGS = {"seed": None, "gen_length": 8}


def row(index, **changes):
    prompt = PROMPTS[index]
    content = prompt.content if isinstance(prompt.content, str) else list(prompt.content)
    return {"id": prompt.id, "prompt": content, "settings": SETTINGS} | changes


def encode(*rows):
    return b"".join(json.dumps(r, ensure_ascii=False).encode() + b"\n" for r in rows)


def resume(path, overwrite=False):
    with open_results(path, PROMPTS, SETTINGS, overwrite) as output:
        output.write([row(i) for i, p in enumerate(PROMPTS) if p.id not in output.finished])
        return output.finished


def test_a_run_killed_after_any_byte_resumes_to_the_same_file(tmp_path):
    path, whole = tmp_path / "out.jsonl", encode(*map(row, range(3)))
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        finished = resume(path)
        assert path.read_bytes() == whole
        assert len(finished) == whole[:cut].count(b"\n")


def test_overwrite_drops_what_the_file_held(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"something else\n")
    assert resume(path, overwrite=True) == set()
    assert path.read_bytes() == encode(*map(row, range(3)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"notes\n", "line 1 .* is not a result row"),
        (b'{"id": "a"}\n', "line 1 .* is not a result row"),
        (b"\n", "line 1 .* is not a result row"),
        (encode(row(0), row(0)), "line 2 .* repeats the id 'a'"),
        (encode(row(0, id="other")), "line 1 .* has the id 'other', not among the prompts"),
        (encode(row(0, prompt="y")), "line 1 .*, id 'a', answers another prompt"),
        (encode(row(0, settings={"seed": 1})), "line 1 .* was made with seed 1, now None"),
        (encode(row(0, settings={})), "line 1 .* was made with gen_length None, now 8"),
    ],
)
def test_a_file_of_other_rows_is_refused_and_left_as_it_was(tmp_path, data, message):
    path = tmp_path / "out.jsonl"
    path.write_bytes(data)
    with pytest.raises(PolestarError, match=message):
        resume(path)
    assert path.read_bytes() == data


def test_a_full_disk_leaves_the_rows_before_and_no_torn_one(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    with open_results(path, PROMPTS, SETTINGS, False) as output:
        output.write([row(0)])

        def full(descriptor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(module.os, "fsync", full)
        with pytest.raises(PolestarError, match="cannot write .*out.jsonl: No space left"):
            output.write([row(1)])
    monkeypatch.undo()
    assert path.read_bytes() == encode(row(0))
    assert resume(path) == {"a"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_device_without_space_is_one_sentence():
    with (
        pytest.raises(PolestarError, match="cannot write /dev/full: No space left"),
        open_results(module.Path("/dev/full"), PROMPTS, SETTINGS, False) as output,
    ):
        output.write([row(0)])


def test_two_runs_into_one_file_are_noticed(tmp_path):
    path = tmp_path / "out.jsonl"
    with (
        open_results(path, PROMPTS, SETTINGS, False),
        pytest.raises(PolestarError, match="another run is writing"),
    ):
        resume(path)


def test_a_missing_folder_is_one_sentence(tmp_path):
    with pytest.raises(PolestarError, match="cannot write .*: No such file or directory"):
        resume(tmp_path / "missing" / "out.jsonl")
