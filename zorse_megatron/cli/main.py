"""The `zorse` command. Each sub-command has a file of its own; none imports torch or Megatron.

`emulate` and `compare` start processes that do.
"""

from typing import Annotated

import typer

from zorse_megatron import __version__
from zorse_megatron.cli.command_group import Commands, TakesTrainingFlags
from zorse_megatron.cli.commands.zorse_actions import actions
from zorse_megatron.cli.commands.zorse_check import check
from zorse_megatron.cli.commands.zorse_checkpoint import checkpoint
from zorse_megatron.cli.commands.zorse_compare import compare
from zorse_megatron.cli.commands.zorse_discover import discover
from zorse_megatron.cli.commands.zorse_doctor import doctor
from zorse_megatron.cli.commands.zorse_emulate import emulate
from zorse_megatron.cli.commands.zorse_explain import explain
from zorse_megatron.cli.commands.zorse_join import join
from zorse_megatron.cli.commands.zorse_launch import launch
from zorse_megatron.cli.commands.zorse_plan import plan
from zorse_megatron.cli.commands.zorse_profile import profile
from zorse_megatron.cli.commands.zorse_status import move, status

# What goes wrong on our side is reported with a plain traceback, without local variables.
app = Commands(no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(discover)
app.command()(doctor)
app.command(cls=TakesTrainingFlags)(plan)
app.command(cls=TakesTrainingFlags)(explain)
app.command(cls=TakesTrainingFlags)(emulate)
app.command(cls=TakesTrainingFlags)(compare)
app.command(cls=TakesTrainingFlags)(check)
app.command(cls=TakesTrainingFlags)(launch)
app.command(cls=TakesTrainingFlags)(join)
app.command()(status)
app.command()(move)
app.command()(actions)
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
