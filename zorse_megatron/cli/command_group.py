"""What all commands share: conventions, flags after `--`, usage errors as JSON."""

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from zorse_megatron.cli.console import print_json, refusal, reported_errors
from zorse_megatron.files.read_write import one_line_if_not_printed

_WANTS_JSON = "zorse_megatron.wants_json"
USAGE = 2
"""Exit status for options that cannot be read."""
# The base of typer's errors is click's UsageError, of click itself or of the copy that typer has.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_FROM_STATUS = (
    "Run zorse plan --from-status DIR: it plans at the speeds of the run's GPUs, says what a move "
    "would gain, and prints the zorse move command."
)
_USE_ALL = "Leave it out: GPUs that slow the others are left out, unless there is --use-all."
_NO_PRICES = "Plan for a cluster file of the GPUs that you pay for: prices are no longer counted."
_RENAMED = {
    "--wire": "--grad-reduce-dtype",
    "--sets-across-nodes": "--tp-across-nodes",
    "--equal-parts": "--even-tp",
    "--host-activations": "--activation-offload",
}
_SLOW = "Give --slow NAME=FACTOR, for ranks, kinds and links alike."
REMOVED = {
    "compare-plans": "Run zorse compare --simulated: the same in the simulator.",
    "plan --may-leave-out": _USE_ALL,
    **{f"plan {old}": f"It is now {new}." for old, new in _RENAMED.items()},
    "plan --used-cluster": f"{_USE_ALL} The cluster file of the others is written beside --out.",
    "plan --split-backward": "Leave it out: weight gradients are computed apart where that is "
    "faster. --no-split-backward plans without.",
    **dict.fromkeys(("plan --objective", "plan --budget", "plan --frontier"), _NO_PRICES),
    "actions": "Run zorse check PLAN --actions.",
    "follow": _FROM_STATUS,
    "supervise": "Write the batch script again with zorse launch --slurm FILE --elastic: it starts "
    "torchrun on each node.",
    "launch --grow": "Leave it out: a node takes part again as soon as torchrun is started on it, "
    "and under Slurm when the job is.",
    "launch --follow": _FROM_STATUS,
    "simulate": "Run zorse explain: it shows the same, and why. zorse plan --html PAGE has figures "
    "of memory.",
    "schema": "The schema is in the package: zorse_megatron/plan/plan.schema.json.",
    "replan": "Run zorse plan --without NODE --out PLAN: the cluster file of the other nodes is "
    "written beside the plan.",
    "emulate --dilation": "Leave it out: emulated times do not depend on this machine's clock.",
    "explain --no-replan": "Leave it out: zorse explain searches with --search only.",
    **{
        f"{command} --slow-{what}": _SLOW
        for command in ("explain", "emulate", "compare")
        for what in ("rank", "kind", "link")
    },
    "profile show": "Run zorse check PROFILE: it shows the same.",
    "profile import": "Measure with zorse profile measure. For published tables in CSV: "
    "python -m scripts.import_profile, in a checkout of zorse-megatron.",
}
"""Command or option that was removed -> what to do now."""

SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
"""Settings of every command."""


class AnswersInJson(TyperGroup):
    """A group whose commands tell usage errors as JSON, too, where they are given `--json`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remember whether `--json` is among the words before `--`."""
        ours = args[: args.index("--")] if "--" in args else args
        ctx.meta[_WANTS_JSON] = "--json" in ours
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that is named first."""
        _refuse_removed(ctx, args[0])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            _refuse_removed(getattr(error, "ctx", None), getattr(error, "option_name", ""))
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


def _refuse_removed(ctx: Any, word: str) -> None:
    """End with what to do in place of a command or an option that there was once."""
    words, each = [word], ctx
    while each is not None and each.parent is not None:
        words.insert(0, each.info_name)
        each = each.parent
    name = " ".join(words)
    if name not in REMOVED:
        return
    found = f"{'an option' if word.startswith('-') else 'a command'} that was removed"
    with reported_errors(as_json=ctx.meta.get(_WANTS_JSON, False), status=USAGE):
        raise refusal(f"zorse {name}", found, "one that is there", REMOVED[name])


def not_understood(command: Any, name: str, words: Sequence[str]) -> tuple[str, str] | None:
    """What a command cannot read in its words, and what to do; None: it reads all of them."""
    try:
        command.make_context(name, list(words))
    except _UsageError as error:
        said: str = error.format_message()  # type: ignore[attr-defined]
        option = getattr(error, "option_name", "")
        return said, REMOVED.get(f"{name} {option}", f"Run: zorse {name} --help.")
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
