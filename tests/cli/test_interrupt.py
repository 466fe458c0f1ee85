"""A real process, interrupted or killed, and resumed; programs kept on disk meanwhile."""

import json
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow

FAST = ("--policy", "parallel", "--gen-length", "64", "--block-length", "8", "--temperature", "1")


@pytest.fixture
def command(model, tmp_path):
    """The command line but for --output; many prompts, each a batch of its own."""
    rows = [{"id": i, "prompt": [3 + i % 27, 3 + i // 27]} for i in range(150)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    start = [sys.executable, "-m", "polestar_jax", "generate", str(model)]
    cache = ["--compilation-cache", str(tmp_path / "cache")]
    return [*start, "--prompts-file", str(prompts), *FAST, *cache, "--output"]


def start_and_stop(command, output, stop):
    """Start, wait for some rows, send the signal; the exit code and what it left."""
    process = subprocess.Popen([*command, output], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not (output.exists() and output.read_bytes().count(b"\n") >= 5):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(stop)
    asked = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr, time.monotonic() - asked


def essence(output):
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    return [(row["id"], row["tokens"], row["nfe"]) for row in rows]


def test_interrupted_and_killed_runs_resume_to_the_rows_of_an_undisturbed_one(command, tmp_path):
    whole, disturbed = tmp_path / "whole.jsonl", tmp_path / "disturbed.jsonl"

    code, stderr, seconds = start_and_stop(command, disturbed, signal.SIGINT)
    assert code == 130
    assert "interrupted; the same command resumes" in stderr
    assert "Traceback" not in stderr
    assert seconds < 10
    first = essence(disturbed)
    assert 5 <= len(first) < 150

    # Killed while rows are there already: start anew in a file of its own, then resume both.
    killed = tmp_path / "killed.jsonl"
    code, _, _ = start_and_stop(command, killed, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert killed.read_bytes().count(b"\n") < 150

    for output in (whole, disturbed, killed):
        subprocess.run([*command, output], check=True, capture_output=True)
    assert [row[0] for row in essence(whole)] == list(range(150))
    assert essence(disturbed)[: len(first)] == first
    assert essence(whole) == essence(disturbed) == essence(killed)
    assert any((tmp_path / "cache").iterdir())


def test_ctrl_c_is_answered_while_a_program_runs(model, tmp_path):
    script = f"""
import jax, jax.numpy as jnp, sys
from polestar_jax.cli import job, main
@jax.jit
def long(x):
    return jax.lax.fori_loop(0, 10_000_000, lambda i, x: jnp.sin(x @ x), x)
def decode(*arguments):
    print("running", flush=True)
    return jax.block_until_ready(long(jnp.ones((200, 200))))
job.decode = decode
sys.argv = ["polestar-jax", "generate", {str(model)!r}, "w3", "--gen-length", "64",
            "--compilation-cache", "off"]
main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "running\n"
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in stderr
    assert time.monotonic() - asked < 10
