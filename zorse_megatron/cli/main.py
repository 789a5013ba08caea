"""The `zorse` command. Each sub-command has a file of its own; none needs torch or Megatron."""

from typing import Annotated

import typer

from zorse_megatron import __version__
from zorse_megatron.cli.actions import actions
from zorse_megatron.cli.check import check
from zorse_megatron.cli.profile import profile
from zorse_megatron.cli.schema import schema

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.command()(check)
app.command()(schema)
app.command()(actions)
app.add_typer(profile, name="profile")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"zorse-megatron {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_print_version),
    ] = False,
) -> None:
    """Look at plans: train one model across unequal groups of GPUs."""
