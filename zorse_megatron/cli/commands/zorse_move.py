"""`zorse move`: ask a run to go on under another plan, with its state in memory."""

from pathlib import Path
from typing import Annotated

import typer

from zorse_megatron.cli.console import CommandError, print_json, print_plain, reported_errors
from zorse_megatron.cli.options import AsJson, PlanFile
from zorse_megatron.errors import Problem
from zorse_megatron.migration.request import make_request
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import fingerprint, load_plan
from zorse_megatron.schema.status.status import Status
from zorse_megatron.schema.status.status_json import load_status


def move(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="What the run has as --zorse-status.")
    ],
    path: PlanFile,
    as_json: AsJson = False,
) -> None:
    """Ask a run to go on under another plan of the same ranks, without a file or a restart."""
    with reported_errors(as_json=as_json):
        plan = load_plan(path)
        refuse_other_run(load_status(directory), plan, str(path))
        made = make_request(directory, plan)
    if as_json:
        print_json({"ok": True, "plan": fingerprint(plan), "request": str(made)})
        return
    print_plain(
        f"Asked for plan {fingerprint(plan)}. The run's log says, two iterations from now, whether "
        "it goes on under it."
    )


def refuse_other_run(status: Status, plan: Plan, path: str) -> None:
    """Raise CommandError where a run cannot go on under a plan, as far as its status tells."""
    if len(status.ranks) != plan.world_size:
        problem = Problem(
            where=path,
            found=f"a plan of {plan.world_size} ranks",
            expected=f"{len(status.ranks)}, as the run has",
            remedy="Save a checkpoint, and start a job with as many ranks from it.",
        )
    elif status.plan == fingerprint(plan):
        problem = Problem(
            where=path,
            found=f"plan {status.plan}, under which the run is",
            expected="another one",
            remedy="Make one, for instance with zorse plan --from-status.",
        )
    else:
        return
    raise CommandError("The run cannot go on under this plan", [problem])
