"""What a valid plan may ask for but this version cannot execute: all of it, by name."""

from collections.abc import Callable, Iterator, Sequence

from zorse_megatron.errors import PlanError, Problem
from zorse_megatron.schedules.breadth_first import RESIDENT, parameters_setting
from zorse_megatron.schema.plan.memory_settings import MemorySettings, said_settings
from zorse_megatron.schema.plan.plan import Group, Plan
from zorse_megatron.schema.plan.rank_axes import holds_equal_parts
from zorse_megatron.schema.plan.set_rules import set_problems, sets_of, sizes_of


def refuse_unsupported(plan: Plan, source: str = "The plan") -> None:
    """Raise PlanError with everything in the plan that this version cannot execute."""
    problems = tuple(_not_executed(plan))
    if problems:
        raise PlanError(f"{source} is valid but asks for what is not executed yet", problems)


def refuse_unlowered(plan: Plan, source: str = "The plan") -> None:
    """Raise PlanError with everything in the plan for which there are no lists of actions."""
    problems = tuple(_not_lowered(plan))
    if problems:
        raise PlanError(f"{source} is valid but asks for what has no actions", problems)


def _not_lowered(plan: Plan) -> Iterator[Problem]:
    of_sets = tuple(_tensor_parallel(plan))
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
        yield from (each for each in of_sets if each.where.startswith(f"groups[{number}]."))
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
        yield from _unlike_replicas(number, group, [at for at in offloads if at.startswith(here)])


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


def _unlike_replicas(
    number: int, group: Group, offloads_of_shards: Sequence[str]
) -> Iterator[Problem]:
    """What replicas that cut their layers differently cannot do."""
    if holds_equal_parts(group):
        return
    degrees = " and ".join(str(degree) for degree in sorted({len(r.ranks) for r in group.replicas}))
    settings = {
        f"groups[{number}].gradient_wire": group.gradient_wire,
        **dict.fromkeys(offloads_of_shards, True),
    }
    for where, value in settings.items():
        if value:
            yield Problem(
                where=where,
                found=f"{str(value).lower()}, with replicas of {degrees} ranks",
                expected="replicas of equal numbers of ranks with it",
                remedy="Remove it, or give the replicas of this group equal numbers of ranks.",
            )


def _tensor_parallel(plan: Plan) -> Iterator[Problem]:
    for where, replica in sets_of(plan):
        if replica.ranks != tuple(sorted(replica.ranks)):
            yield Problem(
                where=where,
                found=f"{list(replica.ranks)}",
                expected=f"{sorted(replica.ranks)}, in ascending order",
                remedy="Process groups number their ranks in this order, and with them the parts.",
            )
    yield from set_problems(plan, sizes_of(plan))
