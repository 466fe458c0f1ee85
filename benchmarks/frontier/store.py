"""One JSON file per run, whole at every moment: rewritten beside itself and renamed."""

import contextlib
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks.frontier.environment import now
from benchmarks.frontier.schema import RUN
from polestar_jax.errors import PolestarError

Run = dict[str, Any]
VERSION = 1


@functools.cache
def _validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(RUN)


def check(run: Run, where: str) -> None:
    """Raise PolestarError naming the first place where `run` breaks the schema."""
    error = jsonschema.exceptions.best_match(_validator().iter_errors(run))
    if error is not None:
        place = "/".join(map(str, error.absolute_path)) or "the top"
        raise PolestarError(f"{where} is not a result file, at {place}: {error.message:.200}")


def new_run(identity: Mapping[str, Any], facts: Mapping[str, Any]) -> Run:
    """A run without records. `identity`: what its records must share; `facts`: the rest."""
    return {"version": VERSION, "identity": dict(identity), **facts, "drift": None, "records": {}}


def open_run(path: Path, run: Run, restart: bool) -> Run:
    """The run stored at `path` if it continues `run`, else `run`, now stored there.

    Raises:
        PolestarError: the file is damaged, or belongs to a run of another identity or machine.
    """
    if path.exists() and not restart:
        old = read_run(path)
        if not old["records"]:  # left by a run that was refused before its first setting
            save_run(path, run)
            return run
        for name, value in run["identity"].items():
            before = old["identity"].get(name)
            if before != value:
                raise PolestarError(
                    f"{path} was made with {difference(name, before, value)}; "
                    "choose another --out, or pass --restart to replace it"
                )
        there, here = machine(old), machine(run)
        if there != here:
            raise PolestarError(
                f"{path} was measured on {there}, this is {here}; "
                "choose another --out, or pass --restart to replace it"
            )
        return old
    save_run(path, run)
    return run


def difference(name: str, before: Any, value: Any) -> str:
    """What a run was made with and what is asked for; of a mapping the first entry that differs."""
    if isinstance(before, dict) and isinstance(value, dict):
        keys = [key for key in (*before, *value) if before.get(key) != value.get(key)]
        return difference(f"{name} {keys[0]!r}:", before.get(keys[0]), value.get(keys[0]))
    return f"{name} {before!r}, now {value!r}"


def machine(run: Run) -> str:
    """What the times of a run depend on, in words."""
    made = run["environment"]
    return f"{made['device']} with {made['cores']} cores and JAX {made['packages']['jax']}"


def read_run(path: Path) -> Run:
    """The run at `path`, checked."""
    try:
        run = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PolestarError(f"{path} cannot be read as a result file: {error}") from None
    check(run, str(path))
    return run


def with_record(run: Run, label: str, record: Mapping[str, Any], revision: str) -> Run:
    """The run with one more record, dated."""
    dated = {**record, "date": now(), "revision": revision}
    return {**run, "records": {**run["records"], label: dated}}


def save_run(path: Path, run: Run) -> None:
    """Check the run and put it at `path` whole, or not at all."""
    check(run, str(path))
    write_text(path, json.dumps(run, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file beside `path`, then rename it."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise PolestarError(f"cannot write {path}: {error.strerror}") from None
