"""One dispatcher for all ops: which implementation runs, and what happens when it can not."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from polestar_jax.errors import PolestarError

# "pallas": the kernel, on NVIDIA GPUs from Ampere on. "interpret": the same kernel, executed by
# Pallas's interpreter on any back end (slow; for tests). "xla": the plain JAX reference.
IMPLEMENTATIONS = ("xla", "pallas", "interpret")


def dispatch(
    op: str,
    implementation: str | None,
    *args: Any,
    reference: Callable[..., Any],
    kernel: Callable[..., Any],
    unsupported: str | None = None,
) -> Any:
    """Run `op` on `args` (pytrees of arrays) by the implementation asked for.

    `kernel(*args, interpret=bool)` and `reference(*args)` compute the same. With None the choice
    falls when the program is lowered: the kernel for CUDA, the reference for everything else, so
    that a program compiled ahead of time on a CPU machine holds the kernel too. `unsupported` says
    why the kernel can not take these arguments: then None takes the reference and a named kernel
    raises. A named implementation runs or raises `PolestarError`; it is never replaced.
    """
    if implementation == "xla":
        return reference(*args)
    if implementation is None:
        if unsupported:
            return reference(*args)

        def lowered(*operands: Any) -> Any:
            return kernel(*operands, interpret=False)

        return lax.platform_dependent(*args, cuda=lowered, default=reference)
    if implementation not in IMPLEMENTATIONS:
        raise PolestarError(
            f"unknown implementation {implementation!r} of {op}; "
            f"use None or one of: {', '.join(IMPLEMENTATIONS)}"
        )
    if unsupported:
        raise PolestarError(f"{op} has no kernel for {unsupported}; use implementation='xla'")
    if implementation == "pallas" and target_platform() not in ("gpu", "cuda"):
        raise PolestarError(
            f"implementation='pallas' of {op} needs an NVIDIA GPU and the target here is "
            f"{target_platform()!r}; use None, 'xla' or 'interpret'"
        )
    return kernel(*args, interpret=implementation == "interpret")


def target_platform() -> str:
    """The platform that programs traced here are meant for.

    The device of the mesh in scope (how ahead-of-time compilation names its target), else JAX's
    default back end.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = getattr(mesh, "abstract_device", None)
    return jax.default_backend() if device is None else device.platform
