"""Costs of the ranks of tensor-parallel sets, made when a part is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from zorse_megatron.costs.interface import ModelSection, RankPart, SetRankCosts
from zorse_megatron.planner.inputs.cost_models import CostModels
from zorse_megatron.schedules.set_parts import SetParts, UnitKind
from zorse_megatron.schema.gpus.gpu import DTYPE_OF, ComputeDtype
from zorse_megatron.schema.model.model_shape import ModelShape


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

    As Megatron's layers are told (`adapter.model.local_sizes`).
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
