"""Which NCCL communicators a job needs, and how many of a GPU's processors each may use.

A communicator runs its kernels one after the other, on a stream of its own. A kernel that has
started occupies its processors until all of its ranks have come, so kernels of different
communicators must fit onto a GPU at once: if one had to wait for the end of another, two ranks
could each wait for what the other has not room for. `scripts.launch_order` shows such hangs, and
that there are none where all fit.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zorse_megatron.schedules.actions import ActionLists
from zorse_megatron.schedules.links import links_of
from zorse_megatron.schedules.list_queries import edges_of
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.rank_axes import data_parallel_ranks

# Kernels that wait for other ranks hold this part of a GPU's multiprocessors, or one each if that
# is more; but at least half are left to the computations that the others wait for.
_PART_FOR_COMMUNICATION = 0.25
_MOST_FOR_COMMUNICATION = 0.5
# NCCL's own limit is 32; a link of 25 GB/s is full with far fewer.
_MOST_CTAS = 16


@dataclass(frozen=True, kw_only=True)
class Communicator:
    """Ranks that communicate, for one use.

    link: from the first of two ranks to the second. group: what ranks of a plan's group reduce and
    gather. set: what a tensor-parallel set does within its layers. world: what all ranks sum.
    """

    use: Literal["link", "group", "set", "world"]
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
        Communicator(use="group", ranks=ranks)
        for group in plan.groups
        for ranks in data_parallel_ranks(group)
    ]
    sets = [
        Communicator(use="set", ranks=replica.ranks)
        for group in plan.groups
        for replica in group.replicas
    ]
    links = [Communicator(use="link", ranks=edge) for edge in edges]
    return tuple(found for found in (world, *groups, *sets, *links) if len(found.ranks) > 1)


def resident_kernels(communicators: Iterable[Communicator]) -> Counter[int]:
    """Rank -> how many kernels may wait for other ranks at once: one for each communicator."""
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
        communicator: min(_MOST_CTAS, *(budgets[rank] for rank in communicator.ranks))
        for communicator in communicators
    }


def crowded_ranks(
    communicators: Iterable[Communicator], num_sms: Mapping[int, int] | Sequence[int]
) -> dict[int, int]:
    """Rank -> its communicators, where their kernels would hold more than half of its GPU."""
    return {
        rank: count
        for rank, count in sorted(resident_kernels(communicators).items())
        if count > _MOST_FOR_COMMUNICATION * num_sms[rank]
    }


def crowding_note(
    communicators: Iterable[Communicator], num_sms: Mapping[int, int] | Sequence[int]
) -> str | None:
    """Say so of a plan under which kernels that wait for other ranks may fill a GPU."""
    crowded = crowded_ranks(communicators, num_sms)
    if not crowded:
        return None
    worst = max(crowded, key=lambda rank: crowded[rank] / num_sms[rank])
    return (
        f"{len(crowded)} of {len(num_sms)} ranks exchange data over more NCCL communicators than "
        f"half of their GPU's multiprocessors, for example rank {worst}: {crowded[worst]} on "
        f"{num_sms[worst]}. If the kernels of all of them waited at once, ranks could wait for "
        "each other forever. Fewer replicas in neighbouring groups, or micro-batch sizes that "
        "divide each other, need fewer."
    )


def most_ctas(num_sms: int) -> int:
    """What all communicators of a GPU may use together, unless that is less than one each."""
    return int(_PART_FOR_COMMUNICATION * num_sms)
