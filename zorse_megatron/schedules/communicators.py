"""Which NCCL communicators a job needs, and how many of a GPU's processors each may use.

A communicator runs its kernels one after the other, on a stream of its own. A kernel that has
started occupies its processors until all of its ranks have come, so kernels of different
communicators that can wait at once must fit onto a GPU together, beside a computation: if one had
to wait for the end of another, two ranks could each wait for what the other has not room for.
`waiting_kernels` bounds what can wait at once; `scripts.launch_order` shows such hangs, and that
there are none within the bound.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zorse_megatron.schedules.actions import ActionLists
from zorse_megatron.schedules.links import links_of
from zorse_megatron.schedules.list_queries import edges_of
from zorse_megatron.schedules.lower import lower_plan
from zorse_megatron.schedules.waiting_kernels import most_waiting
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.rank_axes import communicating_ranks

# All communicators of a GPU share this part of its multiprocessors, or have one each if that is
# more.
_PART_FOR_COMMUNICATION = 0.25
# NCCL's own limit is 32; a link of 25 GB/s is full with far fewer.
_MOST_CTAS = 16
WORLD_CTAS = 4
"""Of the communicator of all ranks, which sums numbers and exchanges a tied embedding."""
# Lowering a larger plan only to count kernels takes longer than is worth while.
_MOST_RANKS_COUNTED = 2048


@dataclass(frozen=True, kw_only=True)
class Communicator:
    """Ranks that communicate, for one use.

    link: from the first of two ranks to the second. group: what ranks of a plan's group reduce and
    gather. region, across: the same in a hierarchical group, within a region and between regions.
    set: what a tensor-parallel set does within its layers. world: what all ranks sum.
    """

    use: Literal["link", "group", "region", "across", "set", "world"]
    ranks: tuple[int, ...]


def communicators_of(plan: Plan, each: Iterable[ActionLists]) -> tuple[Communicator, ...]:
    """All that the lists need, in one order that every rank derives. One rank needs none."""
    return _communicators(plan, edges_of(each))


def planned_communicators(plan: Plan) -> tuple[Communicator, ...]:
    """The same for a plan's lists of training, without lowering it."""
    return _communicators(plan, links_of(plan))


def _communicators(plan: Plan, edges: Iterable[tuple[int, int]]) -> tuple[Communicator, ...]:
    world = Communicator(use="world", ranks=tuple(range(plan.world_size)))
    groups = [
        Communicator(use=use, ranks=ranks)
        for group in plan.groups
        for use, ranks in communicating_ranks(group)
    ]
    sets = [
        Communicator(use="set", ranks=replica.ranks)
        for group in plan.groups
        for replica in group.replicas
    ]
    links = [Communicator(use="link", ranks=edge) for edge in edges]
    return tuple(found for found in (world, *groups, *sets, *links) if len(found.ranks) > 1)


def resident_kernels(communicators: Iterable[Communicator]) -> Counter[int]:
    """Rank -> how many communicators it is in: the most kernels that could wait at once."""
    return Counter(rank for communicator in communicators for rank in communicator.ranks)


def max_ctas(
    communicators: Sequence[Communicator], num_sms: Mapping[int, int] | Sequence[int]
) -> dict[Communicator, int]:
    """Communicator -> `max_ctas` of its NCCL configuration, the same on all of its ranks.

    `num_sms`: rank -> multiprocessors of its GPU. See `crowded_ranks` for those that are too few.
    """
    budgets = {
        rank: max(1, most_ctas(num_sms[rank]) // count)
        for rank, count in resident_kernels(communicators).items()
    }
    return {
        communicator: WORLD_CTAS
        if communicator.use == "world"
        else min(_MOST_CTAS, *(budgets[rank] for rank in communicator.ranks))
        for communicator in communicators
    }


def crowded_ranks(plan: Plan, num_sms: Mapping[int, int] | Sequence[int]) -> dict[int, int]:
    """Rank -> multiprocessors that its waiting kernels may hold, where they may hold all of them.

    No rank's do where this is empty, so that no two ranks can wait for each other's. Looks at
    lists only if all communicators of some rank together would fill its GPU; of plans with more
    ranks than `_MOST_RANKS_COUNTED` it does not, and takes them for waiting at once.
    """
    ctas = max_ctas(planned_communicators(plan), num_sms)
    held: Counter[int] = Counter()
    for communicator, number in ctas.items():
        for rank in communicator.ranks:
            held[rank] += number
    suspects = {rank: number for rank, number in held.items() if number >= num_sms[rank]}
    if suspects and plan.world_size <= _MOST_RANKS_COUNTED:
        suspects = most_held(plan, suspects, ctas)
    return {rank: n for rank, n in sorted(suspects.items()) if n >= num_sms[rank]}


def most_held(plan: Plan, ranks: Iterable[int], ctas: Mapping[Communicator, int]) -> dict[int, int]:
    """Rank -> the most multiprocessors that its waiting kernels hold, in training or evaluation."""
    links = {(c.ranks[0], c.ranks[1]): number for c, number in ctas.items() if c.use == "link"}
    others: Counter[int] = Counter()
    for each, number in ctas.items():
        if each.use != "link":
            for rank in each.ranks:
                others[rank] += number
    steps = [lower_plan(plan, forward_only=forward_only) for forward_only in (False, True)]
    return {
        rank: max(
            most_waiting(rank, step.ranks[rank], link_ctas=links, others=others[rank])
            for step in steps
        )
        for rank in ranks
    }


def crowding_note(plan: Plan, num_sms: Mapping[int, int] | Sequence[int]) -> str | None:
    """Say so of a plan under which kernels that wait for other ranks may fill a GPU."""
    crowded = crowded_ranks(plan, num_sms)
    if not crowded:
        return None
    worst = max(crowded, key=lambda rank: crowded[rank] / num_sms[rank])
    return (
        f"kernels of NCCL that wait for other ranks may fill the GPUs of {len(crowded)} of "
        f"{plan.world_size} ranks, for example of rank {worst}, where they hold up to "
        f"{crowded[worst]} multiprocessors of {num_sms[worst]}: ranks could wait for each other "
        "forever. Fewer replicas in neighbouring groups, or micro-batch sizes that divide each "
        "other, need fewer."
    )


def most_ctas(num_sms: int) -> int:
    """What all communicators of a GPU may use together, unless that is less than one each."""
    return int(_PART_FOR_COMMUNICATION * num_sms)
