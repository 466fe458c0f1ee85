"""One setting over all rows: what came out, what it cost, and with what certainty."""

import dataclasses
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import polestar_jax as pj
from benchmarks.frontier.cost import work
from benchmarks.frontier.intervals import interval, mean, ratio
from benchmarks.frontier.programs import Program, compile_program, run_program, split_knobs
from benchmarks.frontier.settings import Setting, describe
from benchmarks.frontier.workload import Row, Workload, batches
from benchmarks.tasks import get_task
from polestar_jax.decoding.state import CAUSES, PASS_KINDS

Progress = Callable[[int], object]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Results of some prompts, arrays [prompts]; `wall` and `cpu` are seconds of all together."""

    right: np.ndarray
    strict: np.ndarray
    nfe: np.ndarray
    generated: np.ndarray
    passes: np.ndarray  # [prompts, kinds]
    commits: np.ndarray  # [prompts, causes]
    refreshed_rows: np.ndarray
    row_layers: np.ndarray
    flops: np.ndarray
    tokens: np.ndarray  # [prompts, G]
    wall: float
    cpu: float


def join(outcomes: Sequence[Outcome]) -> Outcome:
    """Several outcomes as one."""
    merged: dict[str, Any] = {}
    for field in dataclasses.fields(Outcome):
        values = [getattr(outcome, field.name) for outcome in outcomes]
        times = field.name in ("wall", "cpu")
        merged[field.name] = sum(values) if times else np.concatenate(values)
    return Outcome(**merged)


def run_task(
    model: pj.Model,
    program: Program,
    config: pj.DecodeConfig,
    name: str,
    rows: Sequence[Row],
    progress: Progress,
) -> Outcome:
    """Decode one task's rows and mark the answers."""
    task, parts = get_task(name), []
    for part, prompts, keys in batches(model, rows, program.shape[0], config):
        timed = run_program(program, model, config, prompts, keys)
        result, count = timed.result, len(part)
        assert result.text is not None  # a workload needs a tokenizer
        marks = [
            [task.score(row.example, text, strict) for row, text in zip(part, result.text)]
            for strict in (False, True)
        ]
        stats, done = result.stats, work(model.config, config, prompts.tokens.shape[1], result)
        parts.append(
            Outcome(
                right=np.array(marks[0]),
                strict=np.array(marks[1]),
                nfe=result.nfe[:count].astype(np.int64),
                generated=stats.generated[:count].astype(np.int64),
                passes=np.stack([stats.passes[k] for k in PASS_KINDS], axis=-1)[:count],
                commits=np.stack([stats.commits[c] for c in CAUSES], axis=-1)[:count],
                refreshed_rows=stats.refreshed_rows[:count],
                row_layers=done.row_layers[:count],
                flops=done.flops[:count],
                tokens=result.tokens[:count],
                wall=timed.wall,
                cpu=timed.cpu,
            )
        )
        progress(count)
    return join(parts)


def summary(outcome: Outcome, layers: int) -> dict[str, Any]:
    """Means over prompts and their intervals, as JSON values.

    Tokens per second count all prompts of a batch, so they are the throughput at that batch size;
    a batch lasts until its slowest sequence is done.
    """
    count, tokens = len(outcome.nfe), int(outcome.generated.sum())
    refreshes = int(outcome.passes[:, PASS_KINDS.index("refresh")].sum())
    return {
        "prompts": count,
        "accuracy": float(outcome.right.mean()),
        "accuracy_interval": list(interval(mean, outcome.right)),
        "strict_accuracy": float(outcome.strict.mean()),
        "tokens_per_forward": float(ratio(outcome.generated, outcome.nfe)),
        "tokens_per_forward_interval": list(interval(ratio, outcome.generated, outcome.nfe)),
        "nfe": float(outcome.nfe.mean()),
        "answer_tokens": tokens / count,
        "tokens_per_second": tokens / outcome.wall,
        "tokens_per_cpu_second": tokens / outcome.cpu,
        "flops_per_token": float(outcome.flops.sum() / max(tokens, 1)),
        "rows_per_token": float(outcome.row_layers.sum() / layers / max(tokens, 1)),
        "passes": _means(PASS_KINDS, outcome.passes),
        "commits": _means(CAUSES, outcome.commits),
        "refreshed_rows": float(outcome.refreshed_rows.mean()),
        "refreshed_rows_per_pass_and_layer": (
            float(outcome.refreshed_rows.sum() / refreshes / layers) if refreshes else 0.0
        ),
        "wall_seconds": outcome.wall,
        "cpu_seconds": outcome.cpu,
    }


def _means(names: Sequence[str], values: np.ndarray) -> dict[str, float]:
    return dict(zip(names, values.mean(axis=0).tolist()))


def measure(
    model: pj.Model,
    setting: Setting,
    workload: Workload,
    batch_size: int,
    program: Program | None,
    progress: Progress,
) -> tuple[dict[str, Any], Program]:
    """A setting's record (the schema's "record", without date and revision), and its program.

    `program` is the one before; where it has the same structure it is used again and the record's
    compile time is 0.
    """
    config = setting.config
    fresh = program is None or program.structure != split_knobs(config)[0]
    if program is None or fresh:
        rows = next(iter(workload.rows.values()))
        _, prompts, _ = next(iter(batches(model, rows, batch_size, config)))
        program = compile_program(model, config, prompts)
    tasks: dict[str, Outcome] = {
        name: run_task(model, program, config, name, rows, progress)
        for name, rows in workload.rows.items()
    }
    layers = model.config.num_layers
    families = {
        family: summary(join([tasks[name] for name in names]), layers)
        for family, names in workload.families.items()
    }
    record = {
        "policy": setting.policy,
        "knob": setting.knob,
        "value": setting.value,
        "config": describe(config),
        "compile_seconds": program.compile_seconds if fresh else 0.0,
        "program_bytes": program.memory_bytes,
        "peak_bytes": peak_bytes(),
        "all": summary(join(list(tasks.values())), layers),
        "families": families,
        "tasks": {name: _task_record(outcome, layers) for name, outcome in tasks.items()},
    }
    return record, program


def _task_record(outcome: Outcome, layers: int) -> dict[str, Any]:
    """A summary with each prompt's mark (for paired comparisons) and a digest of all tokens."""
    marks = "".join(str(int(mark)) for mark in outcome.right)
    content = outcome.tokens.astype("<i4").tobytes() + outcome.nfe.astype("<i8").tobytes()
    digest = hashlib.sha256(content).hexdigest()
    return summary(outcome, layers) | {"marks": marks, "digest": digest}


def marks(record: Mapping[str, Any], tasks: Sequence[str]) -> np.ndarray:
    """Marks of all prompts of these tasks, float64 [prompts], as stored in a record."""
    text = "".join(record["tasks"][name]["marks"] for name in tasks)
    return np.array([float(mark) for mark in text])


def peak_bytes() -> int | None:
    """Most memory used so far: of the accelerator, else resident memory of this process."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    try:
        # Unlike getrusage, this does not start from the size of the process that started this one.
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        return _resident_peak()


def _resident_peak() -> int | None:
    """Where there is no /proc."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
