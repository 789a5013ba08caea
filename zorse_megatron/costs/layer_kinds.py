"""Costs of a model whose layers are of two kinds: with experts, and dense.

A simulation asks for the layers of a chunk: times of the layer between them, so many of which take
as long together, and sizes kind by kind. A search, to which all layers are alike, has the layer
between those of the whole model.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, cast

from zorse_megatron.costs.interface import (
    DtypeCosts,
    LayerCosts,
    LayerTimes,
    MemoryCost,
    ModelSection,
    PassTimes,
    RecomputeMode,
    TpComputeCost,
    TpCosts,
    TpRankCosts,
    TpShard,
    TpTraits,
)
from zorse_megatron.gpus.gpu import ComputeDtype
from zorse_megatron.schedule.tensor_parallel_parts import UnitKind


@dataclass(frozen=True, kw_only=True)
class MeanCompute:
    """`TpComputeCost` of the layer between layers of two kinds; ends are those of the first."""

    parts: tuple[tuple[float, TpComputeCost], ...]
    """Share of the layers, and their costs."""

    def _mean(self, times_of: Callable[[TpComputeCost], PassTimes]) -> PassTimes:
        found = [(share, times_of(compute)) for share, compute in self.parts]
        return PassTimes(
            forward_s=sum(share * times.forward_s for share, times in found),
            backward_s=sum(share * times.backward_s for share, times in found),
        )

    def layer(self, kind: str, micro_batch_size: int) -> PassTimes:
        """One transformer layer, nothing recomputed."""
        return self._mean(lambda each: each.layer(kind, micro_batch_size))

    def layer_in_two(self, kind: str, micro_batch_size: int) -> LayerTimes:
        """The same as its attention and its MLP."""
        return LayerTimes(
            attention=self._mean(lambda each: each.layer_in_two(kind, micro_batch_size).attention),
            mlp=self._mean(lambda each: each.layer_in_two(kind, micro_batch_size).mlp),
        )

    def embedding(self, kind: str, micro_batch_size: int) -> PassTimes:
        """Token (and position) embedding."""
        return self._first.embedding(kind, micro_batch_size)

    def head(self, kind: str, micro_batch_size: int) -> PassTimes:
        """Final norm, output layer and loss."""
        return self._first.head(kind, micro_batch_size)

    def recompute_s(self, kind: str, micro_batch_size: int, mode: RecomputeMode) -> float:
        """What recomputing one layer adds to its backward."""
        return sum(
            share * each.recompute_s(kind, micro_batch_size, mode) for share, each in self.parts
        )

    def weight_gradients_s(self, kind: str, micro_batch_size: int) -> float:
        """What gradients of its matrices take of one layer's backward."""
        return sum(
            share * each.weight_gradients_s(kind, micro_batch_size) for share, each in self.parts
        )

    def step_s(self, kind: str, num_parameters: int) -> float:
        """Optimizer step on a shard of `num_parameters`."""
        return self._first.step_s(kind, num_parameters)

    def includes_collectives(self, kind: str, section: ModelSection) -> bool:
        """Whether times of both kinds were measured in a TP group."""
        return all(each.includes_collectives(kind, section) for _, each in self.parts)

    @property
    def _first(self) -> TpComputeCost:
        return self.parts[0][1]


@dataclass(frozen=True, kw_only=True)
class MeanMemory:
    """`MemoryCost` of the layer between, in whole bytes; all but layers is that of the first."""

    parts: tuple[tuple[float, MemoryCost], ...]
    """Share of the layers, and their costs."""

    def _mean(self, size_of: Callable[[MemoryCost], int]) -> int:
        return math.ceil(sum(share * size_of(memory) for share, memory in self.parts))

    def layer_parameters(self) -> int:
        """Number of parameters of one transformer layer that are trained."""
        return self._mean(lambda each: each.layer_parameters())

    def embedding_parameters(self) -> int:
        """Number of parameters of the embedding that are trained."""
        return self._first.embedding_parameters()

    def head_parameters(self, *, tied_on_same_rank: bool) -> int:
        """Number of parameters of the final norm and the head that are trained."""
        return self._first.head_parameters(tied_on_same_rank=tied_on_same_rank)

    def frozen_parameters(self, section: ModelSection, *, tied_on_same_rank: bool = False) -> int:
        """Number of parameters that stay as they are, whole on every GPU."""
        return self._mean(
            lambda each: each.frozen_parameters(section, tied_on_same_rank=tied_on_same_rank)
        )

    def parameter_bytes(self, num_parameters: int) -> int:
        """Unsharded parameters as they are computed with."""
        return self._first.parameter_bytes(num_parameters)

    def gradient_bytes(self, num_parameters: int) -> int:
        """Unsharded gradients as they are accumulated."""
        return self._first.gradient_bytes(num_parameters)

    def state_bytes(self, num_parameters: int) -> int:
        """Main parameters and optimizer moments of a shard."""
        return self._first.state_bytes(num_parameters)

    def activation_bytes(
        self, micro_batch_size: int, mode: RecomputeMode, kind: str | None = None
    ) -> int:
        """What one layer keeps from forward to backward."""
        return self._mean(lambda each: each.activation_bytes(micro_batch_size, mode, kind))

    def saved_tensor_bytes(
        self, micro_batch_size: int, mode: RecomputeMode, kind: str | None = None
    ) -> tuple[int, ...]:
        """Those of the kind that has more of them."""
        found = [each.saved_tensor_bytes(micro_batch_size, mode, kind) for _, each in self.parts]
        return max(found, key=len)

    def delayed_bytes(self, micro_batch_size: int) -> int:
        """What one layer keeps from a backward to weight gradients that are computed apart."""
        return self._mean(lambda each: each.delayed_bytes(micro_batch_size))

    def arriving_bytes(self, micro_batch_size: int) -> int:
        """Gradients of what a layer's last matrices return, of the kind that has more."""
        return max(each.arriving_bytes(micro_batch_size) for _, each in self.parts)

    def boundary_bytes(self, micro_batch_size: int) -> int:
        """One activation between two layers, as it is sent."""
        return self._first.boundary_bytes(micro_batch_size)

    def head_bytes(self, micro_batch_size: int) -> int:
        """Logits and what the loss keeps while the head runs."""
        return self._first.head_bytes(micro_batch_size)

    @property
    def _first(self) -> MemoryCost:
        return self.parts[0][1]


