"""From a plan to one list of actions per rank; what cannot be executed is refused by name.

The plan's schedule is simulated once, which gives an order to all that happens; each rank's list is
its part of that sequence, so no order of execution can deadlock (see `sequence`). From which point
of its list on a rank has a buffer for what it receives is a function of the list
(`receives_posted_at`).

Recomputation and the offload of optimizer state and activations change what an action does, not
which actions there are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from zorse_megatron.errors import PlanError, Problem
from zorse_megatron.plan.divided_replicas import (
    divided_problems,
    replicas_of_several_ranks,
    sizes_of,
)
from zorse_megatron.plan.memory_settings import (
    MemorySettings,
    ranks_that_offload,
    said_settings,
)
from zorse_megatron.plan.plan import Group, Plan, has_equal_tp_shards
from zorse_megatron.plan.rules import STOCK_EXPERT_PARALLEL
from zorse_megatron.schedule.action_sequence import (
    Event,
    GroupEvent,
    cut_into_lists,
    reductions,
    update_actions,
)
from zorse_megatron.schedule.actions import Action, ActionLists
from zorse_megatron.schedule.micro_batch_order import Pipeline
from zorse_megatron.schedule.pipeline_schedules import (
    RESIDENT,
    Worker,
    parameters_setting,
    policy_of,
    simulate_breadth_first,
)
from zorse_megatron.schedule.samples import Boundaries
from zorse_megatron.schedule.transfer_windows import with_gradient_offloads


def lower_plan(
    plan: Plan,
    *,
    forward_only: bool = False,
    tied: bool | None = None,
    most_in_flight: Mapping[Worker, int] | None = None,
) -> ActionLists:
    """Lower a plan to action lists, for a training step or (forward_only) an evaluation step.

    `tied`: whether the embedding and the output weight are one; None takes it from the plan's
    model. `most_in_flight`: what `in_flight_limits` may not exceed.

    Raises PlanError with everything that cannot be lowered.
    """
    return _lowered(plan, forward_only=forward_only, tied=tied, most_in_flight=most_in_flight)[0]


def in_flight_limits(plan: Plan) -> Mapping[Worker, int]:
    """`Policy.limits` of the plan's schedule; empty where that has none."""
    return {} if plan.schedule.name == "breadth_first" else policy_of(plan).limits


def lower_unless_stuck(plan: Plan) -> ActionLists | None:
    """A training step's lists; None where the simulation gets stuck on its own rules.

    It then prefers one of several equal replicas.
    """
    lists, was_stuck = _lowered(plan, forward_only=False, tied=None)
    return None if was_stuck else lists


def _lowered(
    plan: Plan,
    *,
    forward_only: bool,
    tied: bool | None,
    most_in_flight: Mapping[Worker, int] | None = None,
) -> tuple[ActionLists, bool]:
    """The lists, and whether the simulation got stuck."""
    refuse_unlowered(plan)
    if tied is None:
        tied = bool(plan.model.tied_embeddings)
    boundaries = Boundaries(plan)
    events, group_events, was_stuck = _simulate(
        plan, boundaries, most_in_flight or {}, forward_only=forward_only
    )
    lists: list[Sequence[Action]] = list(cut_into_lists(plan, boundaries, events, group_events))
    if not forward_only:
        gathers = parameters_setting(plan) == RESIDENT
        for number, group in enumerate(plan.groups):
            update = update_actions(plan, number, tied=tied, gathers=gathers)
            for rank in group.ranks:
                lists[rank] = [*lists[rank], *update]
        ends = {0, len(plan.chunks) - 1} if tied else set()
        for rank in ranks_that_offload(plan, "gradients"):
            lists[rank] = list(with_gradient_offloads(lists[rank], stay=ends))
    return ActionLists(ranks=tuple(map(tuple, lists))), was_stuck


def _simulate(
    plan: Plan, boundaries: Boundaries, most: Mapping[Worker, int], *, forward_only: bool
) -> tuple[Sequence[Event], Sequence[GroupEvent], bool]:
    """All events, and whether the simulation got stuck on its own rules."""
    if plan.schedule.name == "breadth_first":
        return *simulate_breadth_first(plan, boundaries, forward_only=forward_only), False
    policy = policy_of(plan)
    limits = {key: min(limit, most.get(key, limit)) for key, limit in policy.limits.items()}
    policy = replace(policy, limits=limits)
    pipeline = Pipeline(plan, boundaries, policy, forward_only=forward_only)
    events = list(pipeline.simulate())
    group_events = [] if forward_only else reductions(boundaries, events)
    return events, group_events, pipeline.was_stuck


# What a valid plan may ask for but this version cannot execute: all of it, by name.


def refuse_unsupported(plan: Plan, source: str = "The plan") -> None:
    """Raise PlanError with everything in the plan that this version cannot execute."""
    problems = tuple(_not_executed(plan))
    if problems:
        raise PlanError(f"{source} is valid but asks for what is not executed yet", problems)


