"""Units among which a search divides layers: single GPUs, and tensor-parallel sets.

A search asks the same of a set as of a GPU: how long a layer takes, and what it can hold. A set is
a unit whose kind is named after its ranks, such as "2 T4 (a)". Its memory is that of a rank over
the rank's part of a layer: as large as a single GPU would have to be that holds no more of the
model than the set does. A plan of units is a plan of their ranks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from zorse_megatron.costs.interface import ModelSection, RankPart, SetRankCosts
from zorse_megatron.costs.tensor_parallel_communication import SetCollectives
from zorse_megatron.gpus.gpu import DTYPE_OF, ComputeDtype
from zorse_megatron.inputs.model import ModelShape
from zorse_megatron.plan.plan import Parts, Plan, Replica
from zorse_megatron.planner.inputs.cost_models import CostModels
from zorse_megatron.schedule.tensor_parallel_parts import SetParts, UnitKind

if TYPE_CHECKING:
    from zorse_megatron.planner.inputs.search_inputs import Inputs


@dataclass(frozen=True, kw_only=True)
class JoinedSet:
    """Ranks that are to be one tensor-parallel set, in ascending order."""

    ranks: tuple[int, ...]
    parts: Parts | None = None
    """Unequal parts; None: equal ones."""


Joining = tuple[JoinedSet, ...]
"""All sets of a cluster; ranks that are in none are single."""


@dataclass(frozen=True, kw_only=True)
class SetKind:
    """Sets that cost the same."""

    name: str
    gpu_kinds: tuple[str, ...]
    """Of each rank."""
    rank_parts: tuple[RankPart, ...]
    """What each rank has of a layer."""
    shares: tuple[float, ...]
    """How much of a layer's parameters each rank has; a little more than 1 together."""
    example: tuple[int, ...]
    """The ranks of one of these sets: links of all are alike."""


@dataclass(frozen=True, kw_only=True)
class Units:
    """What the units of a search are."""

    base: "Inputs"
    """Of the single GPUs."""
    sets: tuple[JoinedSet, ...]
    """Unit -> its ranks, of single GPUs too."""
    kinds: tuple[str, ...]
    """Unit -> its kind."""
    set_kinds: Mapping[str, SetKind] = field(default_factory=dict)
    """By name; kinds that are not here are kinds of GPU."""

    @cached_property
    def unit_of_rank(self) -> dict[int, int]:
        """Rank -> its unit."""
        return {rank: unit for unit, each in enumerate(self.sets) for rank in each.ranks}

    def ranks(self, units: Iterable[int]) -> tuple[int, ...]:
        """The GPUs of some units."""
        return tuple(sorted(rank for unit in units for rank in self.sets[unit].ranks))

    def are_cut_alike(self, units: Iterable[int]) -> bool:
        """Whether all of them cut layers into the same parts, as `plan.plan.holds_equal_parts`."""
        if not self.set_kinds:
            return True
        return len({(len(self.sets[unit].ranks), self.sets[unit].parts) for unit in units}) == 1

    def first_ranks(self, units: Iterable[int]) -> tuple[int, ...]:
        """One GPU of each."""
        return tuple(self.sets[unit].ranks[0] for unit in units)

    def share(self, rank: int) -> float:
        """How much of the layers of its unit a GPU holds."""
        unit = self.unit_of_rank[rank]
        found = self.set_kinds.get(self.kinds[unit])
        return 1.0 if found is None else found.shares[self.sets[unit].ranks.index(rank)]

    def boundary_bytes_on(self, kind: str) -> int:
        """An activation of a sample between layers, of which each rank of a set has all.

        With sequence parallelism it has a part. Over its part of a layer, as all memory of units.
        """
        found = self.set_kinds.get(kind)
        if found is None:
            return self.base.memory.boundary_bytes(1)
        return max(
            math.ceil(costs_of_rank(self.base, part).memory.boundary_bytes(1) / share)
            for part, share in zip(found.rank_parts, found.shares, strict=True)
        )

    def arrival_s(self, kind: str, micro_batch_size: int) -> float:
        """What a set does with an activation or a gradient from another group: it gathers it."""
        found = self.set_kinds.get(kind)
        if found is None:
            return 0.0
        inside = set_collectives(self.base)
        if inside.sequence_parallel:
            return 0.0
        return inside.gather_s(found.example, self.base.memory.boundary_bytes(micro_batch_size))

    def expanded(self, plan: Plan) -> Plan:
        """The plan of ranks that a plan of units stands for."""
        if not self.set_kinds:
            return plan
        groups = tuple(
            replace(group, replicas=tuple(sorted(map(self._expanded, group.replicas), key=_ranks)))
            for group in plan.groups
        )
        return replace(plan, groups=groups, cluster=self.base.cluster)

    def _expanded(self, replica: Replica) -> Replica:
        joined = self.sets[replica.ranks[0]]
        return replace(replica, ranks=joined.ranks, parts=joined.parts)


