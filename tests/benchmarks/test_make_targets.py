"""What the Makefile passes to the benchmarks: options that exist, with values that can be had."""

import itertools
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import decode
from benchmarks.frontier.cli import frontier, names, numbers
from benchmarks.frontier.settings import KNOBS, Canvas, frontier_settings

ROOT = Path(__file__).parents[2]
COMMANDS = {"benchmarks.decode": decode.main, "benchmarks.frontier": frontier}


def calls(target):
    """(module, its arguments) of every benchmark that a target runs."""
    inherited = ("MAKEFLAGS", "MFLAGS", "ARGS")  # of a make that runs these tests
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    done = subprocess.run(
        ["make", "-n", "--no-print-directory", target],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    text = done.stdout.replace("\\\n", " ")
    for module, arguments in re.findall(r"-m (benchmarks\.\w+)(.*)", text):
        words = shlex.split(arguments)
        yield module, list(itertools.takewhile(lambda word: not word.startswith(">"), words))


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("target", "modules"),
    [
        ("demo", ["benchmarks.frontier"]),
        ("bench", ["benchmarks.decode", "benchmarks.frontier"]),
        ("bench-full", ["benchmarks.decode", "benchmarks.frontier"]),
    ],
)
def test_every_option_of_the_benchmarks_is_known_and_every_setting_fits(target, modules):
    found = list(calls(target))
    assert [module for module, _ in found] == modules
    for module, arguments in found:
        given = COMMANDS[module].make_context(module, list(arguments)).params
        if module == "benchmarks.frontier":
            values = {
                "threshold": given["thresholds"] and numbers(given["thresholds"], "", float),
                "tokens_per_pass": given["tokens_per_pass"]
                and numbers(given["tokens_per_pass"], "", int),
            }
            assert frontier_settings(
                names(given["policies"], KNOBS, "policy"),
                Canvas(given["gen_length"], given["block_length"]),
                {name: value for name, value in values.items() if value},
            )