def refuse_unlowered(plan: Plan) -> None:
    """Raise PlanError with everything in the plan for which there are no lists of actions."""
    problems = tuple(_not_lowered(plan))
    if problems:
        raise PlanError("The plan is valid but asks for what has no actions", problems)


def _not_lowered(plan: Plan) -> Iterator[Problem]:
    degree = plan.schedule.parameters.get(STOCK_EXPERT_PARALLEL, "1")
    if int(degree) > 1:
        yield Problem(
            where=f"schedule.parameters.{STOCK_EXPERT_PARALLEL}",
            found=degree,
            expected="nothing: this is expert parallelism of unmodified Megatron alone",
            remedy="Start it with zorse launch --stock, or remove the setting and let ranks of a "
            "replica share experts (expert_parallel).",
        )
    of_replicas = tuple(_of_several_ranks(plan))
    for number in range(len(plan.groups)):
        chunks = plan.chunks_of_group(number)
        if plan.schedule.name == "1f1b" and len(chunks) > 1:
            yield Problem(
                where=f"groups[{number}]",
                found=f"{len(chunks)} chunks {list(chunks)}",
                expected="one chunk per group under 1f1b",
                remedy="Use the schedule interleaved or breadth_first, or give the group one "
                "range of layers.",
            )
        halved = [index for index, each in enumerate(plan.groups[number].replicas) if each.halved]
        if plan.schedule.name == "breadth_first" and halved:
            yield Problem(
                where=f"groups[{number}].replicas[{halved[0]}].halved",
                found="halves of micro-batches under breadth_first",
                expected="them under interleaved or 1f1b, where pipelines fill and drain once",
                remedy="Remove halved.",
            )
        yield from (each for each in of_replicas if each.where.startswith(f"groups[{number}]."))
    yield from _not_released(plan)


def _not_released(plan: Plan) -> Iterator[Problem]:
    """Parameters wait in the host while they are released, gradients when they have been reduced
    chunk by chunk; resident chunks' stay unsharded."""
    if parameters_setting(plan) != RESIDENT:
        return
    for name, where in _offloads_of_shards(plan):
        yield Problem(
            where=f"{where}.{name}",
            found="true",
            expected=f"a schedule that releases {name}",
            remedy='Use the schedule breadth_first with "parameters": "per_pass", or keep the '
            f"{name} on the GPU.",
        )


def _not_executed(plan: Plan) -> Iterator[Problem]:
    yield from _not_lowered(plan)
    offloads = tuple(f"{where}.{name}" for name, where in _offloads_of_shards(plan))
    for number, group in enumerate(plan.groups):
        here = f"groups[{number}]."
        yield from _mixed_tp_replicas(number, group, [at for at in offloads if at.startswith(here)])


def _offloads_of_shards(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield (setting, place of `offload`) where shards of parameters or gradients are offloaded."""
    for where in _settings_at(plan, lambda each: each.offload.parameters):
        yield "parameters", where
    for where in _settings_at(plan, lambda each: each.offload.gradients):
        yield "gradients", where


def _settings_at(plan: Plan, is_meant: Callable[[MemorySettings], bool]) -> Iterator[str]:
    """Yield each place of `offload` once, of the ranks that are meant."""
    said = said_settings(plan)
    yield from dict.fromkeys(each.offload_at for each in said if is_meant(each.settings))


def _mixed_tp_replicas(
    number: int, group: Group, offloads_of_shards: Sequence[str]
) -> Iterator[Problem]:
    """What replicas that cut their layers differently cannot do."""
    if has_equal_tp_shards(group):
        return
    degrees = " and ".join(str(degree) for degree in sorted({len(r.ranks) for r in group.replicas}))
    shares = any(replica.expert_parallel for replica in group.replicas)
    found = "replicas that share experts" if shares else f"replicas of {degrees} ranks"
    expected = "all experts on each rank" if shares else "replicas of equal numbers of ranks"
    settings = {
        f"groups[{number}].grad_reduce_dtype": group.grad_reduce_dtype,
        **dict.fromkeys(offloads_of_shards, True),
    }
    for where, value in settings.items():
        if value:
            yield Problem(
                where=where,
                found=f"{str(value).lower()}, with {found}",
                expected=f"{expected} with it",
                remedy=f"Remove it, or give the replicas of this group {expected}.",
            )


def _of_several_ranks(plan: Plan) -> Iterator[Problem]:
    for where, replica in replicas_of_several_ranks(plan):
        if replica.ranks != tuple(sorted(replica.ranks)):
            yield Problem(
                where=where,
                found=f"{list(replica.ranks)}",
                expected=f"{sorted(replica.ranks)}, in ascending order",
                remedy="Process groups number their ranks in this order, and with them the parts.",
            )
    yield from divided_problems(plan, sizes_of(plan))
