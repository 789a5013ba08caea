"""Simulates one iteration of a plan: the entry to this package."""

from collections.abc import Mapping, Sequence

from zorse_megatron.costs.interface import CommCost, ComputeCost, DtypeCosts, MemoryCost, SetCosts
from zorse_megatron.gpus.gpu import ComputeDtype
from zorse_megatron.inputs.model import JobRecompute
from zorse_megatron.plan.plan import Plan
from zorse_megatron.schedule.actions import ActionLists, Kind
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.simulate.action_costs import ActionCosts
from zorse_megatron.simulate.assumptions import (
    NO_PERTURBATION,
    RUNTIME,
    STOCK_1F1B,
    STOCK_INTERLEAVED,
    Framework,
    Perturbation,
    SimulationError,
)
from zorse_megatron.simulate.equal_ranks import EqualRanks, RankSets, find_equal_ranks
from zorse_megatron.simulate.network import NetworkLoads
from zorse_megatron.simulate.rank_bytes import RankSizes
from zorse_megatron.simulate.result import SimulationResult
from zorse_megatron.simulate.tasks import Timeline, run_program
from zorse_megatron.simulate.translate import translate

_MERGED = (RUNTIME, STOCK_1F1B, STOCK_INTERLEAVED)
"""Those that run equal ranks alike, as `equal_ranks` asks for."""


def simulate(
    plan: Plan,
    compute: ComputeCost,
    memory: MemoryCost,
    comm: CommCost,
    kinds: Sequence[str],
    *,
    sequence_length: int,
    forward_only: bool = False,
    perturbation: Perturbation | None = None,
    fixed_bytes: Sequence[int] | None = None,
    lists: ActionLists | None = None,
    merge_equal_ranks: bool = False,
    framework: Framework = RUNTIME,
    by_dtype: Mapping[ComputeDtype, DtypeCosts] | None = None,
    recompute: JobRecompute | None = None,
    sets: SetCosts | None = None,
) -> SimulationResult:
    """Simulate one iteration of the lists that the runtime executes for `plan`.

    `kinds`: the kind of GPU of each global rank. `fixed_bytes`: for each rank what is always taken
    (CUDA context, buffers of NCCL). `lists`: other lists than `action_lists` gives.
    `merge_equal_ranks`: simulate one of several equal ranks where the result is proven to be the
    same (see `equal_ranks`), all of them where it is not; with it, spans exist of one rank each.
    `sets`: costs of replicas of several ranks, by how many. Without them one rank of each such
    replica is simulated, which must all be of one size (see `equal_ranks`); `comm` and the other
    costs are then for that tensor-parallel size, and `lists` for the plan of
    `RankSets.one_rank_each`.
    `by_dtype`: the costs of groups with a `compute_dtype`; those of other types count as the job's.
    `recompute`: what is recomputed in groups that do not say; None: nothing.

    Raises PlanError for a plan that cannot be lowered, SimulationError for lists that cannot be
    executed or inputs that do not fit, LookupError for a kind that `compute` does not know.
    """
    perturbation = perturbation or NO_PERTURBATION
    fixed = tuple(fixed_bytes or [0] * plan.world_size)
    if len(fixed) != plan.world_size:
        raise SimulationError(
            f"found fixed_bytes for {len(fixed)} ranks; expected {plan.world_size}"
        )
    if perturbation.spells:
        raise SimulationError("found spells of slowness; expected none: one iteration is simulated")
    equal_sets = RankSets.of(plan) if sets is None else None
    has_sets = any(len(r.ranks) > 1 for group in plan.groups for r in group.replicas)
    by_dtype = by_dtype or {}
    memories = {dtype: costs.memory for dtype, costs in by_dtype.items()}
    sizes = RankSizes(plan, memory, framework, memories, recompute, kinds=kinds, sets=sets)
    equal = None
    may_merge = not has_sets and framework in _MERGED and perturbation.treats_kinds_alike
    if merge_equal_ranks and lists is None and may_merge:
        equal = find_equal_ranks(sizes, comm, kinds, fixed, forward_only=forward_only)
    if equal is None:
        lowered = plan if equal_sets is None else equal_sets.one_rank_each()
        whole = lists or action_lists(lowered, forward_only=forward_only)
        if equal_sets is None:
            equal = EqualRanks.all_different(plan, whole)
        else:
            equal = equal_sets.stand_ins(whole)
    loads = NetworkLoads(comm, link_factors=perturbation.link_factors, equal=equal.links)
    computes = {dtype: costs.compute for dtype, costs in by_dtype.items()}
    costs = ActionCosts(
        sizes, compute, loads, kinds, computes, sets=sets, sequence_length=sequence_length
    )
    program = translate(equal.lists, costs, perturbation, stands_in=equal.stands_in)
    timeline = Timeline(
        program=program,
        times=run_program(program),
        sizes=sizes,
        fixed_bytes=fixed,
        forward_only=forward_only,
    )
    iteration_s, tokens = timeline.end_s, plan.global_batch_size * sequence_length
    return SimulationResult(
        iteration_s=iteration_s,
        tokens_per_s=tokens / iteration_s if iteration_s else float("inf"),
        stands_in=equal.stands_in,
        timeline=timeline,
    )


def action_lists(plan: Plan, *, forward_only: bool = False) -> ActionLists:
    """The plan's lists, also where the runtime cannot execute all of the plan yet."""
    return lower_plan(plan, forward_only=forward_only)


# How long each rank computes for one micro-batch: what a run's own times are compared with.


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
