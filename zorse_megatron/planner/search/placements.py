"""Placements: which group has which layers, and those that differ from one by one step."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from zorse_megatron.plan.plan import Chunk, Plan, ScheduleName

Rows = tuple[tuple[int, int], ...]
"""(group, number of layers) of each chunk."""
_MOST_CHUNKS = 3
"""For each group, on average."""


def rows_of(plan: Plan) -> Rows:
    return tuple((chunk.group, chunk.num_layers) for chunk in plan.chunks)


def layers_of(rows: Rows) -> Counter[int]:
    """Of each group."""
    found: Counter[int] = Counter()
    for group, layers in rows:
        found[group] += layers
    return found


def with_placement(plan: Plan, rows: Rows) -> Plan:
    """The plan with its layers there; what depends on them is to be found anew."""
    chunks, first = [], 0
    for group, layers in rows:
        chunks.append(Chunk(group=group, layers=(first, first + layers)))
        first += layers
    name: ScheduleName = "interleaved" if len(rows) > len(plan.groups) else "1f1b"
    plan = replace(plan, chunks=tuple(chunks), schedule=replace(plan.schedule, name=name))
    return plan.with_replicas(replace(e, compute_s=None) for _, _, e in plan.numbered_replicas())


def v_shaped(rows: Rows) -> Rows:
    """As many layers of each group: a half of them, in this order, then the others backwards."""
    layers = layers_of(rows)
    order = list(dict.fromkeys(group for group, _ in rows))
    down = [(group, -(-layers[group] // 2)) for group in order]
    up = [(group, layers[group] // 2) for group in reversed(order)]
    return without_seams([*down, *up])


def near(rows: Rows, num_groups: int) -> set[Rows]:
    """Placements by one step: layers that move, chunks that are made, joined or exchanged."""
    steps = (*_moved(rows), *_with_new_chunk(rows, num_groups), *_exchanged(rows), *_joined(rows))
    found = {without_seams(step) for step in steps} - {rows}
    everyone = set(range(num_groups))
    most = _MOST_CHUNKS * num_groups
    return {each for each in found if len(each) <= most and {g for g, _ in each} == everyone}


def _moved(rows: Rows) -> Iterator[list[tuple[int, int]]]:
    """One layer from a chunk to another one."""
    for source, target in product(range(len(rows)), repeat=2):
        if source != target:
            found = list(rows)
            found[source] = (rows[source][0], rows[source][1] - 1)
            found[target] = (rows[target][0], rows[target][1] + 1)
            yield found


def _with_new_chunk(rows: Rows, num_groups: int) -> Iterator[list[tuple[int, int]]]:
    """One or two layers of a chunk for a new one of any group, anywhere."""
    places = product(range(len(rows)), range(len(rows) + 1), range(num_groups), (1, 2))
    for donor, place, group, layers in places:
        if rows[donor][1] > layers:
            found = list(rows)
            found[donor] = (rows[donor][0], rows[donor][1] - layers)
            found.insert(place, (group, layers))
            yield found


def _exchanged(rows: Rows) -> Iterator[list[tuple[int, int]]]:
    """Two neighbours."""
    for place in range(len(rows) - 1):
        yield [*rows[:place], rows[place + 1], rows[place], *rows[place + 2 :]]


def _joined(rows: Rows) -> Iterator[list[tuple[int, int]]]:
    """A chunk's layers to another one of its group."""
    for source, target in product(range(len(rows)), repeat=2):
        if source != target and rows[source][0] == rows[target][0]:
            found = list(rows)
            found[target] = (rows[target][0], rows[target][1] + rows[source][1])
            del found[source]
            yield found


def without_seams(rows: Sequence[tuple[int, int]]) -> Rows:
    """Without empty chunks, and neighbours of one group as one."""
    found: list[tuple[int, int]] = []
    for group, layers in rows:
        if found and found[-1][0] == group:
            found[-1] = (group, found[-1][1] + layers)
        elif layers:
            found.append((group, layers))
    return tuple(found)
