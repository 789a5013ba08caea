"""What all commands share: conventions, flags after `--`, usage errors as JSON."""

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from zorse_megatron.cli.console import print_json
from zorse_megatron.files.read_write import one_line_if_not_printed

_WANTS_JSON = "zorse_megatron.wants_json"
USAGE = 2
"""Exit status for options that cannot be read."""
# The base of typer's errors is click's UsageError, of click itself or of the copy that typer has.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
"""Settings of every command."""


class AnswersInJson(TyperGroup):
    """A group whose commands tell usage errors as JSON, too, where they are given `--json`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remember whether `--json` is among the words before `--`."""
        ours = args[: args.index("--")] if "--" in args else args
        ctx.meta[_WANTS_JSON] = "--json" in ours
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            if not ctx.meta.get(_WANTS_JSON):
                raise
            print_json({"ok": False, "problems": [_problem(error)]})
            raise typer.Exit(USAGE) from error


class Commands(typer.Typer):
    """All commands; a stdout that takes no more ends them with one line."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(cls=AnswersInJson, context_settings=SETTINGS, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command that the arguments name."""
        with one_line_if_not_printed():
            return super().__call__(*args, **kwargs)


def not_understood(command: Any, name: str, words: Sequence[str]) -> str | None:
    """What a command cannot read in its words; None: it reads all of them."""
    try:
        command.make_context(name, list(words))
    except _UsageError as error:
        said: str = error.format_message()  # type: ignore[attr-defined]
        return said
    return None


def _problem(error: Any) -> dict[str, str]:
    command = error.ctx.command_path if error.ctx is not None else "zorse"
    return {
        "where": command,
        "found": error.format_message(),
        "expected": "options and arguments as in its help",
        "remedy": f"Run: {command} --help.",
    }


_KEY = "zorse_megatron.training_flags"
_OPTIONS = "zorse_megatron.own_options"


class TakesTrainingFlags(TyperCommand):
    """A command whose arguments end at the first `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep what is after `--`, and parse the rest."""
        if "--" in args:
            cut = args.index("--")
            ctx.meta[_KEY] = tuple(args[cut + 1 :])
            args = args[:cut]
        ctx.meta[_OPTIONS] = tuple(args)
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Say in the usage that there may be something after `--`."""
        return [*super().collect_usage_pieces(ctx), "[-- TRAINING_COMMAND]"]


def own_options(context: typer.Context) -> tuple[str, ...]:
    """What was given before `--`, as it was spelled."""
    words: tuple[str, ...] = context.meta[_OPTIONS]
    return words


def training_flags(context: typer.Context) -> tuple[str, ...] | None:
    """What was given after `--`; None without a `--`."""
    flags: tuple[str, ...] | None = context.meta.get(_KEY)
    return flags
