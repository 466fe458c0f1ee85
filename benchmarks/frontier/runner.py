"""The run: every setting that its file does not hold yet, one after the other."""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

import polestar_jax as pj
from benchmarks.frontier.drift import measure_drift
from benchmarks.frontier.environment import environment, model_facts, now, revision
from benchmarks.frontier.measure import measure
from benchmarks.frontier.programs import Program
from benchmarks.frontier.settings import Canvas, Setting, describe
from benchmarks.frontier.store import Run, new_run, open_run, save_run, with_record
from benchmarks.frontier.workload import Workload, make_workload


@dataclasses.dataclass(frozen=True)
class Request:
    """What the command line asks for; see its options."""

    kind: str
    model: str
    dtype: str | None
    tasks: tuple[str, ...]
    limit: int
    seeds: tuple[int, ...]
    data: Path | None
    prompts: str
    gen_length: int
    block_length: int
    batch_size: int
    path: Path
    restart: bool
    trace: bool
    quiet: bool
    command: str


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A loaded model with its rows and canvas, and the run they would start; `revision` is the
    commit at the start, whose code is the one that runs."""

    model: pj.Model
    workload: Workload
    canvas: Canvas
    run: Run
    revision: str


def prepare(request: Request) -> Prepared:
    """Load the model, choose and tokenise the rows; no file is touched.

    Raises:
        PolestarError: for everything a user can get wrong.
    """
    started = time.perf_counter()
    model = pj.load(request.model, dtype=request.dtype)
    loading = time.perf_counter() - started
    workload = make_workload(
        model, request.tasks, request.limit, request.seeds, request.data, request.prompts
    )
    canvas = Canvas(request.gen_length, request.block_length, workload.prompt_bucket)
    identity = {
        "kind": request.kind,
        "model": model_facts(Path(request.model).resolve().name, model),
        "source": workload.source,
        "prompts": workload.style,
        "tasks": {name: len(rows) for name, rows in workload.rows.items()},
        "seeds": list(request.seeds),
        **dataclasses.asdict(canvas),
        "batch_size": request.batch_size,
    }
    facts = {
        "command": request.command,
        "created": now(),
        "environment": environment(),
        "families": {name: list(tasks) for name, tasks in workload.families.items()},
        "loading_seconds": loading,
        "tokenising_seconds": workload.seconds,
    }
    return Prepared(model, workload, canvas, new_run(identity, facts), revision())


def copied(run: Run, setting: Setting) -> dict[str, Any] | None:
    """The record of an equal configuration under the setting's own name, if there is one."""
    config = as_json(describe(setting.config))
    for record in run["records"].values():
        if as_json(record["config"]) == config:
            own = {"policy": setting.policy, "knob": setting.knob, "value": setting.value}
            return {**record, **own, "compile_seconds": 0.0}
    return None


def as_json(value: Any) -> Any:
    """The value as it comes back from a file: tuples as lists."""
    return json.loads(json.dumps(value))


def execute(prepared: Prepared, settings: Sequence[Setting], request: Request) -> Run:
    """Measure what the run's file does not hold; it is whole after every setting.

    Raises:
        PolestarError: the file belongs to another run.
    """
    run, workload = open_run(request.path, prepared.run, request.restart), prepared.workload
    todo = [s for s in settings if s.label not in run["records"]]
    program: Program | None = None
    bar = tqdm(
        total=len(settings) * workload.size,
        initial=(len(settings) - len(todo)) * workload.size,
        unit="prompt", disable=request.quiet or not sys.stderr.isatty(),
    )  # fmt: skip
    with bar:
        for setting in todo:
            bar.set_description(setting.label)
            record = copied(run, setting)
            if record is None:
                record, program = measure(
                    prepared.model, setting, workload, request.batch_size, program, bar.update
                )
            else:
                bar.update(workload.size)
            run = with_record(run, setting.label, record, prepared.revision)
            save_run(request.path, run)
    if request.trace and run["drift"] is None:
        drift = measure_drift(prepared.model, workload, prepared.canvas, request.batch_size)
        run = {**run, "drift": drift}
        save_run(request.path, run)
    return run
