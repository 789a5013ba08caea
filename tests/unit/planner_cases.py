"""Small random clusters for the planner's tests, and the best plan of each by trying all."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

from tests.topologies import node
from tests.unit.fake_costs import FakeMemory
from zorse_megatron.costs.communication import GraphComm
from zorse_megatron.costs.interface import PassTimes, RecomputeMode
from zorse_megatron.costs.topology import Topology
from zorse_megatron.plan.plan import (
    Chunk,
    ClusterFingerprint,
    Group,
    ModelFingerprint,
    Plan,
    Recompute,
    Replica,
    Schedule,
)
from zorse_megatron.planner.closed_form.device_groups import ReplicaClass, ReplicaShare, best_split
from zorse_megatron.planner.closed_form.stage_memory import water_fill
from zorse_megatron.planner.groupings.pools import set_partitions
from zorse_megatron.planner.inputs.search_inputs import Inputs, SearchSpace
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.schedule.shards import shard_bounds
from zorse_megatron.simulate.result import SimulationResult

KINDS = ("fast", "middle", "slow")
SIZES = (1, 2, 4)
SPACE = SearchSpace(
    split_backward=False,
    schedules=("1f1b",),
    recompute=("none", "full"),
    offload=False,
    max_micro_batch_size=4,
)


@dataclass(frozen=True, kw_only=True)
class CaseCompute:
    """A layer takes a fixed time for a micro-batch and some for each of its samples."""

    sample_s: dict[str, float]
    fixed_s: float

    def layer(self, kind: str, micro_batch_size: int) -> PassTimes:
        forward_s = self.fixed_s + self.sample_s[kind] * micro_batch_size
        return PassTimes(forward_s=forward_s, backward_s=2 * forward_s)

    def embedding(self, kind: str, micro_batch_size: int) -> PassTimes:
        return PassTimes(forward_s=0.1 * self.fixed_s, backward_s=0.1 * self.fixed_s)

    def head(self, kind: str, micro_batch_size: int) -> PassTimes:
        forward_s = 0.4 * self.sample_s[kind] * micro_batch_size
        return PassTimes(forward_s=forward_s, backward_s=2 * forward_s)

    def recompute_s(self, kind: str, micro_batch_size: int, mode: RecomputeMode) -> float:
        return self.layer(kind, micro_batch_size).forward_s if mode == "full" else 0.0

    def weight_gradients_s(self, kind: str, micro_batch_size: int) -> float:
        return 0.8 * self.layer(kind, micro_batch_size).forward_s

    def step_s(self, kind: str, num_parameters: int) -> float:
        return 1e-6 * num_parameters


def random_case(seed: int, *, most_gpus: int = 6, most_layers: int = 12) -> Inputs:
    """Two nodes, up to three kinds; memory that is sometimes short."""
    draw = random.Random(seed)
    num_gpus = draw.randint(2, most_gpus)
    first = draw.randint(1, num_gpus - 1)
    kinds = tuple(draw.choice(KINDS) for _ in range(num_gpus))
    nodes = tuple(
        node(
            f"n{index}",
            gpu_kinds=part,
            link_bytes_per_s=1e6,
            link_latency_s=1e-4,
            host_link_bytes_per_s=1e6,
            nic_bytes_per_s=draw.choice((5e4, 2e5)),
            nic_latency_s=1e-3,
        )
        for index, part in enumerate((kinds[:first], kinds[first:]))
    )
    spec = Topology.of(nodes)
    num_layers = draw.randint(3, most_layers)
    batch = draw.choice((8, 12, 16))
    speeds = {"fast": 0.01, "middle": 0.01 * draw.choice((1.5, 2.2)), "slow": 0.05}
    memory = FakeMemory(embedding_count=300, head_count=300, boundary=100, head=200)
    whole = 18 * (num_layers * memory.layer_count + 600)
    room = draw.choice((1.5, 2.5, 6.0)) * whole / num_gpus
    capacity = {kind: int(room * draw.choice((0.8, 1.0, 1.5)) + 9 * 640) for kind in KINDS}
    return Inputs(
        spec=spec,
        compute=CaseCompute(sample_s=speeds, fixed_s=draw.choice((0.0, 0.005))),
        memory=memory,
        comm=GraphComm(spec),
        by_dtype={},
        kinds=kinds,
        capacities_bytes=tuple(capacity[kind] for kind in kinds),
        host_bytes=(None,) * num_gpus,
        global_batch_size=batch,
        sequence_length=1,
        num_layers=num_layers,
        tied_embeddings=False,
        model=ModelFingerprint(num_layers=num_layers),
        cluster=ClusterFingerprint(gpu_kinds=kinds),
        space=SPACE,
        memory_margin=0.0,
        best_sizes=dict.fromkeys(KINDS, SIZES),
    )


def simulated(inputs: Inputs, plan: Plan) -> SimulationResult:
    """What the simulator says of a plan."""
    return simulate_plan(inputs, plan)


def fits(inputs: Inputs, result: SimulationResult) -> bool:
    """Whether every rank has enough memory."""
    pairs = zip(result.peak_memory_bytes, inputs.capacities_bytes, strict=True)
    return all(peak <= capacity for peak, capacity in pairs)


class TooManyPlansError(Exception):
    """Trying all of them takes too long."""


def best_by_trying(inputs: Inputs, *, below_s: float, most_simulated: int) -> float | None:
    """Iteration of the best 1f1b plan that is faster than `below_s`; None where there is none.

    Every grouping, order, number of layers and micro-batch size of every group, and recomputation
    (all or nothing) of every kind of GPU in it that must, with its micro-batches. What cannot be
    faster or fit by a lower bound is left out. A group is busy for the time of its slowest replica,
    and before its first forward and after its last backward a micro-batch passes all groups before
    it; and all backwards of a replica come after its first forward and the passage of that
    micro-batch through all other groups. After its backwards a group reduces its gradients, while
    groups before it may still compute; after all reductions each group makes its step and gathers.
    A rank has unsharded parameters and gradients, its share of the state, and once a micro-batch.
    At most `most_simulated` plans are simulated, those with the lowest bounds first; each of them
    is a test of the bounds.

    Raises TooManyPlansError if there are more.
    """
    rows = sorted(_bounded(inputs, below_s), key=lambda row: row[0])
    best, count = below_s, 0
    for bound_s, stages in rows:
        if bound_s >= best:
            break
        plan = _plan(inputs, stages)
        if plan is None:
            continue
        count += 1
        if count > most_simulated:
            raise TooManyPlansError(f"more than {most_simulated} plans to simulate")
        result = simulated(inputs, plan)
        assert result.iteration_s >= bound_s * (1 - 1e-9), (result.iteration_s, bound_s, plan)
        _assert_least_memory(inputs, stages, result)
        if result.iteration_s < best and fits(inputs, result) and _must_recompute(inputs, plan):
            best = result.iteration_s
    return best if best < below_s else None


def _must_recompute(inputs: Inputs, plan: Plan) -> bool:
    """Whether no kind of GPU in a group can keep what it recomputes.

    One that can is only slowed down, by which the split of the batch between it and others may
    happen to suit the pipeline better; that is no merit of recomputation.
    """
    for number, group in enumerate(plan.groups):
        for kind in {inputs.kinds[r.ranks[0]] for r in group.replicas if r.recompute}:
            replicas = tuple(
                replace(each, recompute=None) if inputs.kinds[each.ranks[0]] == kind else each
                for each in group.replicas
            )
            groups = list(plan.groups)
            groups[number] = replace(group, replicas=replicas)
            if fits(inputs, simulated(inputs, replace(plan, groups=tuple(groups)))):
                return False
    return True


@dataclass(frozen=True, kw_only=True)
class _Price:
    """Of one group."""

    shares: tuple[ReplicaShare, ...]
    busy_s: float
    """Of its slowest replica."""
    reduce_s: float
    """Of the reduction after that."""
    forward_s: float
    """Least time that a sample spends in it on its way forward."""
    passage_s: float
    """The same of both ways."""
    beyond_s: float
    """How much longer than that a replica needs for its first forward and all backwards."""
    after_s: float
    """Its step and gather, which come after the reductions of all groups."""


@dataclass(frozen=True)
class _Stage:
    ranks: tuple[int, ...]
    num_layers: int
    size: int
    recomputes: frozenset[str]
    """Kinds of GPUs."""


def _bounded(inputs: Inputs, below_s: float) -> Iterator[tuple[float, tuple[_Stage, ...]]]:
    seen = set()
    prices: dict[object, _Price | None] = {}
    node_of = [inputs.spec.node_of(rank) for rank in range(inputs.world_size)]
    for groups in set_partitions(tuple(range(inputs.world_size))):
        if len(groups) > inputs.num_layers:
            continue
        for order in permutations(groups):
            look = tuple(tuple((node_of[r], inputs.kinds[r]) for r in group) for group in order)
            if look in seen:
                continue
            seen.add(look)
            yield from _stages(inputs, order, below_s=below_s, prices=prices)


def _stages(
    inputs: Inputs,
    order: tuple[tuple[int, ...], ...],
    *,
    below_s: float,
    prices: dict[object, _Price | None],
    chosen: tuple[_Stage, ...] = (),
    passed_s: float = 0.0,
    reached_s: float = 0.0,
    busy_s: float = 0.0,
    beyond_s: float = 0.0,
    after_s: float = 0.0,
) -> Iterator[tuple[float, tuple[_Stage, ...]]]:
    at = len(chosen)
    left = inputs.num_layers - sum(stage.num_layers for stage in chosen)
    if at == len(order):
        if left == 0:
            yield max(busy_s, passed_s + beyond_s) + after_s, chosen
        return
    later = len(order) - at - 1
    for layers in range(1, left - later + 1) if later else (left,):
        for stage, price in _choices(inputs, order[at], layers, (at == 0, later == 0), prices):
            # Where a backward waits most, all of its own passage but `beyond_s` counts.
            reduced = reached_s + price.busy_s + price.reduce_s
            busy = max(busy_s, passed_s + price.busy_s, reduced)
            passed, beyond = passed_s + price.passage_s, max(beyond_s, price.beyond_s)
            after = max(after_s, price.after_s)
            if max(busy, passed + beyond) + after < below_s:
                yield from _stages(
                    inputs,
                    order,
                    below_s=below_s,
                    prices=prices,
                    chosen=(*chosen, stage),
                    passed_s=passed,
                    reached_s=reached_s + price.forward_s,
                    busy_s=busy,
                    beyond_s=beyond,
                    after_s=after,
                )


def _choices(
    inputs: Inputs,
    ranks: tuple[int, ...],
    layers: int,
    ends: tuple[bool, bool],
    prices: dict[object, _Price | None],
) -> Iterator[tuple[_Stage, _Price]]:
    """What a group may do with so many layers; a larger size that changes no share is left out."""
    places = tuple((inputs.spec.node_of(rank), inputs.kinds[rank]) for rank in ranks)
    kinds = sorted({inputs.kinds[rank] for rank in ranks})
    for chosen in product((False, True), repeat=len(kinds)):
        recomputes = frozenset(kind for kind, does in zip(kinds, chosen, strict=True) if does)
        seen = []
        for size in SIZES:
            stage = _Stage(ranks, layers, size, recomputes)
            key = (places, layers, size, recomputes, ends)
            if key not in prices:
                price = _price(inputs, stage, ends)
                is_vain = price is not None and _keeps_all(inputs, stage, price, ends)
                prices[key] = None if is_vain else price
            price = prices[key]
            if price is not None and price.shares not in seen:
                seen.append(price.shares)
                yield stage, price


def _keeps_all(inputs: Inputs, stage: _Stage, price: _Price, ends: tuple[bool, bool]) -> bool:
    """Whether a kind that recomputes has room for all its micro-batches at once."""
    weights, memory = _weights(inputs, stage, ends), inputs.memory
    assert weights is not None
    parameters = _parameters(inputs, stage, ends)
    whole = memory.parameter_bytes(parameters) + memory.gradient_bytes(parameters)
    short = set()
    for rank, shard, share in zip(
        stage.ranks, _shards(parameters, weights), price.shares, strict=True
    ):
        each = stage.num_layers * memory.activation_bytes(1, "none") + memory.head_bytes(1)
        each += 4 * memory.boundary_bytes(1)  # received and made, and the gradients of both
        most = (
            whole
            + memory.state_bytes(shard)
            + share.micro_batch_size * share.num_microbatches * each
        )
        if most > inputs.capacities_bytes[rank]:
            short.add(inputs.kinds[rank])
    return not stage.recomputes <= short


def _passes(
    inputs: Inputs, stage: _Stage, rank: int, size: int, ends: tuple[bool, bool]
) -> PassTimes:
    """One micro-batch of a rank through the stage."""
    compute, kind = inputs.compute, inputs.kinds[rank]
    parts = [compute.layer(kind, size)] * stage.num_layers
    ways = (compute.embedding, compute.head)
    parts += [way(kind, size) for is_there, way in zip(ends, ways, strict=True) if is_there]
    again_s = compute.recompute_s(kind, size, "full") if kind in stage.recomputes else 0.0
    return PassTimes(
        forward_s=sum(part.forward_s for part in parts),
        backward_s=sum(part.backward_s for part in parts) + stage.num_layers * again_s,
    )


def _classes(inputs: Inputs, stage: _Stage, ends: tuple[bool, bool]) -> list[ReplicaClass]:
    return [
        ReplicaClass(
            count=1,
            times_s={
                size: sum(vars(_passes(inputs, stage, rank, size, ends)).values())
                for size in range(1, stage.size + 1)
            },
        )
        for rank in stage.ranks
    ]


def _price(inputs: Inputs, stage: _Stage, ends: tuple[bool, bool]) -> _Price | None:
    """None where it does not fit."""
    classes = _classes(inputs, stage, ends)
    split = best_split(inputs.global_batch_size, classes)
    assert split is not None
    least = _least_memory(inputs, stage, ends)
    if least is None or any(
        least_bytes > inputs.capacities_bytes[rank]
        for rank, least_bytes in zip(stage.ranks, least, strict=True)
    ):
        return None
    shares = tuple(share for (share,) in split)
    active = [
        (share, each, _passes(inputs, stage, rank, share.micro_batch_size, ends))
        for rank, share, each in zip(stage.ranks, shares, classes, strict=True)
        if share.num_microbatches
    ]
    # First forward and last backward may be of two replicas.
    least_s = min(one.forward_s for _, _, one in active)
    passage_s = least_s + min(one.backward_s for _, _, one in active)
    after_first_s = max(
        one.forward_s + share.num_microbatches * one.backward_s for share, _, one in active
    )
    reduce_s, after_s = _collectives_s(inputs, stage, ends)
    return _Price(
        shares=shares,
        busy_s=max(
            share.num_microbatches * sum(vars(passes).values()) for share, _, passes in active
        ),
        reduce_s=reduce_s,
        forward_s=least_s,
        passage_s=passage_s,
        beyond_s=max(0.0, after_first_s - passage_s),
        after_s=after_s,
    )


def _collectives_s(inputs: Inputs, stage: _Stage, ends: tuple[bool, bool]) -> tuple[float, float]:
    """Of the reduction; and of the slowest step with the gather after it."""
    weights, memory = _weights(inputs, stage, ends), inputs.memory
    assert weights is not None
    shards = _shards(_parameters(inputs, stage, ends), weights)
    gradients, values = (
        tuple(map(size, shards)) for size in (memory.gradient_bytes, memory.parameter_bytes)
    )
    step_s = max(
        inputs.compute.step_s(inputs.kinds[rank], shard)
        for rank, shard in zip(stage.ranks, shards, strict=True)
    )
    gather_s = inputs.comm.all_gather_s(stage.ranks, values)
    return inputs.comm.reduce_scatter_s(stage.ranks, gradients), step_s + gather_s


def _least_memory(inputs: Inputs, stage: _Stage, ends: tuple[bool, bool]) -> tuple[int, ...] | None:
    """Of each rank; None where unsharded parameters and the state do not fit."""
    weights, memory = _weights(inputs, stage, ends), inputs.memory
    if weights is None:
        return None
    split = best_split(inputs.global_batch_size, _classes(inputs, stage, ends))
    assert split is not None
    parameters = _parameters(inputs, stage, ends)
    whole = memory.parameter_bytes(parameters) + memory.gradient_bytes(parameters)
    modes: list[RecomputeMode] = [
        "full" if inputs.kinds[rank] in stage.recomputes else "none" for rank in stage.ranks
    ]
    return tuple(
        whole
        + memory.state_bytes(shard)
        + bool(share.num_microbatches)
        * stage.num_layers
        * memory.activation_bytes(share.micro_batch_size, mode)
        for shard, (share,), mode in zip(_shards(parameters, weights), split, modes, strict=True)
    )


def _shards(parameters: int, weights: Sequence[float]) -> list[int]:
    """Elements of each; equal weights make equal shards, as Megatron pads its buffers."""
    if len(set(weights)) == 1:
        return [-(-parameters // len(weights))] * len(weights)
    return [stop - start for start, stop in shard_bounds(parameters, weights)]


def _assert_least_memory(
    inputs: Inputs, stages: tuple[_Stage, ...], result: SimulationResult
) -> None:
    for at, stage in enumerate(stages):
        least = _least_memory(inputs, stage, (at == 0, at == len(stages) - 1))
        assert least is not None
        for rank, least_bytes in zip(stage.ranks, least, strict=True):
            assert result.peak_memory_bytes[rank] >= least_bytes, (rank, stages)


def _plan(inputs: Inputs, stages: tuple[_Stage, ...]) -> Plan | None:
    """Counts by the exact split, shards by the memory that unsharded parameters leave."""
    groups, chunks, first = [], [], 0
    for at, stage in enumerate(stages):
        ends = (at == 0, at == len(stages) - 1)
        split = best_split(inputs.global_batch_size, _classes(inputs, stage, ends))
        assert split is not None
        weights = _weights(inputs, stage, ends)
        if weights is None:
            return None
        groups.append(
            Group(
                replicas=tuple(
                    Replica(
                        ranks=(rank,),
                        micro_batch_size=row[0].micro_batch_size,
                        num_microbatches=row[0].num_microbatches,
                        shard_weight=weight,
                        recompute=Recompute(mode="full")
                        if inputs.kinds[rank] in stage.recomputes
                        else None,
                    )
                    for rank, row, weight in zip(stage.ranks, split, weights, strict=True)
                )
            )
        )
        chunks.append(Chunk(group=at, layers=(first, first + stage.num_layers)))
        first += stage.num_layers
    return Plan(
        schema_version=2,
        global_batch_size=inputs.global_batch_size,
        model=inputs.model,
        groups=tuple(groups),
        chunks=tuple(chunks),
        schedule=Schedule(name="1f1b"),
        cluster=inputs.cluster,
    )


def _parameters(inputs: Inputs, stage: _Stage, ends: tuple[bool, bool]) -> int:
    memory = inputs.memory
    parameters = stage.num_layers * memory.layer_parameters()
    parameters += ends[0] * memory.embedding_parameters()
    return parameters + ends[1] * memory.head_parameters(tied_on_same_rank=False)


def _weights(inputs: Inputs, stage: _Stage, ends: tuple[bool, bool]) -> tuple[float, ...] | None:
    memory, parameters = inputs.memory, _parameters(inputs, stage, ends)
    whole = memory.parameter_bytes(parameters) + memory.gradient_bytes(parameters)
    rooms = [inputs.capacities_bytes[rank] - whole for rank in stage.ranks]
    filled = water_fill(memory.state_bytes(parameters), rooms)
    if filled is None or min(rooms) < 0:
        return None
    return (1.0,) * len(filled) if len(set(filled)) == 1 else filled
