"""Members among which a search divides layers: single GPUs, and tensor-parallel groups.

A search asks the same of a TP group as of a GPU: how long a layer takes, and what it can hold. A TP
group is a member whose kind is named after its ranks, such as "2 T4 (a)". Its memory is that of a
rank over the rank's part of a layer: as large as a single GPU would have to be that holds no more
of the model than the TP group does. A plan of members is a plan of their ranks.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from zorse_megatron.costs.communication import TpCollectives
from zorse_megatron.costs.interface import ModelSection, RecomputeMode, TpRankCosts, TpShard
from zorse_megatron.gpus.gpu import DTYPE_OF, ComputeDtype
from zorse_megatron.inputs.model import ModelShape
from zorse_megatron.plan.plan import Plan, Replica, TpShards
from zorse_megatron.planner.inputs.cost_models import CostModels
from zorse_megatron.schedule.tensor_parallel_parts import TpPartition, UnitKind

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

    def first_ranks(self, members: Iterable[int]) -> tuple[int, ...]:
        """One GPU of each."""
        return tuple(self.tp_groups[member].ranks[0] for member in members)

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
        if inside.tp_costs.sequence_parallel:
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
    return TpCollectives(tp_costs=base.tp_costs, comm=base.comm)


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


# Costs of the ranks of tensor-parallel groups, made when a part is asked for.


@dataclass(frozen=True, kw_only=True)
class SplitCosts:
    """`TpCosts` of a model on a cluster."""

    models: CostModels
    _made: dict[tuple[TpShard, ComputeDtype | None], TpRankCosts] = field(default_factory=dict)

    @property
    def sequence_parallel(self) -> bool:
        """Whether ranks of a TP group have a part of the sequence each, between layers."""
        return self.models.computing.sequence_parallel

    @property
    def learns_positions(self) -> bool:
        """Whether the embedding has a table of positions, which every rank has whole."""
        return self.models.model.position_embedding == "learned"

    @property
    def adapter_shares(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Of what crosses a TP group between A and B, as shares of an activation."""
        lora = self.models.computing.lora
        return ((), ()) if lora is None else lora.crossing_shares(self.models.model)

    def of_rank(self, part: TpShard, dtype: ComputeDtype | None) -> TpRankCosts:
        """Costs of a rank of a TP group; None: in the type of the job."""
        key = part, dtype
        if key not in self._made:
            model = told_local_sizes(self.models.model, part)
            split = replace(
                self.models, model=model, tensor_parallel=part.degree, whole=self.models.model
            )
            if dtype is None:
                made = TpRankCosts(compute=split.compute, memory=split.memory[0])
            else:
                made = split.costs_in(DTYPE_OF[dtype])
            self._made[key] = made
        return self._made[key]

    def cut_parameters(self, section: ModelSection) -> Mapping[UnitKind, int]:
        """Parameters that TP groups cut by these members; of embedding and head their table."""
        model, lora = self.models.model, self.models.computing.lora
        if lora is not None:
            cut = Counter[UnitKind]()  # embedding and head are not trained
            for size in lora.sizes(model).values() if section == "layer" else ():
                kind: UnitKind = "kv_groups" if size.in_attention else "mlp_columns"
                cut[kind] += size.cut_parameters(lora.rank)
            return cut
        if section != "layer":
            return {"vocabulary_rows": model.table_parameters()}
        return {
            "kv_groups": model.attention_parameters,
            "mlp_columns": model.mlp_parameters,
        }


def told_local_sizes(model: ModelShape, part: TpShard) -> ModelShape:
    """The model whose even TP shards are as large as this rank's: its own sizes times the degree.

    As Megatron's layers are told (`adapter.model.uneven_tp_shards`).
    """
    if part.tp_shards is None:
        return model
    tp_groups = TpPartition(degree=part.degree, tp_shards=part.tp_shards)

    def told(kind: UnitKind, length: int) -> int:
        proportions = tp_groups.proportions(kind)
        return length * proportions[part.index] * part.degree // sum(proportions)

    return replace(
        model,
        num_attention_heads=told("kv_groups", model.num_attention_heads),
        num_query_groups=told("kv_groups", model.num_query_groups),
        ffn_hidden_size=told("mlp_columns", model.ffn_hidden_size),
        vocab_size=told("vocabulary_rows", model.vocab_size),
    )
