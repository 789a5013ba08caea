"""Members among which a search divides layers: single GPUs, and tensor-parallel groups.

A search asks the same of a TP group as of a GPU: how long a layer takes, and what it can hold. A TP
group is a member whose kind is named after its ranks, such as "2 T4 (a)". Its memory is that of a
rank over the rank's part of a layer: as large as a single GPU would have to be that holds no more
of the model than the TP group does. A plan of members is a plan of their ranks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from zorse_megatron.costs.communication import TpCollectives
from zorse_megatron.costs.interface import (
    NO_TIME,
    ComputeCost,
    MemoryCost,
    ModelSection,
    PassTimes,
    RecomputeMode,
    TpComputeCost,
    TpRankCosts,
    TpShard,
)
from zorse_megatron.costs.topology import Topology
from zorse_megatron.plan.plan import ClusterFingerprint, Plan, Replica, TpShards

if TYPE_CHECKING:
    from zorse_megatron.planner.inputs.search_inputs import Inputs


@dataclass(frozen=True, kw_only=True)
class TpGroup:
    """Ranks that are to be one tensor-parallel group, in ascending order."""

    ranks: tuple[int, ...]
    tp_shards: TpShards | None = None
    """Unequal parts; None: equal ones."""


TpLayout = tuple[TpGroup, ...]
"""All TP groups of a cluster; ranks that are in none are single."""


@dataclass(frozen=True, kw_only=True)
class TpGroupKind:
    """TP groups that cost the same."""

    name: str
    gpu_kinds: tuple[str, ...]
    """Of each rank."""
    rank_shards: tuple[TpShard, ...]
    """What each rank has of a layer."""
    shares: tuple[float, ...]
    """How much of a layer's parameters each rank has; a little more than 1 together."""
    example: tuple[int, ...]
    """The ranks of one of these TP groups: links of all are alike."""


