"""Command line: python -m polestar_jax.convert SRC DST."""

import sys

import click

from polestar_jax.convert import convert
from polestar_jax.convert.reader import DTYPES
from polestar_jax.errors import PolestarError


@click.command(name="convert")
@click.argument("src")
@click.argument("dst", type=click.Path())
@click.option("--dtype", type=click.Choice(["keep", *DTYPES]), default="keep", show_default=True)
@click.option("--revision", help="Branch, tag or commit of a hub repository.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
def command(src: str, dst: str, dtype: str, revision: str | None, quiet: bool) -> None:
    """Convert SRC (a directory or a Hugging Face repository) into the new directory DST."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # nothing here needs a device's memory
    kept = None if dtype == "keep" else dtype
    convert(src, dst, kept, revision=revision, progress=not quiet)
    click.echo(f"wrote {dst}")


def main() -> None:
    """Run the command; a user's mistake is one line and exit code 2."""
    try:
        command(standalone_mode=True)
    except PolestarError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
