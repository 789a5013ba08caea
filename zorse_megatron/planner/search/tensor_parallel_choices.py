"""Which GPUs may be joined to tensor-parallel groups, and which parts their ranks may hold."""

import itertools
from collections.abc import Iterator, Sequence

from zorse_megatron.costs.interface import WHOLE
from zorse_megatron.plan.plan import TpShards
from zorse_megatron.planner.groupings.pools import hardware_key, set_partitions
from zorse_megatron.planner.inputs.search_inputs import Inputs, allows_tp_degree, tp_shards_are_even
from zorse_megatron.planner.inputs.tensor_parallel_members import TpGroup, TpLayout

EVERY_LAYOUT_UP_TO = 8
"""GPUs: with no more, every way to join those of a node is proposed."""
_DEGREES = (2, 4, 8)
_PORTIONS = (1.0, 0.5, 0.25)
_MOST = 400

TpGroups = tuple[tuple[int, ...], ...]


def tp_layouts_of(inputs: Inputs) -> list[TpLayout]:
    """Ways to join GPUs, each kind by itself where GPUs are many; none of them empty."""
    if inputs.tp_costs is None or inputs.space.max_tensor_parallel == 1:
        return []
    found = _every(inputs) if inputs.world_size <= EVERY_LAYOUT_UP_TO else _by_kind_of_node(inputs)
    ways = (tp_layout for tp_groups in found for tp_layout in _with_parts(inputs, tp_groups))
    return list(dict.fromkeys(itertools.islice(ways, _MOST)))


def requested(inputs: Inputs) -> list[TpLayout]:
    """What the training command asks for: every GPU in a TP group of as many ranks, where they
    divide.

    As Megatron numbers ranks: neighbours.
    """
    degree = inputs.space.requested_tensor_parallel
    if degree == 1 or not allows_tp_degree(inputs, degree):
        return []
    tp_groups = tuple(each for home in _homes(inputs) for each in _runs(home, degree))
    return list(_with_parts(inputs, tp_groups)) if tp_groups else []


def together(inputs: Inputs, first: TpLayout, second: TpLayout) -> TpLayout | None:
    """Both; None where they share GPUs."""
    ranks = {rank for each in first for rank in each.ranks}
    if any(rank in ranks for each in second for rank in each.ranks):
        return None
    return tuple(sorted((*first, *second), key=lambda each: each.ranks))


def _homes(inputs: Inputs) -> list[list[int]]:
    """Ranks that may be joined with one another: of each node, or all."""
    spec = inputs.spec
    if inputs.space.tp_across_nodes:
        return [list(range(inputs.world_size))]
    return [list(spec.ranks_of(node)) for node in range(len(spec.nodes))]


def _with_parts(inputs: Inputs, tp_groups: TpGroups) -> Iterator[TpLayout]:
    """Every choice of parts; TP groups of the same kinds of GPU take the same."""
    kinds = [tuple(inputs.kinds[rank] for rank in ranks) for ranks in tp_groups]
    choices: dict[tuple[str, ...], list[TpShards | None]] = {}
    for each, ranks in zip(kinds, tp_groups, strict=True):
        if each not in choices:
            choices[each] = tp_shards_to_try(inputs, ranks)
    for chosen in itertools.product(*choices.values()):
        parts = dict(zip(choices, chosen, strict=True))
        yield tuple(
            TpGroup(ranks=ranks, tp_shards=parts[each])
            for each, ranks in zip(kinds, tp_groups, strict=True)
        )


# Few GPUs: every way.


def _every(inputs: Inputs) -> Iterator[TpGroups]:
    """All partitions of each node's GPUs into TP groups, up to the names of equal GPUs."""
    per_home = [_partitions_of(inputs, home) for home in _homes(inputs)]
    for chosen in itertools.product(*per_home):
        tp_groups = tuple(sorted(ranks for some in chosen for ranks in some))
        if tp_groups:
            yield tp_groups