@dataclass(frozen=True, kw_only=True)
class Members:
    """What the members of a search are."""

    base: "Inputs"
    """Of the single GPUs."""
    tp_groups: tuple[TpGroup, ...]
    """Unit -> its ranks, of single GPUs too."""
    kinds: tuple[str, ...]
    """Unit -> its kind."""
    tp_kinds: Mapping[str, TpGroupKind] = field(default_factory=dict)
    """By name; kinds that are not here are kinds of GPU."""

    @cached_property
    def member_of_rank(self) -> dict[int, int]:
        """Rank -> its member."""
        return {rank: member for member, each in enumerate(self.tp_groups) for rank in each.ranks}

    def ranks(self, members: Iterable[int]) -> tuple[int, ...]:
        """The GPUs of some members."""
        return tuple(sorted(rank for member in members for rank in self.tp_groups[member].ranks))

    def are_cut_alike(self, members: Iterable[int]) -> bool:
        """Whether all of them cut layers into the same parts, as
        `plan.plan.has_equal_tp_shards`."""
        if not self.tp_kinds:
            return True
        return (
            len(
                {
                    (len(self.tp_groups[member].ranks), self.tp_groups[member].tp_shards)
                    for member in members
                }
            )
            == 1
        )

    def share(self, rank: int) -> float:
        """How much of the layers of its member a GPU holds."""
        member = self.member_of_rank[rank]
        found = self.tp_kinds.get(self.kinds[member])
        return 1.0 if found is None else found.shares[self.tp_groups[member].ranks.index(rank)]

    def activation_bytes_on(self, kind: str, micro_batch_size: int, mode: RecomputeMode) -> int:
        """What a layer keeps: of a TP group its fullest rank, over that rank's part of a layer."""
        found = self.tp_kinds.get(kind)
        if found is None:
            return self.base.memory.activation_bytes(micro_batch_size, mode, kind)
        kept = (
            costs_of_rank(self.base, part).memory.activation_bytes(micro_batch_size, mode, gpu)
            for gpu, part in zip(found.gpu_kinds, found.rank_shards, strict=True)
        )
        return max(math.ceil(each / share) for each, share in zip(kept, found.shares, strict=True))

    def saved_tensor_bytes_on(
        self, kind: str, micro_batch_size: int, mode: RecomputeMode
    ) -> tuple[int, ...]:
        """The same tensor by tensor, in the proportions of a GPU alone."""
        each = self.base.memory.saved_tensor_bytes(micro_batch_size, mode, kind)
        if kind not in self.tp_kinds:
            return each
        total = self.activation_bytes_on(kind, micro_batch_size, mode)
        return tuple(-(-total * one // sum(each)) for one in each)

    def boundary_bytes_on(self, kind: str) -> int:
        """An activation of a sample between layers, of which each rank of a TP group has all.

        With sequence parallelism it has a part. Over its part of a layer, as all memory of members.
        """
        found = self.tp_kinds.get(kind)
        if found is None:
            return self.base.memory.boundary_bytes(1)
        return max(
            math.ceil(costs_of_rank(self.base, part).memory.boundary_bytes(1) / share)
            for part, share in zip(found.rank_shards, found.shares, strict=True)
        )

    def arrival_s(self, kind: str, micro_batch_size: int) -> float:
        """What a TP group does with an activation or a gradient from another group: it gathers
        it."""
        found = self.tp_kinds.get(kind)
        if found is None:
            return 0.0
        inside = tp_collectives(self.base)
        if inside.traits.sequence_parallel:
            return 0.0
        return inside.gather_s(found.example, self.base.memory.boundary_bytes(micro_batch_size))

    def expanded(self, plan: Plan) -> Plan:
        """The plan of ranks that a plan of members stands for."""
        if not self.tp_kinds:
            return plan
        groups = tuple(
            replace(group, replicas=tuple(sorted(map(self._expanded, group.replicas), key=_ranks)))
            for group in plan.groups
        )
        return replace(plan, groups=groups, cluster=self.base.cluster)

    def _expanded(self, replica: Replica) -> Replica:
        with_tp_groups = self.tp_groups[replica.ranks[0]]
        return replace(replica, ranks=with_tp_groups.ranks, tp_shards=with_tp_groups.tp_shards)


def _ranks(replica: Replica) -> tuple[int, ...]:
    return replica.ranks


def costs_of_rank(base: "Inputs", part: TpShard) -> TpRankCosts:
    """Costs of a rank of a TP group in the job's type."""
    assert base.tp_costs is not None, "TP groups are joined only where their costs are known"
    return base.tp_costs.of_rank(part, None)


def tp_collectives(base: "Inputs") -> TpCollectives:
    """What TP groups communicate inside computations."""
    assert base.tp_costs is not None, "TP groups are joined only where their costs are known"
    return TpCollectives(traits=base.tp_costs.traits, comm=base.comm)


def rank_shards(with_tp_groups: TpGroup) -> tuple[TpShard, ...]:
    """What each rank of a TP group has."""
    degree = len(with_tp_groups.ranks)
    if with_tp_groups.tp_shards is None:
        return (TpShard(degree=degree),) * degree
    return tuple(
        TpShard(degree=degree, tp_shards=with_tp_groups.tp_shards, index=index)
        for index in range(degree)
    )


def all_tp_groups(tp_layout: Sequence[TpGroup], world_size: int) -> tuple[TpGroup, ...]:
    """The TP groups and all other ranks, each as a TP group of its own, by their first ranks."""
    with_tp_groups = {rank for each in tp_layout for rank in each.ranks}
    alone = [TpGroup(ranks=(rank,)) for rank in range(world_size) if rank not in with_tp_groups]
    return tuple(sorted([*tp_layout, *alone], key=lambda each: each.ranks))


# The inputs of a search among members, and what these cost.


def with_tp_groups(base: "Inputs", tp_layout: TpLayout) -> "Inputs":
    """Return the inputs where each TP group is one member; "rank" there means member.

    A member is in the node of its first rank. What fits in a member fits in each of its GPUs, as
    far as closed forms know; plans are simulated rank by rank on `base`.
    """
    assert base.tp_members is None and base.tp_costs is not None
    tp_groups = all_tp_groups(tp_layout, base.world_size)
    names: dict[object, TpGroupKind] = {}
    kinds = tuple(_kind(base, each, names) for each in tp_groups)
    tp_kinds = {kind.name: kind for kind in names.values()}
    # A kind's name goes with one kind of node alone, so that a node's links are in its costs.
    spec = _spec(base, tp_groups, kinds)
    members = Members(base=base, tp_groups=tp_groups, kinds=kinds, tp_kinds=tp_kinds)
    compute = MemberCompute(base=base, tp_kinds=tp_kinds)
    return replace(
        base,
        spec=spec,
        compute=compute,
        comm=MemberComm(members=members),
        by_dtype={},
        kinds=kinds,
        capacities_bytes=tuple(_capacity(members, each.ranks) for each in tp_groups),
        host_bytes=tuple(base.host_bytes_on(each.ranks) for each in tp_groups),
        cluster=ClusterFingerprint(name=base.cluster.name, gpu_kinds=kinds),
        best_sizes={},
        own_types=None,
        gpus=None,
        tp_members=members,
    )


def _kind(base: "Inputs", each: TpGroup, names: dict[object, TpGroupKind]) -> str:
    """The kind of a member, made where it is new."""
    gpu_kinds = tuple(base.kinds[rank] for rank in each.ranks)
    if len(each.ranks) == 1:
        return gpu_kinds[0]
    spec = base.spec
    nodes = sorted({spec.node_of(rank) for rank in each.ranks})
    # TP groups over several nodes are of a kind of their own: their links may differ.
    node = spec.nodes[nodes[0]]
    place: object = (node.link, node.intra_curves) if len(nodes) == 1 else each.ranks
    key = (gpu_kinds, each.tp_shards, place)
    if key not in names:
        parts = rank_shards(each)
        whole = _weight_bytes(base.memory)
        counted = {kind: gpu_kinds.count(kind) for kind in gpu_kinds}
        said = " + ".join(f"{count} {kind}" for kind, count in counted.items())
        names[key] = TpGroupKind(
            name=f"set {len(names)}: {said}",
            gpu_kinds=gpu_kinds,
            rank_shards=parts,
            shares=tuple(_weight_bytes(costs_of_rank(base, part).memory) / whole for part in parts),
            example=each.ranks,
        )
    return names[key].name


def _weight_bytes(memory: MemoryCost) -> int:
    """What a layer's parameters take with all that is kept of them."""
    trained, frozen = memory.layer_parameters(), memory.frozen_parameters("layer")
    kept = memory.parameter_bytes, memory.gradient_bytes, memory.state_bytes
    return memory.parameter_bytes(frozen) + sum(each(trained) for each in kept)


def _capacity(members: Members, ranks: Sequence[int]) -> int:
    """What tensors may fill: of the rank that is full first."""
    room = members.base.tensor_capacities_bytes
    if len(ranks) == 1:
        return room[ranks[0]]
    return int(min(room[rank] / members.share(rank) for rank in ranks))


def _spec(base: "Inputs", tp_groups: Sequence[TpGroup], kinds: Sequence[str]) -> Topology:
    """The nodes with members for GPUs; a node whose GPUs are all in TP groups of another one is
    gone."""
    spec = base.spec
    of_node: dict[int, list[str]] = {}
    for each, kind in zip(tp_groups, kinds, strict=True):
        of_node.setdefault(spec.node_of(each.ranks[0]), []).append(kind)
    nodes = [
        replace(spec.nodes[node], gpu_kinds=tuple(found)) for node, found in sorted(of_node.items())
    ]
    return Topology.of(nodes, spec.switches, spec.region_links, spec.unequal_shards)


# Costs of members that are tensor-parallel groups, as a search asks for them.
#
# As the simulator prices them (`simulate.action_costs`): attention and MLP of a layer end in a sum
# over the TP group, so each takes as long as on the rank that is slowest there.


@dataclass(frozen=True, kw_only=True)
class MemberCompute:
    """`ComputeCost` of members. Kinds of GPU cost what they did."""

    base: "Inputs"
    tp_kinds: Mapping[str, TpGroupKind]
    _layers: dict[tuple[str, int], PassTimes] = field(default_factory=dict)

    def layer(self, kind: str, micro_batch_size: int) -> PassTimes:
        """One transformer layer, the TP group's collectives included."""
        if kind not in self.tp_kinds:
            return self.base.compute.layer(kind, micro_batch_size)
        key = kind, micro_batch_size
        if key not in self._layers:
            inside = self.collectives(kind, "layer", micro_batch_size)
            self._layers[key] = self.without_collectives(kind, micro_batch_size) + inside
        return self._layers[key]

    def without_collectives(self, kind: str, micro_batch_size: int) -> PassTimes:
        """A layer on the ranks that are slowest in its halves."""
        halves = [
            compute.layer_in_two(gpu, micro_batch_size)
            for gpu, compute in self._tp_ranks(self.tp_kinds[kind])
        ]
        return _slowest([h.attention for h in halves]) + _slowest([h.mlp for h in halves])

    def collectives(self, kind: str, section: ModelSection, micro_batch_size: int) -> PassTimes:
        """Those of the TP group in a part of the model; none where they were measured with it."""
        found = self.tp_kinds.get(kind)
        if found is None or all(
            compute.includes_collectives(gpu, section) for gpu, compute in self._tp_ranks(found)
        ):
            return NO_TIME
        num_bytes = self.base.memory.boundary_bytes(micro_batch_size)
        num_tokens = micro_batch_size * self.base.sequence_length
        return tp_collectives(self.base).of(section, found.example, num_bytes, num_tokens)

    def embedding(self, kind: str, micro_batch_size: int) -> PassTimes:
        """Token (and position) embedding."""
        each = [c.embedding(gpu, micro_batch_size) for gpu, c in self._ranks(kind)]
        return _slowest(each) + self.collectives(kind, "embedding", micro_batch_size)

    def head(self, kind: str, micro_batch_size: int) -> PassTimes:
        """Final norm, output layer and loss."""
        each = [c.head(gpu, micro_batch_size) for gpu, c in self._ranks(kind)]
        return _slowest(each) + self.collectives(kind, "head", micro_batch_size)

    def recompute_s(self, kind: str, micro_batch_size: int, mode: RecomputeMode) -> float:
        """What recomputing one layer adds to its backward; of a whole one its sums, too."""
        if mode == "full" and kind in self.tp_kinds:
            return self.layer(kind, micro_batch_size).forward_s
        return max(c.recompute_s(gpu, micro_batch_size, mode) for gpu, c in self._ranks(kind))

    def weight_gradients_s(self, kind: str, micro_batch_size: int) -> float:
        """What gradients of its matrices take of one layer's backward."""
        return max(c.weight_gradients_s(gpu, micro_batch_size) for gpu, c in self._ranks(kind))

    def step_s(self, kind: str, num_parameters: int) -> float:
        """Optimizer step on a shard, of which each rank has its part."""
        if kind not in self.tp_kinds:
            return self.base.compute.step_s(kind, num_parameters)
        found = self.tp_kinds[kind]
        return max(
            self.base.compute.step_s(gpu, int(num_parameters * share))
            for gpu, share in zip(found.gpu_kinds, found.shares, strict=True)
        )

    def _ranks(self, kind: str) -> Sequence[tuple[str, ComputeCost]]:
        """(kind of GPU, costs) of each rank of a member."""
        found = self.tp_kinds.get(kind)
        return [(kind, self.base.compute)] if found is None else self._tp_ranks(found)

    def _tp_ranks(self, kind: TpGroupKind) -> list[tuple[str, TpComputeCost]]:
        return [
            (gpu, costs_of_rank(self.base, part).compute)
            for gpu, part in zip(kind.gpu_kinds, kind.rank_shards, strict=True)
        ]


def _slowest(times: Sequence[PassTimes]) -> PassTimes:
    return PassTimes(
        forward_s=max(each.forward_s for each in times),
        backward_s=max(each.backward_s for each in times),
    )


@dataclass(frozen=True, kw_only=True)
class MemberComm:
    """`CommCost` between members, on the links of their GPUs."""

    members: Members
    _links: dict[tuple[int, int], tuple[tuple[str, float], ...]] = field(default_factory=dict)

    @property
    def _base(self) -> "Inputs":
        return self.members.base

    def _pairs(self, source: int, target: int) -> list[tuple[int, int]]:
        """GPUs that send each other a part of an activation."""
        ours, theirs = (self.members.tp_groups[member].ranks for member in (source, target))
        count = max(len(ours), len(theirs))
        return [
            (ours[n * len(ours) // count], theirs[n * len(theirs) // count]) for n in range(count)
        ]

    def transfer_s(self, source: int, target: int, num_bytes: int) -> float:
        """Point to point, in parts at once."""
        pairs = self._pairs(source, target)
        alone_s = self._base.comm.transfer_s(*pairs[0], -(-num_bytes // len(pairs)))
        if len(pairs) == 1:
            return alone_s
        rates = [rate for _, rate in self.shared_links(source, target)]
        return max(alone_s, num_bytes / min(rates, default=math.inf))

    def shared_links(self, source: int, target: int) -> tuple[tuple[str, float], ...]:
        """Links on the way, with what the whole gets of those that carry a part of it."""
        key = source, target
        if key not in self._links:
            pairs = self._pairs(source, target)
            carried: dict[str, tuple[int, float]] = {}
            for pair in pairs:
                for name, rate in self._base.comm.shared_links(*pair):
                    carried[name] = carried.get(name, (0, rate))[0] + 1, rate
            self._links[key] = tuple(
                (name, rate * len(pairs) / count) for name, (count, rate) in carried.items()
            )
        return self._links[key]

    def reduce_scatter_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        """Over one GPU of each member, as many at once as TP groups have ranks."""
        return self._base.comm.reduce_scatter_s(*self._spread(ranks, shard_bytes))

    def all_gather_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        """The same of an all-gather."""
        return self._base.comm.all_gather_s(*self._spread(ranks, shard_bytes))

    def exchange_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        """The same of direct messages."""
        return self._base.comm.exchange_s(*self._spread(ranks, shard_bytes))

    def _spread(
        self, members: tuple[int, ...], shard_bytes: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """On a node, parts go over links of their own: one rank of each member stands for all.

        Between nodes all of it passes the NICs of all: as if every GPU had a shard.
        """
        own = [self.members.tp_groups[member].ranks for member in members]
        spec = self._base.spec
        if len({spec.node_of(ranks[0]) for ranks in own}) == 1:
            smallest = min(map(len, own))
            firsts = tuple(ranks[0] for ranks in own)
            return firsts, tuple(size // smallest for size in shard_bytes)
        each = [size // len(ranks) for ranks, size in zip(own, shard_bytes, strict=True)]
        sizes = {rank: size for ranks, size in zip(own, each, strict=True) for rank in ranks}
        ascending = tuple(sorted(sizes))
        return ascending, tuple(map(sizes.__getitem__, ascending))

    def all_reduce_s(self, ranks: tuple[int, ...], num_bytes: int) -> float:
        """Small statistics, over all GPUs."""
        return self._base.comm.all_reduce_s(self.members.ranks(ranks), num_bytes)

    def host_link_bytes_per_s(self, rank: int) -> float:
        """To host memory, of all GPUs of a member."""
        comm, own_ranks = self._base.comm, self.members.tp_groups[rank].ranks
        if len(own_ranks) == 1:
            return comm.host_link_bytes_per_s(own_ranks[0])
        return min(
            comm.host_link_bytes_per_s(each) / self.members.share(each) for each in own_ranks
        )
