"""How long each rank computes for one micro-batch: what a run's own times are compared with."""

from collections.abc import Mapping, Sequence

from zorse_megatron.costs.interface import CommCost, ComputeCost, DtypeCosts, MemoryCost, SetCosts
from zorse_megatron.schedules.actions import Kind
from zorse_megatron.schema.gpus.gpu import ComputeDtype
from zorse_megatron.schema.model.computing import JobRecompute
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.simulate.action_costs import ActionCosts
from zorse_megatron.simulate.framework import RUNTIME
from zorse_megatron.simulate.network_loads import NetworkLoads
from zorse_megatron.simulate.rank_sizes import RankSizes


def micro_batch_times(
    plan: Plan,
    compute: ComputeCost,
    memory: MemoryCost,
    comm: CommCost,
    kinds: Sequence[str],
    *,
    sequence_length: int,
    by_dtype: Mapping[ComputeDtype, DtypeCosts],
    recompute: JobRecompute | None,
    sets: SetCosts | None,
) -> tuple[float, ...]:
    """Rank -> seconds of a micro-batch through all of its chunks, forward and backward.

    Ranks of a set wait for one another, so all take as long as the slowest, collectives included.
    0 where a rank runs none. The arguments are those of `iteration.simulate`.
    """
    memories = {dtype: costs.memory for dtype, costs in by_dtype.items()}
    computes = {dtype: costs.compute for dtype, costs in by_dtype.items()}
    costs = ActionCosts(
        RankSizes(plan, memory, RUNTIME, memories, recompute, kinds=kinds, sets=sets),
        compute,
        NetworkLoads(comm),
        kinds,
        computes,
        sets=sets,
        sequence_length=sequence_length,
    )
    found = [0.0] * plan.world_size
    for number, group in enumerate(plan.groups):
        for replica in group.replicas:
            if replica.num_microbatches:
                seconds = sum(
                    _chunk_s(costs, replica.ranks, chunk, bool(group.split_backward))
                    + (0.0 if sets is None else _inside_s(costs, replica.ranks, chunk))
                    for chunk in plan.chunks_of_group(number)
                )
                for rank in replica.ranks:
                    found[rank] = seconds
    return tuple(found)


def _chunk_s(costs: ActionCosts, ranks: Sequence[int], chunk: int, splits: bool) -> float:
    kinds = [Kind.FORWARD, Kind.BACKWARD, *([Kind.WEIGHT_GRADIENT] if splits else [])]
    total_s = 0.0
    for kind in kinds:
        phases = [costs.seconds(rank, chunk, kind, splits=splits) for rank in ranks]
        total_s += sum(map(max, zip(*phases, strict=True)))
    return total_s


def _inside_s(costs: ActionCosts, ranks: tuple[int, ...], chunk: int) -> float:
    if len(ranks) == 1:
        return 0.0
    times = costs.set_collectives(ranks, chunk, gathers=False)
    return float(times.forward_s + times.backward_s)
