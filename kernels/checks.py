"""Arguments at the door of every op: shapes by letters, kinds of numbers, options."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from polestar_jax.errors import PolestarError


def check_shapes(
    op: str, *, at_least_one: str = "", **described: tuple[Any, str]
) -> dict[str, int]:
    """Sizes by letter; `described` maps argument names to (array, letters), as `q=(q, "B R H D")`.

    Raises `PolestarError` for what is no array, a wrong number of axes, a letter with two sizes,
    and an axis of `at_least_one` without elements. Absent arguments (None) are left out.
    """
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, (array, letters) in described.items():
        if array is None:
            continue
        axes = letters.split()
        if not is_array(array):
            raise PolestarError(f"{op}: {name} must be an array, got {type(array).__name__}")
        if array.ndim != len(axes):
            raise PolestarError(
                f"{op}: {name} must have the axes [{', '.join(axes)}], got shape {array.shape}"
            )
        for axis, size in zip(axes, array.shape):
            if sizes.setdefault(axis, size) != size:
                raise PolestarError(
                    f"{op}: axis {axis} is {size} in {name} {array.shape} "
                    f"but {sizes[axis]} in {owner[axis]}"
                )
            owner.setdefault(axis, name)
    for axis in at_least_one.split():
        if sizes[axis] < 1:
            raise PolestarError(f"{op}: axis {axis} of {owner[axis]} has no elements")
    if "H" in sizes and "Hk" in sizes and sizes["H"] % sizes["Hk"]:
        raise PolestarError(
            f"{op}: {sizes['H']} query heads are no multiple of {sizes['Hk']} key heads"
        )
    return sizes


def is_array(value: Any) -> bool:
    """Whether it is an array of NumPy or JAX, traced ones included."""
    return hasattr(value, "dtype") and hasattr(value, "ndim")


def same_floats(op: str, **arrays: Array) -> None:
    """Raise unless all arrays have one floating-point type."""
    found = {name: str(array.dtype) for name, array in arrays.items()}
    floating = all(jnp.issubdtype(array.dtype, jnp.floating) for array in arrays.values())
    if not floating or len(set(found.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in found.items())
        raise PolestarError(f"{op}: {listed} must be floating-point numbers of one type")


def as_int32(op: str, **arrays: Any) -> list[Any]:
    """The arrays (None stays None) as int32; raises where one holds no integers."""
    for name, array in arrays.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.integer):
            raise PolestarError(f"{op}: {name} must be integers, got {array.dtype}")
    return [None if array is None else jnp.asarray(array, jnp.int32) for array in arrays.values()]


def check_previous(op: str, previous: Any) -> tuple[Any, Any]:
    """Scores and normaliser of the pass before, (None, None) without one."""
    if previous is None:
        return None, None
    pair = isinstance(previous, tuple) and len(previous) == 2
    if not pair or not all(is_array(array) for array in previous):
        raise PolestarError(
            f"{op}: previous must be the pair (scores, normaliser) of an earlier result, "
            f"got {type(previous).__name__}"
        )
    for name, array in zip(("scores", "normaliser"), previous):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise PolestarError(f"{op}: previous {name} must be floats, got {array.dtype}")
    return previous


def check_theta(op: str, theta: Any) -> None:
    """The base of rotary frequencies must be a positive number."""
    number = isinstance(theta, int | float | np.number) and not isinstance(theta, bool)
    if not number or not math.isfinite(theta) or theta <= 0:
        raise PolestarError(f"{op}: theta must be a positive number, got {theta!r}")


def check_dtype(op: str, name: str, dtype: Any, allowed: tuple[str, ...]) -> Any:
    """The dtype object, if it is one of those that the op can write."""
    try:
        found = jnp.dtype(dtype) if dtype is not None else None
    except TypeError:
        found = None
    if found is None or found.name not in allowed:
        raise PolestarError(f"{op}: {name} must be one of {', '.join(allowed)}, got {dtype!r}")
    return found
