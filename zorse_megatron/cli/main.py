"""The `zorse` command; none but `import-hf` and `export-hf` imports torch, none Megatron.

`emulate` and `compare` start processes that do.
"""

from typing import Annotated

import typer

from zorse_megatron import __version__
from zorse_megatron.cli.command_group import Commands, TakesTrainingFlags
from zorse_megatron.cli.commands.check import check
from zorse_megatron.cli.commands.elastic import join
from zorse_megatron.cli.commands.emulate import compare, emulate
from zorse_megatron.cli.commands.explain import explain
from zorse_megatron.cli.commands.launch import launch
from zorse_megatron.cli.commands.measure import discover, doctor, profile
from zorse_megatron.cli.commands.plan import plan
from zorse_megatron.cli.commands.run import checkpoint, move, status
from zorse_megatron.cli.commands.weights import export_hf, import_hf

# What goes wrong on our side is reported with a plain traceback, without local variables.
app = Commands(no_args_is_help=True, pretty_exceptions_enable=False)
for command in (discover, doctor):
    app.command()(command)
for command in (plan, explain, emulate, compare, check, launch, join):
    app.command(cls=TakesTrainingFlags)(command)
for command in (status, move, import_hf, export_hf):
    app.command()(command)
app.add_typer(profile, name="profile")
app.add_typer(checkpoint, name="checkpoint")


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
    """Plan, simulate and launch Megatron-LM training across unequal GPUs."""
