"""Which GPUs may be joined to tensor-parallel sets: proposals, for all nodes that are alike."""

import itertools
from collections.abc import Iterator, Sequence

from zorse_megatron.planner.groupings.grouping import hardware_key
from zorse_megatron.planner.groupings.set_partitions import set_partitions
from zorse_megatron.planner.inputs.possible_sets import may_join
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.inputs.units import JoinedSet, Joining
from zorse_megatron.planner.search.set_parts import choices_of_parts
from zorse_megatron.schema.plan.plan import Parts

EVERY_JOINING_UP_TO = 8
"""GPUs: with no more, every way to join those of a node is proposed."""
_DEGREES = (2, 4, 8)
_PORTIONS = (1.0, 0.5, 0.25)
_MOST = 400

Sets = tuple[tuple[int, ...], ...]


def joinings_of(inputs: Inputs) -> list[Joining]:
    """Ways to join GPUs, each kind by itself where GPUs are many; none of them empty."""
    if inputs.sets is None or inputs.space.max_tensor_parallel == 1:
        return []
    found = _every(inputs) if inputs.world_size <= EVERY_JOINING_UP_TO else _by_kind_of_node(inputs)
    ways = (joining for sets in found for joining in _with_parts(inputs, sets))
    return list(dict.fromkeys(itertools.islice(ways, _MOST)))


def wished(inputs: Inputs) -> list[Joining]:
    """What the training command asks for: every GPU in a set of as many ranks, where they divide.

    As Megatron numbers ranks: neighbours.
    """
    degree = inputs.space.wished_tensor_parallel
    if degree == 1 or not may_join(inputs, degree):
        return []
    sets = []
    for home in _homes(inputs):
        sets += [tuple(home[at : at + degree]) for at in range(0, len(home) - degree + 1, degree)]
    return list(_with_parts(inputs, tuple(sets))) if sets else []


def together(inputs: Inputs, first: Joining, second: Joining) -> Joining | None:
    """Both; None where they share GPUs."""
    ranks = {rank for each in first for rank in each.ranks}
    if any(rank in ranks for each in second for rank in each.ranks):
        return None
    return tuple(sorted((*first, *second), key=lambda each: each.ranks))


def _homes(inputs: Inputs) -> list[list[int]]:
    """Ranks that may be joined with one another: of each node, or all."""
    spec = inputs.spec
    if inputs.space.sets_across_nodes:
        return [list(range(inputs.world_size))]
    return [list(spec.ranks_of(node)) for node in range(len(spec.nodes))]


def _with_parts(inputs: Inputs, sets: Sets) -> Iterator[Joining]:
    """Every choice of parts; sets of the same kinds of GPU take the same."""
    kinds = [tuple(inputs.kinds[rank] for rank in ranks) for ranks in sets]
    choices: dict[tuple[str, ...], list[Parts | None]] = {}
    for each, ranks in zip(kinds, sets, strict=True):
        if each not in choices:
            choices[each] = choices_of_parts(inputs, ranks)
    for chosen in itertools.product(*choices.values()):
        parts = dict(zip(choices, chosen, strict=True))
        yield tuple(
            JoinedSet(ranks=ranks, parts=parts[each])
            for each, ranks in zip(kinds, sets, strict=True)
        )


# Few GPUs: every way.


def _every(inputs: Inputs) -> Iterator[Sets]:
    """All partitions of each node's GPUs into sets, up to the names of equal GPUs."""
    per_home = [_partitions_of(inputs, home) for home in _homes(inputs)]
    for chosen in itertools.product(*per_home):
        sets = tuple(sorted(ranks for some in chosen for ranks in some))
        if sets:
            yield sets


def _partitions_of(inputs: Inputs, home: Sequence[int]) -> list[Sets]:
    found: dict[object, Sets] = {}
    for partition in set_partitions(tuple(home)):
        sets = tuple(ranks for ranks in partition if len(ranks) > 1)
        if all(may_join(inputs, len(ranks)) for ranks in sets):
            look = tuple(sorted(tuple(sorted(_look(inputs, rank) for rank in s)) for s in sets))
            found.setdefault(look, sets)
    return sorted(found.values(), key=lambda sets: (len(sets), sets))


def _look(inputs: Inputs, rank: int) -> tuple[str, int, int]:
    """Equal for GPUs that are alike, on one node."""
    return inputs.kinds[rank], inputs.capacities_bytes[rank], inputs.spec.node_of(rank)


# Many: all nodes that are alike in the same way.


def _by_kind_of_node(inputs: Inputs) -> Iterator[Sets]:
    """Sets of equal GPUs, of all nodes that are alike or some of them; and of a node's kinds."""
    spec = inputs.spec
    alike: dict[object, list[int]] = {}
    for node in range(len(spec.nodes)):
        alike.setdefault(hardware_key(spec.nodes[node]), []).append(node)
    for nodes in alike.values():
        kinds = dict.fromkeys(spec.nodes[nodes[0]].gpu_kinds)
        for kind, degree in itertools.product(kinds, _DEGREES):
            if may_join(inputs, degree):
                sets = [each for node in nodes for each in _runs(inputs, node, kind, degree)]
                counts = dict.fromkeys(max(1, round(len(sets) * part)) for part in _PORTIONS)
                yield from (tuple(sets[:count]) for count in counts if sets)
        if len(kinds) > 1:
            yield from _mixed(inputs, nodes, tuple(kinds))


def _runs(inputs: Inputs, node: int, kind: str, degree: int) -> Iterator[tuple[int, ...]]:
    ranks = [rank for rank in inputs.spec.ranks_of(node) if inputs.kinds[rank] == kind]
    for at in range(0, len(ranks) - degree + 1, degree):
        yield tuple(ranks[at : at + degree])


def _mixed(inputs: Inputs, nodes: Sequence[int], kinds: tuple[str, ...]) -> Iterator[Sets]:
    """One GPU of each of two kinds, or all GPUs of a node."""
    for pair in itertools.combinations(kinds, 2):
        sets = []
        for node in nodes:
            ranks = inputs.spec.ranks_of(node)
            sides = ([rank for rank in ranks if inputs.kinds[rank] == kind] for kind in pair)
            sets += [tuple(sorted(each)) for each in zip(*sides, strict=False)]
        if may_join(inputs, 2) and sets:
            yield tuple(sets)
    whole = [tuple(inputs.spec.ranks_of(node)) for node in nodes]
    if all(may_join(inputs, len(ranks)) for ranks in whole):
        yield tuple(whole)
