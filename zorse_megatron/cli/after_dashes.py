"""Commands that take a training command's flags after `--`.

`zorse plan --cluster cluster.yaml -- pretrain_gpt.py --num-layers 32 ...`: what follows `--` is
kept apart, so that it is neither read as options of ours nor as names of files.
"""

from typing import Any

import typer
from typer.core import TyperCommand

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