@dataclass(frozen=True, kw_only=True)
class MeanTpCosts:
    """`TpCosts` of the layer between; what concerns experts is that of the first."""

    parts: tuple[tuple[float, TpCosts], ...]
    """Share of the layers, and their costs."""

    def of_rank(self, part: TpShard, dtype: ComputeDtype | None) -> TpRankCosts:
        """Costs of a rank with this part."""
        found = [(share, each.of_rank(part, dtype)) for share, each in self.parts]
        return TpRankCosts(
            compute=MeanCompute(parts=tuple((share, each.compute) for share, each in found)),
            memory=MeanMemory(parts=tuple((share, each.memory) for share, each in found)),
        )

    def cut_parameters(self, section: ModelSection) -> Mapping[UnitKind, int]:
        """Of a layer between, rounded down; simulations ask each kind."""
        found: dict[UnitKind, float] = {}
        for share, each in self.parts if section == "layer" else ((1.0, self._first),):
            for kind, count in each.cut_parameters(section).items():
                found[kind] = found.get(kind, 0) + share * count
        return {kind: int(count) for kind, count in found.items()}

    @property
    def traits(self) -> TpTraits:
        """As of the others."""
        return self._first.traits

    def share_of_tokens(self, experts: range) -> float:
        """Of all tokens those that pass one of these experts of a layer at least."""
        return self._first.share_of_tokens(experts)

    @property
    def _first(self) -> TpCosts:
        return self.parts[0][1]


@dataclass(frozen=True, kw_only=True)
class DenseAmongExperts:
    """`LayerKinds` of a model with experts whose layers `dense` have none."""

    dense: frozenset[int]
    """Numbers of layers."""
    experts: LayerCosts
    without: LayerCosts
    _means: dict[tuple[int, int], LayerCosts] = field(init=False, default_factory=dict)

    def runs(self, first: int, stop: int) -> Sequence[tuple[LayerCosts, int]]:
        """Costs of layers [first, stop) in order, and how many alike follow each other."""
        kinds = groupby(range(first, stop), key=self.dense.__contains__)
        found = [
            (self.without if is_dense else self.experts, len(list(layers)))
            for is_dense, layers in kinds
        ]
        return found or [(self.experts, 0)]

    def mean(self, first: int, stop: int) -> LayerCosts:
        """Costs of a layer between those, so many of which cost as much together."""
        key = self.num_with_experts(first, stop), stop - first
        if key not in self._means:
            self._means[key] = self._between(key[0] / key[1] if key[1] else 1.0)
        return self._means[key]

    def num_with_experts(self, first: int, stop: int) -> int:
        """Of the layers those with experts."""
        return sum(layer not in self.dense for layer in range(first, stop))

    def _between(self, share: float) -> LayerCosts:
        if share in (0.0, 1.0):
            return self.experts if share else self.without
        parts = (share, self.experts), (1 - share, self.without)
        tp_costs = [(each, costs.tp_costs) for each, costs in parts if costs.tp_costs is not None]
        return LayerCosts(
            **_mean_costs(parts),
            by_dtype={
                name: DtypeCosts(
                    **_mean_costs([(each, costs.by_dtype[name]) for each, costs in parts])
                )
                for name in self.experts.by_dtype
            },
            tp_costs=MeanTpCosts(parts=tuple(tp_costs)) if tp_costs else None,
        )


def _mean_costs(parts: Sequence[tuple[float, DtypeCosts]]) -> dict[str, Any]:
    # A search's costs of single GPUs are those of TP groups, too (`CostModels`).
    computes = tuple((each, cast(TpComputeCost, costs.compute)) for each, costs in parts)
    return {
        "compute": MeanCompute(parts=computes),
        "memory": MeanMemory(parts=tuple((each, costs.memory) for each, costs in parts)),
    }
