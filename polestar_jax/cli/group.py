"""The group of commands, and what all share: errors and interruption."""

import os
import sys
from typing import Any, NoReturn

import click

from polestar_jax.cli.demo import demo
from polestar_jax.cli.generate import generate
from polestar_jax.cli.info import info
from polestar_jax.convert.__main__ import command as convert
from polestar_jax.errors import PolestarError

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class UserError(click.ClickException):
    """A mistake of the user: one sentence on standard error, exit code 2."""

    exit_code = 2


class Commands(click.Group):
    """A group that turns user errors into sentences and Ctrl-C into its usual exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PolestarError as error:
            raise UserError(str(error)) from None
        except RuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise UserError(
                "the device ran out of memory; lower --batch-size or --gen-length "
                "(polestar-jax info says what a batch needs)"
            ) from None
        except KeyboardInterrupt:
            click.echo("interrupted; the same command resumes a file given by --output", err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=Commands)
@click.version_option(package_name="polestar-jax")
def cli() -> None:
    """Decode diffusion language models (LLaDA, Dream) fast."""


for command in (demo, generate, convert, info):
    cli.add_command(command)


def main() -> NoReturn:
    """Entry point of the `polestar-jax` command."""
    try:
        code = cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort:
        code = INTERRUPTED
    if code == INTERRUPTED:
        # A program may still be running on the device; an orderly exit would wait for its end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)
    sys.exit(code)
