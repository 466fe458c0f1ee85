"""Shapes at the door of every op, checked by the letters in their description."""

from jax import Array

from polestar_jax.errors import PolestarError


def check_shapes(op: str, **described: tuple[Array | None, str]) -> dict[str, int]:
    """Sizes by letter; `described` maps argument names to (array, letters), as `q=(q, "B R H D")`.

    Raises `PolestarError` for a wrong number of axes and for a letter with two sizes. Absent
    arguments (None) are left out.
    """
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, (array, letters) in described.items():
        if array is None:
            continue
        axes = letters.split()
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
    if "H" in sizes and "Hk" in sizes and sizes["H"] % sizes["Hk"]:
        raise PolestarError(
            f"{op}: {sizes['H']} query heads are no multiple of {sizes['Hk']} key heads"
        )
    return sizes
