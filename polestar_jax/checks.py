"""Checks of configuration fields: each raises one sentence with the value and the remedy."""

import math
import numbers
from collections.abc import Sequence

from polestar_jax.errors import PolestarError


def check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """`value` must be a whole number in [low, high]."""
    good = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not good or value < low or (high is not None and value > high):  # type: ignore[operator]
        upper = "" if high is None else f" and at most {high}"
        raise PolestarError(
            f"{name} must be a whole number of at least {low}{upper}, got {value!r}"
        )


def check_number(name: str, value: object, low: float, high: float) -> None:
    """`value` must be a finite number in [low, high]."""
    good = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or not low <= value <= high:  # type: ignore[arg-type,operator]
        upper = "" if math.isinf(high) else f" and at most {high}"
        raise PolestarError(
            f"{name} must be a finite number of at least {low}{upper}, got {value!r}"
        )


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """`value` must be one of `choices`."""
    if value not in choices:
        raise PolestarError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
