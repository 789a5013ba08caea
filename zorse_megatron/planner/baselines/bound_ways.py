"""How a GPU may compute its part of a plan, as far as lower bounds have to know."""

from collections.abc import Iterator
from dataclasses import dataclass

from zorse_megatron.costs.interface import (
    WHOLE,
    ComputeCost,
    PassTimes,
    RankPart,
    SetComputeCost,
)
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schema.gpus.gpu import ComputeDtype
from zorse_megatron.schema.plan.plan import Parts


@dataclass(frozen=True, kw_only=True)
class Way:
    """Costs of a rank that has these parts of each layer and of the vocabulary."""

    compute: ComputeCost
    in_two: SetComputeCost | None = None
    """The same, attention and MLP apart; None: where they are not asked for."""
    attention: float = 1.0
    mlp: float = 1.0
    rows: float = 1.0

    def layer_s(self, kind: str, size: int, *, recomputing: bool) -> float:
        """A whole layer at this rank's rate."""
        if (self.attention, self.mlp) != (1.0, 1.0):
            return sum(self.halves_s(kind, size, recomputing=recomputing))
        again_s = self.compute.recompute_s(kind, size, "full") if recomputing else 0.0
        return both_s(self.compute.layer(kind, size)) + again_s

    def halves_s(self, kind: str, size: int, *, recomputing: bool) -> tuple[float, float]:
        """A whole attention and a whole MLP."""
        assert self.in_two is not None
        halves = self.in_two.layer_in_two(kind, size)
        attention_s, mlp_s = (
            both_s(each) + (each.forward_s if recomputing else 0.0)
            for each in (halves.attention, halves.mlp)
        )
        return attention_s / self.attention, mlp_s / self.mlp


def both_s(times: PassTimes) -> float:
    """Forward and backward."""
    return times.forward_s + times.backward_s


def largest_set(inputs: Inputs) -> int:
    """Most ranks that a tensor-parallel set of a plan may have."""
    groups, space = inputs.model.num_query_groups, inputs.space
    if inputs.sets is None or inputs.joined_units is not None or groups is None:
        return 1
    on_node = max(node.num_gpus for node in inputs.spec.nodes)
    near = inputs.world_size if space.sets_across_nodes else on_node
    return min(near, groups, space.max_tensor_parallel or near)


def may_share_layers(inputs: Inputs) -> bool:
    """Whether GPUs of several kinds may have other parts of the attention than of the MLP."""
    if largest_set(inputs) == 1 or not inputs.space.unequal_parts:
        return False
    if inputs.space.sets_across_nodes:
        return len(set(inputs.kinds)) > 1
    return any(len(set(node.gpu_kinds)) > 1 for node in inputs.spec.nodes)


def ways_to_compute(inputs: Inputs, kind: str, dtypes: tuple[ComputeDtype, ...]) -> Iterator[Way]:
    """Yield every way in which a plan may let a kind compute.

    Of sets only what was measured in them: otherwise a part takes no less than its part of the time
    of the whole, as what is not cut takes as long.
    """
    own = inputs.own_types[kind] if inputs.own_types is not None else None
    allowed: list[ComputeDtype | None] = [None]
    allowed += [
        dtype
        for dtype in inputs.by_dtype
        if (dtype in dtypes if own is None else own.computes_in(dtype))
    ]
    for dtype in allowed:
        compute = inputs.compute if dtype is None else inputs.by_dtype[dtype].compute
        if largest_set(inputs) == 1:
            yield Way(compute=compute)
            continue
        assert inputs.sets is not None
        yield Way(compute=compute, in_two=inputs.sets.of_rank(WHOLE, dtype).compute)
        for degree in range(2, largest_set(inputs) + 1):
            equal = inputs.sets.of_rank(RankPart(degree=degree), dtype).compute
            if equal.includes_collectives(kind, "layer"):
                part = 1 / degree
                yield Way(compute=equal, in_two=equal, attention=part, mlp=part, rows=part)
                yield from _most_unequal(inputs, degree, dtype)


def _most_unequal(inputs: Inputs, degree: int, dtype: ComputeDtype | None) -> Iterator[Way]:
    """The rank that has as much as can be: nearly all of what is not cut is done once there."""
    model = inputs.model
    groups, columns, rows = model.num_query_groups, model.ffn_hidden_size, model.vocab_size
    if not inputs.space.unequal_parts or groups is None or columns is None or rows is None:
        return
    assert inputs.sets is not None
    others = degree - 1
    parts = Parts(
        kv_groups=(groups - others, *(1,) * others),
        mlp_columns=(columns - others, *(1,) * others),
        vocabulary_rows=(rows - others, *(1,) * others),
    )
    found = inputs.sets.of_rank(RankPart(degree=degree, parts=parts), dtype).compute
    yield Way(
        compute=found,
        in_two=found,
        attention=(groups - others) / groups,
        mlp=(columns - others) / columns,
        rows=(rows - others) / rows,
    )
