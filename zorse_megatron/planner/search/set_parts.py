"""Parts that the ranks of a tensor-parallel set may hold: equal ones, or by speed and memory."""

import itertools
from collections.abc import Iterator, Sequence

from zorse_megatron.costs.interface import WHOLE
from zorse_megatron.planner.inputs.possible_sets import parts_are_equal
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schema.plan.plan import Parts

# Columns of the MLP and rows of the vocabulary are dealt out in multiples of this where they can
# be, for the sake of matrix products; with few of them, in smaller ones.
_GRAIN = 128
_LEAST_GRAINS = 16
# From parts by speed to parts by memory.
_BLENDS = (0.0, 0.25, 0.5, 0.75, 1.0)
_MICRO_BATCH = 4  # at which speeds are compared
_EVERY_COMPOSITION_UP_TO = 12


def choices_of_parts(inputs: Inputs, ranks: Sequence[int]) -> list[Parts | None]:
    """Parts worth trying for a set, None for equal ones; nothing where none are possible."""
    kinds = {inputs.kinds[rank] for rank in ranks}
    divides = parts_are_equal(inputs, len(ranks))
    found: dict[Parts | None, None] = {None: None} if divides else {}
    if inputs.space.unequal_parts and (len(kinds) > 1 or not divides):
        found.update(dict.fromkeys(_unequal(inputs, ranks)))
    return list(found)


def _unequal(inputs: Inputs, ranks: Sequence[int]) -> Iterator[Parts]:
    model = inputs.model
    groups, columns, rows = model.num_query_groups, model.ffn_hidden_size, model.vocab_size
    if groups is None or columns is None or rows is None:
        return
    attention, mlp, head = _speeds(inputs, ranks)
    room = _normed([float(inputs.tensor_capacities_bytes[rank]) for rank in ranks])
    for part in _BLENDS:
        yield Parts(
            kv_groups=apportioned(groups, _blend(attention, room, part)),
            mlp_columns=_in_grains(columns, _blend(mlp, room, part)),
            vocabulary_rows=_in_grains(rows, _blend(head, room, part)),
        )
    for counts in _compositions(groups, len(ranks)):
        share = _normed([float(count) for count in counts])
        for of_mlp in (mlp, share):
            yield Parts(
                kv_groups=counts,
                mlp_columns=_in_grains(columns, of_mlp),
                vocabulary_rows=_in_grains(rows, _blend(head, room, 0.5)),
            )


def _compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """Every way to give each rank one KV group or more; none where there are many."""
    if total > _EVERY_COMPOSITION_UP_TO or parts > total:
        return []
    found: list[tuple[int, ...]] = []
    for cuts in itertools.combinations(range(1, total), parts - 1):
        if len(found) >= _EVERY_COMPOSITION_UP_TO:
            return []
        ends = (0, *cuts, total)
        found.append(tuple(b - a for a, b in itertools.pairwise(ends)))
    return found


def _speeds(inputs: Inputs, ranks: Sequence[int]) -> tuple[list[float], list[float], list[float]]:
    """Parts of attention, MLP and head that take equally long on all ranks."""
    assert inputs.sets is not None
    compute = inputs.sets.of_rank(WHOLE, None).compute
    size = min(_MICRO_BATCH, inputs.global_batch_size)
    layers = [compute.layer_in_two(inputs.kinds[rank], size) for rank in ranks]
    heads = [compute.head(inputs.kinds[rank], size) for rank in ranks]
    return (
        _normed([1 / (each.attention.forward_s + each.attention.backward_s) for each in layers]),
        _normed([1 / (each.mlp.forward_s + each.mlp.backward_s) for each in layers]),
        _normed([1 / (each.forward_s + each.backward_s) for each in heads]),
    )


def _normed(values: Sequence[float]) -> list[float]:
    whole = sum(values)
    return [value / whole for value in values]


def _blend(one: Sequence[float], other: Sequence[float], part: float) -> list[float]:
    return [(1 - part) * a + part * b for a, b in zip(one, other, strict=True)]


def _in_grains(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    grain = grain_of(total, len(weights))
    return tuple(grain * count for count in apportioned(total // grain, weights))


def grain_of(total: int, degree: int) -> int:
    """In which multiples columns or rows are dealt out: the largest that leaves enough of them."""
    grain = _GRAIN
    while grain > 1 and (total % grain or total // grain < _LEAST_GRAINS * degree):
        grain //= 2
    return grain


def apportioned(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in proportion, at least 1 each, by largest remainders.

    >>> apportioned(16, [0.8, 0.2]), apportioned(4, [0.98, 0.01, 0.01])
    ((13, 3), (2, 1, 1))
    """
    free = total - len(weights)
    whole = sum(weights)
    wanted = [max(0.0, total * weight / whole - 1) for weight in weights]
    scale = free / sum(wanted) if sum(wanted) else 0.0
    exact = [scale * each for each in wanted]
    counts = [int(each) for each in exact]
    left = free - sum(counts)
    order = sorted(range(len(exact)), key=lambda at: (counts[at] - exact[at], at))
    for at in order[:left]:
        counts[at] += 1
    return tuple(1 + count for count in counts)
