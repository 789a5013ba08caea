"""Validate a training command: by a run before it imports torch, and by check and launch."""

from collections.abc import Mapping

from zorse_megatron.errors import FlagError, Problem
from zorse_megatron.flags.built_in import left_out_problems
from zorse_megatron.flags.command import Command
from zorse_megatron.flags.flags_against_plan import world_problems
from zorse_megatron.flags.flags_against_split import split_backward_problems
from zorse_megatron.flags.rules import command_problems, interval_problems
from zorse_megatron.flags.unknown import unknown_flag_findings
from zorse_megatron.schema.gpus.gpu import GpuKind
from zorse_megatron.schema.plan.plan import Plan

Findings = tuple[list[Problem], list[str]]
"""Problems, and notes for people."""


def refuse_misfit(
    command: Command,
    plan: Plan,
    *,
    world_size: int,
    kinds: Mapping[str, GpuKind] | None = None,
) -> None:
    """Raise FlagError with all that is wrong with a run's command under its plan.

    Flags that a script may add itself are left to its parser, which is asked later.
    """
    unknown = unknown_flag_findings(command)[0] if command.script is None else []
    problems = [
        *world_problems(plan, world_size),
        *unknown,
        *command.problems,
        *_of_arguments(command, plan, kinds),
        *interval_problems(command.args),
    ]
    if problems:
        raise FlagError("The command does not fit the plan", problems)


def findings_of(
    command: Command,
    plan: Plan | None,
    kinds: Mapping[str, GpuKind] | None = None,
    *,
    is_whole: bool = False,
    by_stock: bool = False,
) -> Findings:
    """Problems and notes of a command that is to be run later, perhaps on another machine.

    Without a plan: of a command that a plan is to be made for. `is_whole`: whether it is run as it
    is, and does not only say what is trained. `by_stock`: unmodified Megatron is to run it, which
    takes all of its own flags.
    """
    problems, notes = unknown_flag_findings(command)
    # A run asks about `split_backward` once it has found out which layers it has.
    split = [] if plan is None else split_backward_problems(command.args, plan)
    return [
        *problems,
        *command.problems,
        *([] if by_stock else [*_of_arguments(command, plan, kinds), *split]),
        *(interval_problems(command.args) if is_whole else ()),
    ], notes


def _of_arguments(
    command: Command, plan: Plan | None, kinds: Mapping[str, GpuKind] | None
) -> list[Problem]:
    """Under the plan, and in our own entry if it is what trains."""
    problems = command_problems(command.args, plan, kinds)
    told = {problem.where for problem in problems}
    lacking = left_out_problems(command.args) if command.script is None else []
    return problems + [each for each in lacking if each.where not in told]
