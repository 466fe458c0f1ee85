"""Options that several commands share."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from polestar_jax.errors import PolestarError

F = TypeVar("F", bound=Callable[..., Any])

DTYPES = ("float32", "bfloat16", "float16")

dtype_option = click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Weights and matrix products  [default: as stored].",
)


def compilation_cache_option(command: F) -> F:
    """`--compilation-cache`: keep compiled programs on disk; takes effect while parsing."""
    return click.option(
        "--compilation-cache",
        metavar="DIRECTORY|off",
        expose_value=False,
        callback=lambda context, parameter, value: use_compilation_cache(value),
        help="Where compiled programs are kept for the next run  [default: "
        "JAX_COMPILATION_CACHE_DIR, else polestar-jax in the user's cache directory].",
    )(command)


def use_compilation_cache(choice: str | None) -> None:
    """Keep compiled programs in the directory `choice`; "off" keeps none, None is the default.

    Raises:
        PolestarError: a directory was named that cannot be made.
    """
    import jax

    if choice == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if choice is None and "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = base / "polestar-jax" if choice is None else Path(choice)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if choice is None:  # no writable home: compile every time
            return
        raise PolestarError(f"cannot make the directory {choice}: {error.strerror}") from None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
