"""Times when kinds compute in different dtypes: one cost model per kind."""

from collections.abc import Mapping
from dataclasses import dataclass

from zorse_megatron.costs.interface import (
    LayerTimes,
    ModelSection,
    PassTimes,
    RecomputeMode,
    SetComputeCost,
)


@dataclass(frozen=True, kw_only=True)
class ByKind:
    """`ComputeCost` of several, one for each kind. Raises LookupError for an unknown kind."""

    computes: Mapping[str, SetComputeCost]
    """Kind -> its costs."""

    def layer(self, kind: str, micro_batch_size: int) -> PassTimes:
        """One transformer layer, nothing recomputed."""
        return self.computes[kind].layer(kind, micro_batch_size)

    def layer_in_two(self, kind: str, micro_batch_size: int) -> LayerTimes:
        """The same as its attention and its MLP."""
        return self.computes[kind].layer_in_two(kind, micro_batch_size)

    def embedding(self, kind: str, micro_batch_size: int) -> PassTimes:
        """Token (and position) embedding."""
        return self.computes[kind].embedding(kind, micro_batch_size)

    def head(self, kind: str, micro_batch_size: int) -> PassTimes:
        """Final norm, output layer and loss."""
        return self.computes[kind].head(kind, micro_batch_size)

    def recompute_s(self, kind: str, micro_batch_size: int, mode: RecomputeMode) -> float:
        """What recomputing one layer adds to its backward."""
        return self.computes[kind].recompute_s(kind, micro_batch_size, mode)

    def weight_gradients_s(self, kind: str, micro_batch_size: int) -> float:
        """What gradients of its matrices take of one layer's backward."""
        return self.computes[kind].weight_gradients_s(kind, micro_batch_size)

    def step_s(self, kind: str, num_parameters: int) -> float:
        """Optimizer step on a shard of `num_parameters`."""
        return self.computes[kind].step_s(kind, num_parameters)

    def includes_collectives(self, kind: str, section: ModelSection) -> bool:
        """Whether the times were measured in a set, so that its collectives are in them."""
        return self.computes[kind].includes_collectives(kind, section)
