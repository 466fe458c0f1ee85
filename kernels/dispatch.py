"""One dispatcher for all ops: which implementation runs, and what happens when it can not."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from polestar_jax.errors import PolestarError

# "pallas": the kernel, on NVIDIA GPUs from Ampere on. "interpret": the same kernel, executed by
# Pallas's interpreter on any back end (slow; for tests). "xla": the plain JAX reference.
IMPLEMENTATIONS = ("xla", "pallas", "interpret")
# Some ops also have a body written for Hopper by hand, and Mosaic's interpreter for it.
MOSAIC = ("mosaic", "mosaic-interpret")


def dispatch(
    op: str,
    implementation: str | None,
    *args: Any,
    reference: Callable[..., Any],
    kernel: Callable[..., Any],
    unsupported: str | None = None,
    mosaic: Callable[..., Any] | None = None,
) -> Any:
    """Run `op` on `args` (pytrees of arrays) by the implementation asked for.

    `kernel(*args, interpret=bool)` and `reference(*args)` compute the same. With None the choice
    falls when the program is lowered: the kernel for CUDA, the reference for everything else, so
    that a program compiled ahead of time on a CPU machine holds the kernel too. `unsupported` says
    why the kernel can not take these arguments: then None takes the reference and a named kernel
    raises. `mosaic` is called like `kernel` and itself refuses what it can not take; it runs only
    by name. A named implementation runs or raises `PolestarError`; it is never replaced.
    """
    if implementation == "xla":
        return reference(*args)
    if implementation is None:
        if unsupported:
            return reference(*args)

        def lowered(*operands: Any) -> Any:
            return kernel(*operands, interpret=False)

        return lax.platform_dependent(*args, cuda=lowered, default=reference)
    if implementation in MOSAIC and mosaic is not None:
        interpret = implementation == "mosaic-interpret"
        if not interpret:
            _need_gpu(op, implementation)
        return mosaic(*args, interpret=interpret)
    if implementation not in IMPLEMENTATIONS:
        raise PolestarError(
            f"unknown implementation {implementation!r} of {op}; "
            f"use None or one of: {', '.join(IMPLEMENTATIONS + (MOSAIC if mosaic else ()))}"
        )
    if unsupported:
        raise PolestarError(f"{op} has no kernel for {unsupported}; use implementation='xla'")
    if implementation == "pallas":
        _need_gpu(op, implementation)
    elif jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise PolestarError(
            f"Pallas's interpreter mixes integer types when jax_enable_x64 is on, so {op} can not "
            "be interpreted; turn it off, or use None or 'xla'"
        )
    return kernel(*args, interpret=implementation == "interpret")


def _need_gpu(op: str, implementation: str) -> None:
    if target_platform() not in ("gpu", "cuda"):
        raise PolestarError(
            f"implementation={implementation!r} of {op} needs an NVIDIA GPU and the target here is "
            f"{target_platform()!r}; use None, 'xla' or 'interpret'"
        )


def target_platform() -> str:
    """The platform that programs traced here are meant for.

    The device of the mesh in scope (how ahead-of-time compilation names its target), else JAX's
    default back end.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = getattr(mesh, "abstract_device", None)
    return jax.default_backend() if device is None else device.platform
