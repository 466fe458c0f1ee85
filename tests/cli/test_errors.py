"""Bad input: one sentence on standard error, exit code 2, nothing written."""

import json
import os
import subprocess
import sys

import pytest

FAST = ("--policy", "parallel", "--gen-length", 16, "--block-length", 8)


def refused(result, *parts):
    """The result is one line on standard error that holds `parts`, and exit code 2."""
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("Error: ")
    for part in parts:
        assert part in lines[0]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("", *FAST), "empty"),
        (("   ", *FAST), "empty"),
        ((" ".join(["w3"] * 90), *FAST), "maximum of 96"),
        (("w3", "--gen-length", 20, "--block-length", 8), "gen_length (20) must be a multiple"),
        (("w3", "--gen-length", 0), "gen_length must be a whole number of at least 1"),
        (("w3", "--gen-length", -8, "--block-length", -8), "at least 1"),
        (("w3", "--policy", "fastest"), "unknown preset 'fastest'; known: vanilla"),
        (("w3", "--policy", "vanilla", "--threshold", 0.9), "unknown field 'threshold'"),
        (("w3", *FAST, "--set", "tau=0.9"), "unknown field 'tau'"),
        (("w3", *FAST, "--set", "gen_length=32"), "gen_length is given twice"),
        (("w3", *FAST, "--threshold", 1.5), "threshold must be a finite number"),
        (("w3", *FAST, "--threshold", "nan"), "threshold must be a finite number"),
        (("w3", *FAST, "--temperature", "nan"), "temperature must be a finite number"),
        (("w3", *FAST, "--temperature", "inf"), "temperature must be a finite number"),
        (("w3", *FAST, "--temperature", -1), "temperature must be a finite number"),
        (("w3", *FAST, "--set", "temperature=hot"), "temperature must be a finite number"),
        (("w3", *FAST, "--cache", "double"), "unknown cache policy 'double'"),
        (("w3", "--policy", "vanilla", "--gen-length", 64, "--steps", 7), "multiple of the number"),
        (("w3", *FAST, "--prompt-file", "x"), "one source of prompts, got 2"),
        ((), "one source of prompts, got 0"),
        (("--prompts-file", "nowhere.jsonl"), "cannot read nowhere.jsonl"),
    ],
)
def test_generate_refuses(run, model, tmp_path, arguments, part):
    output = tmp_path / "out.jsonl"
    refused(run("generate", model, *arguments, "-o", output), part)
    assert not output.exists()


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        ([3, 1, 4], "the prompt with id 'bad' contains the mask token (1) at position 1"),
        ([3, 32], "the prompt with id 'bad' holds token id 32, outside the vocabulary of 32"),
        ([], "the prompt with id 'bad' is empty"),
        ("", "the prompt with id 'bad' is empty"),
        ([3] * 90, "the prompt with id 'bad' has 90 tokens"),
    ],
)
def test_a_bad_prompt_among_many_is_named_before_any_is_decoded(run, model, tmp_path, prompt, part):
    rows = [{"id": "good", "prompt": "w3"}, {"id": "bad", "prompt": prompt}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "out.jsonl"
    result = run("generate", model, "--prompts-file", tmp_path / "p.jsonl", *FAST, "-o", output)
    refused(result, part)
    assert not output.exists()


def test_text_for_a_model_without_tokenizer_is_refused(run, make_model, tmp_path):
    bare = make_model(tmp_path / "bare", tokenizer=False)
    refused(run("generate", bare, "w3", *FAST), "no tokenizer")


def damage(directory, kind):
    weights = directory / "model.safetensors"
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "corrupt":
        weights.write_bytes(b"\xff" * 64)
    elif kind == "absent":
        weights.unlink()
    elif kind == "shard missing":
        index = {"weight_map": {"model.transformer.wte.weight": "model-00001-of-00002.safetensors"}}
        weights.unlink()
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "family":
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    elif kind == "configuration":
        (directory / "config.json").write_text("{")


@pytest.mark.parametrize("command", ["generate", "info", "convert"])
@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("truncated", "model.safetensors"),
        ("corrupt", "model.safetensors"),
        ("absent", "safetensors"),
        ("shard missing", "model-00001-of-00002.safetensors"),
        ("family", "'gpt2' is not supported"),
        ("configuration", "config.json"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_every_command(
    run, make_model, tmp_path, command, kind, part
):
    broken = make_model(tmp_path / "broken")
    damage(broken, kind)
    rest = {"generate": ("w3", *FAST), "info": (), "convert": (tmp_path / "out", "--quiet")}
    refused(run(command, broken, *rest[command]), part)
    assert [p.name for p in tmp_path.iterdir()] == ["broken"]


@pytest.mark.parametrize("command", ["generate", "info", "convert"])
def test_a_model_that_does_not_exist_is_refused(run, tmp_path, command):
    rest = {"generate": ("w3", *FAST), "info": (), "convert": (tmp_path / "out", "--quiet")}
    refused(run(command, tmp_path / "nothing", *rest[command]), "nothing")
    assert not list(tmp_path.iterdir())


def test_convert_leaves_an_existing_destination_alone(run, model, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    refused(run("convert", model, tmp_path / "out", "--quiet"), "exists")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


def test_demo_refuses_unknown_and_repeated_policies(run):
    refused(run("demo", "--policy", "fastest"), "unknown preset 'fastest'")
    refused(run("demo", "--policy", "vanilla", "--policy", "vanilla"), "name each policy once")


def test_a_wrong_option_is_explained_by_the_usage(run, model):
    result = run("generate", model, "w3", "--batch-size", 0)
    assert result.exit_code == 2
    assert "--batch-size" in result.stderr


@pytest.fixture
def without_pytorch(tmp_path):
    """run(arguments): Python in a process that finds no PyTorch; its last words are whether
    transformers was imported and what filters its logger was left with."""
    (tmp_path / "sitecustomize.py").write_text("""
import atexit, importlib.util, logging, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
logger = logging.getLogger("transformers")
atexit.register(lambda: print("transformers" in sys.modules, logger.filters))
""")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    environment.pop("TRANSFORMERS_NO_ADVISORY_WARNINGS", None)

    def call(*arguments):
        words = [sys.executable, *map(str, arguments)]
        return subprocess.run(words, env=environment, capture_output=True, text=True)

    return call


@pytest.mark.slow
def test_a_missing_pytorch_is_not_remarked_on_and_no_logger_stays_changed(without_pytorch, model):
    command = without_pytorch("-m", "polestar_jax", "generate", model, "")
    assert command.returncode == 2
    assert len(command.stderr.strip().splitlines()) == 1, command.stderr
    library = without_pytorch("-c", "import polestar_jax as pj; pj.load('embedded')")
    assert (library.returncode, library.stderr) == (0, "")
    for done in (command, library):
        assert done.stdout.splitlines()[-1] == "True []"