def _ranks(replica: Replica) -> tuple[int, ...]:
    return replica.ranks


def costs_of_rank(base: "Inputs", part: RankPart) -> SetRankCosts:
    """Costs of a rank of a set in the job's type."""
    assert base.sets is not None, "sets are joined only where their costs are known"
    return base.sets.of_rank(part, None)


def set_collectives(base: "Inputs") -> SetCollectives:
    """What sets communicate inside computations."""
    assert base.sets is not None, "sets are joined only where their costs are known"
    return SetCollectives(
        comm=base.comm,
        sequence_parallel=base.sets.sequence_parallel,
        learns_positions=base.sets.learns_positions,
    )


def rank_parts(joined: JoinedSet) -> tuple[RankPart, ...]:
    """What each rank of a set has."""
    degree = len(joined.ranks)
    if joined.parts is None:
        return (RankPart(degree=degree),) * degree
    return tuple(
        RankPart(degree=degree, parts=joined.parts, index=index) for index in range(degree)
    )


def in_rank_order(joining: Sequence[JoinedSet], world_size: int) -> tuple[JoinedSet, ...]:
    """The sets and all other ranks, each as a set of its own, by their first ranks."""
    joined = {rank for each in joining for rank in each.ranks}
    alone = [JoinedSet(ranks=(rank,)) for rank in range(world_size) if rank not in joined]
    return tuple(sorted([*joining, *alone], key=lambda each: each.ranks))


# Costs of the ranks of tensor-parallel sets, made when a part is asked for.


@dataclass(frozen=True, kw_only=True)
class SplitCosts:
    """`SetCosts` of a model on a cluster."""

    models: CostModels
    _made: dict[tuple[RankPart, ComputeDtype | None], SetRankCosts] = field(default_factory=dict)

    @property
    def sequence_parallel(self) -> bool:
        """Whether ranks of a set have a part of the sequence each, between layers."""
        return self.models.computing.sequence_parallel

    @property
    def learns_positions(self) -> bool:
        """Whether the embedding has a table of positions, which every rank has whole."""
        return self.models.model.position_embedding == "learned"

    def of_rank(self, part: RankPart, dtype: ComputeDtype | None) -> SetRankCosts:
        """Costs of a rank of a set; None: in the type of the job."""
        key = part, dtype
        if key not in self._made:
            model = told_local_sizes(self.models.model, part)
            split = replace(
                self.models, model=model, tensor_parallel=part.degree, whole=self.models.model
            )
            if dtype is None:
                made = SetRankCosts(compute=split.compute, memory=split.memory[0])
            else:
                made = split.costs_in(DTYPE_OF[dtype])
            self._made[key] = made
        return self._made[key]

    def cut_parameters(self, section: ModelSection) -> Mapping[UnitKind, int]:
        """Parameters that sets cut by these units; of embedding and head their table."""
        model = self.models.model
        if section != "layer":
            return {"vocabulary_rows": model.table_parameters()}
        return {
            "kv_groups": model.attention_parameters,
            "mlp_columns": model.mlp_parameters,
        }


def told_local_sizes(model: ModelShape, part: RankPart) -> ModelShape:
    """The model whose equal parts are as large as this rank's: its own sizes times the degree.

    As Megatron's layers are told (`adapter.model.unequal_parts`).
    """
    if part.parts is None:
        return model
    sets = SetParts(degree=part.degree, parts=part.parts)

    def told(kind: UnitKind, length: int) -> int:
        proportions = sets.proportions(kind)
        return length * proportions[part.index] * part.degree // sum(proportions)

    return replace(
        model,
        num_attention_heads=told("kv_groups", model.num_attention_heads),
        num_query_groups=told("kv_groups", model.num_query_groups),
        ffn_hidden_size=told("mlp_columns", model.ffn_hidden_size),
        vocab_size=told("vocabulary_rows", model.vocab_size),
    )
