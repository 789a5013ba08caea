"""Can this job go on under that plan? Asked on each rank, before anything is touched."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.training import get_args

from zorse_megatron.adapter.plan_run import PlanRun
from zorse_megatron.adapter.rank_plan import RankPlan, executable_lists
from zorse_megatron.errors import PlanError, Problem
from zorse_megatron.flags.check import check_arguments
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import parse_plan

_SOURCE = "the next plan"
# What stock has started, or is recording, and would lose or start a second time.
_ONCE = ("profile", "log_straggler", "run_workload_inspector_server", "log_energy")


def checked_plan(run: PlanRun, at: RankPlan, optimizers: Sequence[Any], data: bytes) -> Plan:
    """The plan in `data`, checked as at the start of a job; `at`: that runs. Raises ZorseError."""
    plan = parse_plan(data, source=_SOURCE)
    assert run.check_next is not None
    dtypes = run.check_next(plan)
    args = get_args()
    problems = [*_problems(plan, at, args), *_frozen_problems(optimizers)]
    problems += _other_types(dtypes, at)
    problems += check_arguments(args, plan, again=True)
    if problems:
        raise PlanError("The next plan cannot take over", problems)
    executable_lists(plan, tied=at.tied_embeddings)
    return plan


def _problems(plan: Plan, at: RankPlan, args: Any) -> Iterator[Problem]:
    if plan.global_batch_size != at.plan.global_batch_size:
        yield Problem(
            where=f"{_SOURCE}: global_batch_size",
            found=str(plan.global_batch_size),
            expected=f"{at.plan.global_batch_size}, as in the plan that runs",
            remedy="Plan for the same batch: the training is to stay the same.",
        )
    for name in _ONCE:
        if getattr(args, name, False):
            yield Problem(
                where=f"--{name.replace('_', '-')}",
                found="it in the command",
                expected="a command without it, for a run that goes on under another plan",
                remedy="Save a checkpoint, and start the next plan from it.",
            )


def _frozen_problems(optimizers: Sequence[Any]) -> Iterator[Problem]:
    """The first parameter of this rank that has no optimizer state, which is what moves."""
    frozen = [
        name
        for optimizer in optimizers
        for chunk in optimizer.model_chunks
        for name, parameter in chunk.named_parameters()
        if not parameter.requires_grad
    ]
    if frozen:
        yield Problem(
            where=f"parameter {frozen[0]}",
            found="one that is not trained",
            expected="trained ones only: others have no optimizer state, which is what moves",
            remedy="Save a checkpoint, and start the next plan from it.",
        )


def _other_types(dtypes: Any, at: RankPlan) -> Iterator[Problem]:
    now = [at.dtypes[at.plan.group_of_rank(rank)] for rank in range(at.plan.world_size)]
    if list(dtypes) != now:
        yield Problem(
            where=f"{_SOURCE}: compute_dtype",
            found=", ".join(map(str, dtypes)),
            expected=f"{', '.join(map(str, now))} on the ranks, as they compute now",
            remedy="Let each rank compute in its present type.",
        )
