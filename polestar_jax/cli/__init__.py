"""The command line, `polestar-jax`."""

from polestar_jax.cli.main import cli, main

__all__ = ["cli", "main"]
