"""Simulates one iteration of a plan: the entry to this package."""

from collections.abc import Sequence
from dataclasses import replace

from zorse_megatron.costs.interface import JobCosts
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
from zorse_megatron.simulate.equal_ranks import EqualRanks, find_equal_ranks
from zorse_megatron.simulate.network import NetworkLoads
from zorse_megatron.simulate.rank_bytes import RankSizes
from zorse_megatron.simulate.result import SimulationResult
from zorse_megatron.simulate.tasks import Timeline, run_program
from zorse_megatron.simulate.translate import translate

_MERGED = (RUNTIME, STOCK_1F1B, STOCK_INTERLEAVED)
"""Those that run equal ranks alike, as `equal_ranks` asks for."""


def simulate(
    plan: Plan,
    costs: JobCosts,
    *,
    perturbation: Perturbation = NO_PERTURBATION,
    fixed_bytes: Sequence[int] | None = None,
    lists: ActionLists | None = None,
    merge_equal_ranks: bool = False,
    framework: Framework = RUNTIME,
) -> SimulationResult:
    """Simulate one iteration of the lists that the runtime executes for `plan`.

    `fixed_bytes`: for each rank what is always taken (CUDA context, buffers of NCCL). `lists`:
    other lists than `lower_plan` gives. `merge_equal_ranks`: simulate one of several equal ranks
    where the result is proven to be the same (see `equal_ranks`), all of them where it is not; with
    it, spans exist of one rank each.

    Raises PlanError for a plan that cannot be lowered, SimulationError for lists that cannot be
    executed or inputs that do not fit, LookupError for a kind that `costs` do not know.
    """
    fixed = tuple(fixed_bytes or [0] * plan.world_size)
    if len(fixed) != plan.world_size:
        raise SimulationError(
            f"found fixed_bytes for {len(fixed)} ranks; expected {plan.world_size}"
        )
    if perturbation.spells:
        raise SimulationError("found spells of slowness; expected none: one iteration is simulated")
    sizes = RankSizes(plan, costs, framework)
    equal = None
    may_merge = replace(framework, expert_parallel=1) in _MERGED and perturbation.treats_kinds_alike
    if merge_equal_ranks and lists is None and may_merge:
        equal = find_equal_ranks(sizes, fixed)
    if equal is None:
        equal = EqualRanks.all_different(plan, lists or lower_plan(plan))
    loads = NetworkLoads(costs.comm, link_factors=perturbation.link_factors, equal=equal.links)
    action_costs = ActionCosts(sizes, loads)
    program = translate(equal.lists, action_costs, perturbation, stands_in=equal.stands_in)
    timeline = Timeline(program=program, times=run_program(program), sizes=sizes, fixed_bytes=fixed)
    iteration_s, tokens = timeline.end_s, plan.global_batch_size * costs.sequence_length
    return SimulationResult(
        iteration_s=iteration_s,
        tokens_per_s=tokens / iteration_s if iteration_s else float("inf"),
        stands_in=equal.stands_in,
        timeline=timeline,
    )


# How long each replica computes for one micro-batch: what orders follow, and what a run's own times
# are compared with.


ReplicaTimes = dict[tuple[int, int], tuple[tuple[float, float, float], ...]]
"""(group, replica) -> for each chunk of the group seconds of a micro-batch: forward, backward,
weight gradients where they are apart."""


def replica_times(plan: Plan, costs: JobCosts) -> ReplicaTimes:
    """Ranks of a TP group wait for one another, so all take as long as the slowest, collectives
    included."""
    of_actions = ActionCosts(RankSizes(plan, costs), NetworkLoads(costs.comm))
    return {
        (number, index): tuple(
            _chunk_s(of_actions, replica.ranks, chunk, bool(plan.groups[number].split_backward))
            for chunk in plan.chunks_of_group(number)
        )
        for number, index, replica in plan.numbered_replicas()
    }


def micro_batch_times(plan: Plan, costs: JobCosts) -> tuple[float, ...]:
    """Rank -> seconds of a micro-batch through all of its chunks, forward and backward.

    0 where a rank runs none.
    """
    found = [0.0] * plan.world_size
    for (number, index), chunks in replica_times(plan, costs).items():
        replica = plan.groups[number].replicas[index]
        for rank in replica.ranks if replica.num_microbatches else ():
            found[rank] = sum(map(sum, chunks))
    return tuple(found)


def _chunk_s(
    costs: ActionCosts, ranks: tuple[int, ...], chunk: int, splits: bool
) -> tuple[float, float, float]:
    size = costs.sizes.micro_batch_size(ranks[0])

    def seconds(kind: Kind) -> float:
        phases = [costs.seconds(rank, chunk, kind, size, splits=splits) for rank in ranks]
        return sum(map(max, zip(*phases, strict=True)))

    forward_s, backward_s = seconds(Kind.FORWARD), seconds(Kind.BACKWARD)
    if len(ranks) > 1:
        inside = costs.tp_collectives(ranks, chunk, size, gathers=False)
        forward_s, backward_s = forward_s + inside.forward_s, backward_s + inside.backward_s
    return forward_s, backward_s, seconds(Kind.WEIGHT_GRADIENT) if splits else 0.0
