"""`generate`: rows, ids, batches, resuming, interruption; the model is tiny and random."""

import json

import jax
import pytest

import polestar_jax as pj
from polestar_jax.cli import job

FAST = ("--policy", "parallel", "--gen-length", 16, "--block-length", 8, "--threshold", 0.08)
SAMPLED = (*FAST, "--temperature", 0.7)


@pytest.fixture
def prompts_file(tmp_path):
    rows = [
        {"id": "a", "prompt": "w3 w4 w5"},
        {"id": 7, "prompt": "w6"},
        {"id": "ü", "prompt": [9, 10, 11, 12]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(text):
    return [json.loads(line) for line in text.splitlines()]


def essence(rows):
    return [(row["id"], row["prompt"], row["tokens"], row["nfe"], row["text"]) for row in rows]


def test_a_row_says_what_decode_says(run, model):
    result = run("generate", model, "w3 w4 w5", *FAST)
    (row,) = rows_of(result.stdout)
    config = pj.preset("parallel", gen_length=16, block_length=8, threshold=0.08)
    expected = pj.decode(pj.load(model), "w3 w4 w5", config)
    assert (row["id"], row["prompt"]) == (0, "w3 w4 w5")
    assert row["tokens"] == expected.tokens[0].tolist()
    assert row["text"] == expected.text[0]
    assert row["nfe"] == expected.nfe[0] < 16
    assert row["answer_tokens"] == expected.stats.generated[0]
    assert row["tokens_per_forward"] == pytest.approx(row["answer_tokens"] / row["nfe"], abs=1e-4)
    speed = row["answer_tokens"] / row["seconds"]
    assert row["tokens_per_second"] == pytest.approx(speed, rel=0.01)
    assert row["stats"]["passes"]["full"] == row["nfe"]
    assert row["settings"]["commit"] == repr(config.commit)


def test_compilation_is_not_in_the_speed(run, model):
    jax.clear_caches()
    slow, fast = (rows_of(run("generate", model, "w3 w4", *FAST).stdout)[0] for _ in range(2))
    assert slow["compile_seconds"] > 0.1
    assert fast["compile_seconds"] < 0.1 * slow["compile_seconds"]
    assert slow["seconds"] < 0.5 * slow["compile_seconds"]


def test_ids_and_order_are_kept_and_batches_change_nothing(run, model, prompts_file):
    one, two = (
        rows_of(run("generate", model, "--prompts-file", prompts_file, *FAST, *batch).stdout)
        for batch in ((), ("--batch-size", 2))
    )
    assert [row["id"] for row in one] == ["a", 7, "ü"]
    assert one[2]["prompt"] == [9, 10, 11, 12]
    assert essence(one) == essence(two)
    assert [row["batch"] for row in two] == [2, 2, 2]  # the last batch is filled up


def test_an_interrupted_file_resumes_to_what_it_would_have_been(
    run, model, prompts_file, tmp_path, monkeypatch
):
    command = ("generate", model, "--prompts-file", prompts_file, *SAMPLED, "-o")
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    assert run(*command, whole).exit_code == 0
    lines = whole.read_bytes().splitlines(keepends=True)
    torn.write_bytes(lines[0] + lines[1][:40])

    decoded = []
    original = job.decode
    monkeypatch.setattr(job, "decode", lambda m, p, *a: decoded.extend(p) or original(m, p, *a))
    result = run(*command, torn, "--batch-size", 2)
    assert decoded == ["w6", (9, 10, 11, 12)]
    assert essence(rows_of(torn.read_text())) == essence(rows_of(whole.read_text()))
    assert "2 prompts (1 kept from before)" in result.stderr

    before = torn.read_bytes()
    assert "nothing to do (3 kept from before)" in run(*command, torn).stderr
    assert torn.read_bytes() == before


def test_another_seed_gives_another_text_and_does_not_resume_the_file(run, model, tmp_path):
    output = tmp_path / "out.jsonl"
    command = ("generate", model, "w3 w4 w5", *SAMPLED, "-o", output, "--seed")
    first = rows_of((run(*command, 1), output.read_text())[1])[0]
    result = run(*command, 2)
    assert result.exit_code == 2
    assert "was made with seed 1, now 2" in result.stderr
    assert run(*command, 2, "--overwrite").exit_code == 0
    second = rows_of(output.read_text())[0]
    assert first["tokens"] != second["tokens"]


def test_the_seed_is_irrelevant_at_temperature_0(run, model, tmp_path):
    output = tmp_path / "out.jsonl"
    for seed in (1, 2):
        result = run("generate", model, "w3 w4 w5", *FAST, "-o", output, "--seed", seed)
        assert result.exit_code == 0
    assert len(rows_of(output.read_text())) == 1


def test_ctrl_c_keeps_the_rows_written_so_far(run, model, prompts_file, tmp_path, monkeypatch):
    original, calls = job.decode, []

    def decode(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(job, "decode", decode)
    output = tmp_path / "out.jsonl"
    command = ("generate", model, "--prompts-file", prompts_file, *FAST, "-o", output)
    result = run(*command)
    assert result.exit_code == 130
    assert "resumes" in result.stderr
    assert [row["id"] for row in rows_of(output.read_text())] == ["a"]
    assert run(*command).exit_code == 0
    assert [row["id"] for row in rows_of(output.read_text())] == ["a", 7, "ü"]


def test_a_device_out_of_memory_is_one_sentence_and_leaves_no_file(
    run, model, tmp_path, monkeypatch
):
    def decode(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 byte")

    monkeypatch.setattr(job, "decode", decode)
    result = run("generate", model, "w3", *FAST, "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert "lower --batch-size" in result.stderr
    assert not list(tmp_path.iterdir())


def test_several_prompts_show_a_progress_bar_and_quiet_shows_nothing(run, model, prompts_file):
    command = ("generate", model, "--prompts-file", prompts_file, *FAST)
    assert "3/3" in run(*command).stderr
    assert run(*command, "--quiet").stderr == ""
    assert "1/1" not in run("generate", model, "w3 w4", *FAST).stderr


def test_standard_input_is_a_prompt(run, model):
    piped = rows_of(run("generate", model, "-", *FAST, input="w3 w4 w5").stdout)
    direct = rows_of(run("generate", model, "w3 w4 w5", *FAST).stdout)
    assert essence(piped) == essence(direct)


def test_the_embedded_model_answers_at_the_lengths_it_was_trained_for(run):
    """Nothing but the prompt is given; a length that is given holds."""
    names = ["Jean Ross", "David Price", "Anna Jones"]
    prompt = f"reverse {json.dumps(names[::-1])}"
    (row,) = rows_of(run("generate", "embedded", prompt).stdout)
    assert json.loads(row["text"]) == names
    assert (row["settings"]["gen_length"], row["settings"]["block_length"]) == (64, 32)
    (row,) = rows_of(run("generate", "embedded", prompt, "--gen-length", 32).stdout)
    assert row["settings"]["gen_length"] == 32
