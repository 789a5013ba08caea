"""What each rank of an emulated job costs, alone or in a tensor-parallel set."""

from zorse_megatron.costs.interface import WHOLE, DtypeCosts, ModelSection, RankPart, SetCosts
from zorse_megatron.emulate.jobs.emulated_job import JobSets
from zorse_megatron.planner.evaluate.simulate_plan import has_sets
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schema.gpus.gpu import ComputeDtype
from zorse_megatron.schema.plan.plan import Plan, Replica
from zorse_megatron.schema.plan.rank_axes import set_of_rank

_SECTIONS: tuple[ModelSection, ...] = ("embedding", "layer", "head")


def costs_of_ranks(inputs: Inputs, plan: Plan | None, world_size: int) -> tuple[DtypeCosts, ...]:
    """Each rank's costs, for its part and in its group's dtype; without a plan, in the job's."""
    if plan is None:
        return (_whole(inputs, None),) * world_size
    return tuple(_of_rank(inputs, plan, rank) for rank in range(world_size))


def sets_of_job(inputs: Inputs, plan: Plan, kinds: tuple[str, ...]) -> JobSets | None:
    """What ranks need to know of their sets; None where each rank is one.

    `kinds`: of each rank's GPU.
    """
    sets = inputs.sets
    if sets is None or not has_sets(plan):
        return None
    ranks = range(plan.world_size)
    return JobSets(
        ranks=tuple(set_of_rank(plan, rank) for rank in ranks),
        memories=tuple(_whole(inputs, _place(plan, rank)[1]).memory for rank in ranks),
        measured=tuple(_measured(sets, kinds, *_place(plan, rank)) for rank in ranks),
        cut_parameters={each: dict(sets.cut_parameters(each)) for each in _SECTIONS},
        sequence_length=inputs.sequence_length,
    )


def _place(plan: Plan, rank: int) -> tuple[Replica, ComputeDtype | None]:
    """The rank's replica, and the type that its group computes in."""
    number, index = plan.replica_of_rank(rank)
    group = plan.groups[number]
    return group.replicas[index], group.compute_dtype


def _whole(inputs: Inputs, dtype: ComputeDtype | None) -> DtypeCosts:
    """Costs of a rank that has all of each layer."""
    if dtype is None:
        return DtypeCosts(compute=inputs.compute, memory=inputs.memory)
    return inputs.by_dtype[dtype]


def _of_rank(inputs: Inputs, plan: Plan, rank: int) -> DtypeCosts:
    replica, dtype = _place(plan, rank)
    part = RankPart.of(replica, rank)
    if part == WHOLE:
        return _whole(inputs, dtype)
    assert inputs.sets is not None
    return inputs.sets.of_rank(part, dtype)


def _measured(
    sets: SetCosts, kinds: tuple[str, ...], replica: Replica, dtype: ComputeDtype | None
) -> frozenset[ModelSection]:
    """Sections of the model whose collectives are in the times of all ranks of a set."""
    if len(replica.ranks) == 1:
        return frozenset()
    computes = {
        rank: sets.of_rank(RankPart.of(replica, rank), dtype).compute for rank in replica.ranks
    }
    return frozenset(
        section
        for section in _SECTIONS
        if all(each.includes_collectives(kinds[rank], section) for rank, each in computes.items())
    )
