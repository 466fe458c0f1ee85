"""What attention drift looks like over passes, and whether a spike of it foretells stability.

From one traced generation with the early and the suffix rule off, so that what they would have
committed can be compared with what the sequence committed in the end.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

import polestar_jax as pj
from benchmarks.frontier.intervals import interval, mean
from benchmarks.frontier.settings import Canvas, policy_config
from benchmarks.frontier.workload import Row, Workload, batches

PROMPTS = 128
LAST_PASS = 8  # passes of a block shown


@dataclasses.dataclass(frozen=True)
class Seen:
    """Masked rows of denoising passes, one entry each, arrays [rows].

    number: pass of the block, 1 the first after the opening.
    committed: whether this pass committed the row.
    stable: whether the pass's prediction is what was committed in the end.
    """

    number: np.ndarray
    confidence: np.ndarray
    drift: np.ndarray
    delta: np.ndarray
    committed: np.ndarray
    stable: np.ndarray


def trace_rows(workload: Workload) -> list[Row]:
    """About `PROMPTS` rows, as many of each task."""
    each = max(1, PROMPTS // len(workload.rows))
    return [row for rows in workload.rows.values() for row in rows[:each]]


def seen_rows(result: pj.DecodeResult, count: int, block_length: int) -> Seen:
    """Collect the masked rows of all denoising passes of the first `count` sequences."""
    trace = result.trace
    assert trace is not None
    active = np.asarray(trace.active)[:, :count]
    block = np.asarray(trace.block)[:, :count]
    # Number of each pass inside its block, per sequence (0: the opening).
    number = np.zeros(active.shape, np.int64)
    for i in range(1, len(active)):
        same = (block[i] == block[i - 1]) & active[i - 1]
        number[i] = np.where(same, number[i - 1] + 1, 0)
    masked = np.asarray(trace.masked)[:, :count] & active[..., None] & (number > 0)[..., None]
    columns = block[..., None] * block_length + np.arange(block_length)
    rows = np.arange(count)[None, :, None]
    final = result.tokens[rows, columns]
    after = np.asarray(trace.cause)[:, :count]
    committed = np.take_along_axis(after, columns, axis=-1) > 0
    drift = np.asarray(trace.drift)[:, :count]
    numbers = np.broadcast_to(number[..., None], masked.shape)
    prediction = np.asarray(trace.prediction)[:, :count]
    keep = masked & np.isfinite(drift)
    return Seen(
        number=numbers[keep],
        confidence=np.asarray(trace.confidence)[:, :count][keep],
        drift=drift[keep],
        delta=np.asarray(trace.delta)[:, :count][keep],
        committed=committed[keep],
        stable=(prediction == final)[keep],
    )


def curves(seen: Seen) -> list[dict[str, Any]]:
    """Quartiles of drift by pass of the block, of rows committed in it and of those left masked."""
    found = []
    for number in range(1, LAST_PASS + 1):
        for committed in (True, False):
            values = seen.drift[(seen.number == number) & (seen.committed == committed)]
            if values.size:
                low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
                found.append(
                    {
                        "pass": number, "committed": committed, "rows": int(values.size),
                        "quartiles": [low, middle, high],
                    }
                )  # fmt: skip
    return found


def gate_test(seen: Seen, rule: pj.PolestarCommit) -> list[dict[str, Any]]:
    """Among rows between the two thresholds: how often is the prediction final, with the gate
    open and shut? In two bands of confidence, since drift and confidence go together."""
    assert rule.early_threshold is not None
    low, high = rule.early_threshold, rule.threshold
    gate = rule.gate_scale * np.maximum(0.0, high - seen.confidence) ** 2
    opened = (gate <= seen.delta) & (seen.delta < rule.delta_max)
    middle = (low + high) / 2
    found = []
    for lower, upper in ((low, middle), (middle, high)):
        band = (seen.confidence > lower) & (seen.confidence < upper)
        for is_open in (True, False):
            stable = seen.stable[band & (opened == is_open)].astype(np.float64)
            found.append(
                {
                    "confidence": [round(lower, 6), round(upper, 6)],
                    "gate_open": is_open,
                    "rows": int(stable.size),
                    "stable": float(stable.mean()) if stable.size else None,
                    "interval": list(interval(mean, stable)) if stable.size else None,
                }
            )
    return found


def measure_drift(
    model: pj.Model, workload: Workload, canvas: Canvas, batch_size: int
) -> dict[str, Any]:
    """The "drift" part of a run, see the schema."""
    rule = pj.PolestarCommit()
    off = {"early_threshold": None, "suffix": False}
    config = policy_config("polestar", canvas, **off)
    rows = trace_rows(workload)
    parts = [
        seen_rows(
            pj.decode(model, [list(r.ids) for r in _filled(part, batch_size)], config, keys,
                      trace=True),
            len(part), canvas.block_length,
        )
        for part, _, keys in batches(model, rows, batch_size, config)
    ]  # fmt: skip
    names = [field.name for field in dataclasses.fields(Seen)]
    seen = Seen(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in names})
    return {
        "policy": "polestar without early and suffix commits",
        "prompts": len(rows),
        "curves": curves(seen),
        "gate": gate_test(seen, rule),
    }


def _filled(part: Sequence[Row], size: int) -> list[Row]:
    return [*part, *[part[-1]] * (size - len(part))]