def _partitions_of(inputs: Inputs, home: Sequence[int]) -> list[TpGroups]:
    found: dict[object, TpGroups] = {}
    for partition in set_partitions(tuple(home)):
        tp_groups = tuple(ranks for ranks in partition if len(ranks) > 1)
        if all(allows_tp_degree(inputs, len(ranks)) for ranks in tp_groups):
            look = tuple(
                sorted(tuple(sorted(_look(inputs, rank) for rank in s)) for s in tp_groups)
            )
            found.setdefault(look, tp_groups)
    return sorted(found.values(), key=lambda tp_groups: (len(tp_groups), tp_groups))


def _look(inputs: Inputs, rank: int) -> tuple[str, int, int]:
    """Equal for GPUs that are alike, on one node."""
    return inputs.kinds[rank], inputs.capacities_bytes[rank], inputs.spec.node_of(rank)


# Many: all nodes that are alike in the same way.


def _by_kind_of_node(inputs: Inputs) -> Iterator[TpGroups]:
    """TP groups of equal GPUs, of all nodes that are alike or some of them; and of a node's
    kinds."""
    spec = inputs.spec
    alike: dict[object, list[int]] = {}
    for node in range(len(spec.nodes)):
        alike.setdefault(hardware_key(spec.nodes[node]), []).append(node)
    for nodes in alike.values():
        kinds = dict.fromkeys(spec.nodes[nodes[0]].gpu_kinds)
        for kind, degree in itertools.product(kinds, _DEGREES):
            if allows_tp_degree(inputs, degree):
                of_kind = (_of_kind(inputs, node, kind) for node in nodes)
                tp_groups = [each for ranks in of_kind for each in _runs(ranks, degree)]
                counts = dict.fromkeys(max(1, round(len(tp_groups) * part)) for part in _PORTIONS)
                yield from (tuple(tp_groups[:count]) for count in counts if tp_groups)
        if len(kinds) > 1:
            yield from _mixed(inputs, nodes, tuple(kinds))


def _of_kind(inputs: Inputs, node: int, kind: str) -> list[int]:
    return [rank for rank in inputs.spec.ranks_of(node) if inputs.kinds[rank] == kind]


def _runs(ranks: Sequence[int], degree: int) -> Iterator[tuple[int, ...]]:
    """Neighbours, as many together; those left over are in none."""
    for at in range(0, len(ranks) - degree + 1, degree):
        yield tuple(ranks[at : at + degree])


def _mixed(inputs: Inputs, nodes: Sequence[int], kinds: tuple[str, ...]) -> Iterator[TpGroups]:
    """One GPU of each of two kinds, or all GPUs of a node."""
    for pair in itertools.combinations(kinds, 2):
        tp_groups = []
        for node in nodes:
            sides = (_of_kind(inputs, node, kind) for kind in pair)
            tp_groups += [tuple(sorted(each)) for each in zip(*sides, strict=False)]
        if allows_tp_degree(inputs, 2) and tp_groups:
            yield tuple(tp_groups)
    whole = [tuple(inputs.spec.ranks_of(node)) for node in nodes]
    if all(allows_tp_degree(inputs, len(ranks)) for ranks in whole):
        yield tuple(whole)


# Parts that the ranks of a tensor-parallel group may hold: equal ones, or by speed and memory.


# Columns of the MLP and rows of the vocabulary are dealt out in multiples of this where they can
# be, for the sake of matrix products; with few of them, in smaller ones.
_GRAIN = 128
_LEAST_GRAINS = 16
# From parts by speed to parts by memory.
_BLENDS = (0.0, 0.25, 0.5, 0.75, 1.0)
_MICRO_BATCH = 4  # at which speeds are compared
_EVERY_COMPOSITION_UP_TO = 12


