"""What is measured: decoding policies, each over its main knob."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import polestar_jax as pj
from polestar_jax.errors import PolestarError

THRESHOLDS = (0.5, 0.7, 0.9, 0.95)
FACTORS = (0.5, 1.0, 2.0)
TOKENS_PER_PASS = (1, 2, 4)
EARLY_GAP = 0.2  # early threshold below the threshold, as in the paper's 0.7 and 0.9

KNOBS: dict[str, str] = {
    "vanilla": "tokens_per_pass",
    "parallel": "threshold",
    "parallel-factor": "factor",
    "fast-dllm-prefix": "threshold",
    "fast-dllm-dual": "threshold",
    "fast-dllm-factor": "factor",
    "polestar-cache": "threshold",
    "polestar-commit": "threshold",
    "polestar": "threshold",
}
USUAL: dict[str, float] = {"tokens_per_pass": 1, "threshold": 0.9, "factor": 1.0}


@dataclasses.dataclass(frozen=True)
class Canvas:
    """Lengths that all settings of a run share; `prompt_bucket` None lets `decode` choose."""

    gen_length: int = 32
    block_length: int = 8
    prompt_bucket: int | None = None


@dataclasses.dataclass(frozen=True)
class Setting:
    """One point: a policy with one value of one knob. `label` names it in files and tables."""

    policy: str
    knob: str
    value: float | int | str
    config: pj.DecodeConfig

    @property
    def label(self) -> str:
        return f"{self.policy} {self.knob}={self.value}"


def policy_config(policy: str, canvas: Canvas, **fields: Any) -> pj.DecodeConfig:
    """A preset on this canvas with some fields changed."""
    return pj.preset(policy, **dataclasses.asdict(canvas), **fields)


def knob_fields(policy: str, value: float, canvas: Canvas) -> dict[str, Any]:
    """What a knob's value means for the preset's fields.

    Where a policy has an early threshold it stays `EARLY_GAP` below the threshold.
    """
    knob = KNOBS[policy]
    if knob == "tokens_per_pass":
        return {"steps": canvas.gen_length // int(value)}
    if policy in ("polestar", "polestar-commit"):
        return {"threshold": value, "early_threshold": round(max(value - EARLY_GAP, 0.0), 6)}
    return {knob: value}


def frontier_settings(
    policies: Sequence[str], canvas: Canvas, values: Mapping[str, Sequence[float]] | None = None
) -> list[Setting]:
    """All points of the frontier, policy by policy.

    `values` replaces the values of some knobs (keys "threshold", "factor", "tokens_per_pass").

    Raises:
        PolestarError: an unknown policy, or a value that does not fit the policy or the canvas.
    """
    chosen: dict[str, Sequence[float]] = {
        "threshold": THRESHOLDS, "factor": FACTORS, "tokens_per_pass": TOKENS_PER_PASS,
        **(values or {}),
    }  # fmt: skip
    settings = []
    for policy in policies:
        if policy not in KNOBS:
            raise PolestarError(f"unknown policy {policy!r}; known: {', '.join(KNOBS)}")
        knob = KNOBS[policy]
        for value in chosen[knob]:
            if knob == "tokens_per_pass" and (value < 1 or canvas.block_length % value):
                raise PolestarError(
                    f"{value} tokens a pass do not divide the block length {canvas.block_length}"
                )
            config = policy_config(policy, canvas, **knob_fields(policy, value, canvas))
            settings.append(Setting(policy, knob, value, config))
    return settings


def describe(config: pj.DecodeConfig) -> dict[str, Any]:
    """A configuration as JSON values: policies by class name and fields."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = {"policy": type(value).__name__} | dataclasses.asdict(value)  # type: ignore[arg-type]
        out[field.name] = value
    return out
