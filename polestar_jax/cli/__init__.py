"""The command line, `polestar-jax`."""

from polestar_jax.cli.group import cli, main

__all__ = ["cli", "main"]
