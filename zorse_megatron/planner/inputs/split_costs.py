"""Costs of the ranks of tensor-parallel sets, made when a degree is asked for."""

from dataclasses import dataclass, field, replace

from zorse_megatron.costs.interface import SetRankCosts
from zorse_megatron.planner.inputs.cost_models import CostModels
from zorse_megatron.schema.gpus.gpu import DTYPE_OF, ComputeDtype


@dataclass(frozen=True, kw_only=True)
class SplitCosts:
    """`SetCosts` of a model on a cluster."""

    models: CostModels
    _made: dict[tuple[int, ComputeDtype | None], SetRankCosts] = field(default_factory=dict)

    @property
    def sequence_parallel(self) -> bool:
        """Whether ranks of a set have a part of the sequence each, between layers."""
        return self.models.computing.sequence_parallel

    def of_rank(self, degree: int, dtype: ComputeDtype | None) -> SetRankCosts:
        """Costs of one of `degree` ranks; None: in the type of the job."""
        key = degree, dtype
        if key not in self._made:
            split = replace(self.models, tensor_parallel=degree)
            if dtype is None:
                made = SetRankCosts(compute=split.compute, memory=split.memory[0])
            else:
                made = split.costs_in(DTYPE_OF[dtype])
            self._made[key] = made
        return self._made[key]