def tp_shards_to_try(inputs: Inputs, ranks: Sequence[int]) -> list[TpShards | None]:
    """Parts worth trying for a TP group, None for equal ones; nothing where none are possible."""
    kinds = {inputs.kinds[rank] for rank in ranks}
    divides, experts = tp_shards_are_even(inputs, len(ranks)), inputs.model.num_experts
    even = None if experts is None else TpShards(experts=dealt(experts, [1.0] * len(ranks)))
    found: dict[TpShards | None, None] = {even: None} if divides else {}
    if inputs.space.uneven_tp_shards and (len(kinds) > 1 or not divides):
        found.update(dict.fromkeys(_unequal(inputs, ranks)))
    return list(found)


def _unequal(inputs: Inputs, ranks: Sequence[int]) -> Iterator[TpShards]:
    model = inputs.model
    groups, columns, rows = model.num_query_groups, model.ffn_hidden_size, model.vocab_size
    if groups is None or columns is None or rows is None:
        return
    if model.moe_layer_freq and columns % len(ranks):
        return  # where experts are dealt out, columns of dense layers are cut evenly
    attention, mlp, head = _speeds(inputs, ranks)
    room = _normed([float(inputs.tensor_capacities_bytes[rank]) for rank in ranks])

    def with_mlp(weights: Sequence[float], **others: tuple[int, ...]) -> TpShards:
        if inputs.model.num_experts is not None:
            return TpShards(experts=dealt(inputs.model.num_experts, weights), **others)
        return TpShards(mlp_columns=_in_grains(columns, weights), **others)

    for part in _BLENDS:
        yield with_mlp(
            _blend(mlp, room, part),
            kv_groups=apportioned(groups, _blend(attention, room, part)),
            vocabulary_rows=_in_grains(rows, _blend(head, room, part)),
        )
    for counts in _compositions(groups, len(ranks)):
        share = _normed([float(count) for count in counts])
        for of_mlp in (mlp, share):
            yield with_mlp(
                of_mlp,
                kv_groups=counts,
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
    assert inputs.tp_costs is not None
    compute = inputs.tp_costs.of_rank(WHOLE, None).compute
    size = min(_MICRO_BATCH, inputs.global_batch_size)
    layers = [compute.layer_in_two(inputs.kinds[rank], size) for rank in ranks]
    heads = [compute.head(inputs.kinds[rank], size) for rank in ranks]
    return (
        _normed([1 / each.attention.both_s for each in layers]),
        _normed([1 / each.mlp.both_s for each in layers]),
        _normed([1 / each.both_s for each in heads]),
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


def dealt(total: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers of which the one that takes longest takes least, one after the other.

    >>> dealt(8, [0.62, 0.25, 0.13])
    (5, 2, 1)
    """
    counts = [0] * len(speeds)
    for _ in range(total):
        ends = [(count + 1) / speed for count, speed in zip(counts, speeds, strict=True)]
        counts[ends.index(min(ends))] += 1
    return tuple(counts)


def apportioned(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in proportion, at least 1 each, by largest remainders.

    >>> apportioned(16, [0.8, 0.2]), apportioned(4, [0.98, 0.01, 0.01])
    ((13, 3), (2, 1, 1))
    """
    free = total - len(weights)
    whole = sum(weights)
    wanted = [max(0.0, total * weight / whole - 1) for weight in weights]
    scale = free / sum(wanted) if sum(wanted) else 0.0
    return tuple(1 + count for count in rounded([scale * each for each in wanted], free))


def rounded(exact: Sequence[float], total: int) -> tuple[int, ...]:
    """Whole numbers that add up to `total`, up for the largest remainders.

    >>> rounded([2.5, 1.3, 0.2], 4)
    (3, 1, 0)
    """
    counts = [int(each) for each in exact]
    order = sorted(range(len(exact)), key=lambda at: (counts[at] - exact[at], at))
    for at in order[: total - sum(counts)]:
        counts[at] += 1
    return tuple(counts)
