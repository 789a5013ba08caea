"""`zorse actions`: print what each rank executes in one iteration."""

from typing import Annotated

import typer

from zorse_megatron.cli.console import print_plain, reported_errors
from zorse_megatron.cli.options import PlanFile
from zorse_megatron.schema.plan.plan_json import load_plan


def actions(
    path: PlanFile,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this global rank.")] = None,
) -> None:
    """Print what each rank executes in one iteration of a plan, in order."""
    from zorse_megatron.schedules.lower import lower_plan

    with reported_errors():
        plan = load_plan(path)
        lists = lower_plan(plan)
    if rank is not None and rank >= plan.world_size:
        raise typer.BadParameter(
            f"found {rank}; expected 0 to {plan.world_size - 1}, the ranks of {path}",
            param_hint="--rank",
        )
    lines = str(lists).splitlines()
    print_plain("\n".join(lines) if rank is None else lines[rank])
