"""What the README shows works as it stands."""

import re
from pathlib import Path

import numpy as np
import pytest

import polestar_jax as pj
from polestar_jax.cli import cli

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_every_option_it_names_exists():
    lines = " ".join(blocks("bash")).replace("\\\n", " ").splitlines()
    commands = [line.split("#")[0].split() for line in lines if line.startswith("polestar-jax")]
    assert {words[1] for words in commands} == {"convert", "generate", "info"}
    for _, name, *words in commands:
        known = {option for p in cli.commands[name].params for option in p.opts}
        assert {word for word in words if word.startswith("--")} <= known


def test_it_names_every_preset():
    assert set(pj.PRESETS) <= set(re.findall(r"`([a-z-]+)`", README))


@pytest.mark.slow
def test_its_python_runs_and_both_ways_of_decoding_agree(capsys):
    names: dict = {}
    for block in blocks("python"):
        exec(block, names)
    assert capsys.readouterr().out.startswith("[")
    stepwise = names["state"].tokens[:, -names["config"].gen_length :]
    assert np.array_equal(stepwise, names["result"].tokens)
    assert names["result"].text[0] == '["Anna Jones", "David Price", "Jean Ross"]'
