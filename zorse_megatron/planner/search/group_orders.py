"""Orders in which groups follow one another in the model."""

from collections.abc import Iterator, Sequence
from itertools import permutations

from zorse_megatron.planner.closed_form.device_groups import Team
from zorse_megatron.planner.inputs.search_inputs import Inputs

_EVERY_ORDER_UP_TO = 4  # groups; 4! = 24


def orders(inputs: Inputs, teams: Sequence[Team]) -> list[tuple[Team, ...]]:
    """Orders worth trying, different from one another, regions together in each.

    By rank; by free memory, because early groups hold more in flight; by speed both ways; by
    bandwidth inside. With few groups: every order.
    """
    found: dict[tuple[object, ...], tuple[Team, ...]] = {}
    for order in _orders(inputs, teams):
        found.setdefault(tuple(_place(inputs, team) for team in order), order)
    return list(found.values())


def _orders(inputs: Inputs, teams: Sequence[Team]) -> Iterator[tuple[Team, ...]]:
    by_rank = sorted(teams, key=lambda team: team.ranks)
    region = {team.ranks: _region(inputs, team) for team in teams}
    regions = list(dict.fromkeys(region[team.ranks] for team in by_rank))
    for way in (regions, regions[::-1]) if len(regions) > 1 else (regions,):
        for ranked in (
            by_rank,
            sorted(by_rank, key=lambda team: -_memory_per_speed(inputs, team)),
            sorted(by_rank, key=lambda team: (_num_nodes(inputs, team), team.ranks)),
            sorted(by_rank, key=lambda team: _memory_per_speed(inputs, team)),
            by_rank[::-1],
        ):
            yield tuple(sorted(ranked, key=lambda team: way.index(region[team.ranks])))
    if len(teams) <= _EVERY_ORDER_UP_TO:
        yield from permutations(by_rank)


def _memory_per_speed(inputs: Inputs, team: Team) -> float:
    """Bytes per layer that the team will have: those with most can hold most in flight."""
    memory = sum(cell.capacity_bytes * len(cell.ranks) for cell in team.cells)
    speed = sum(
        len(cell.ranks) / inputs.compute.layer(cell.kind, 1).forward_s for cell in team.cells
    )
    return memory / speed


def _num_nodes(inputs: Inputs, team: Team) -> int:
    """Teams on many nodes reduce slowly: last in the model, they are done while others compute."""
    return len({inputs.spec.node_of(rank) for rank in team.ranks})


def _region(inputs: Inputs, team: Team) -> tuple[str, ...]:
    spec = inputs.spec
    return tuple(sorted({spec.nodes[spec.node_of(rank)].region for rank in team.ranks}))


def _place(inputs: Inputs, team: Team) -> tuple[object, ...]:
    """Equal for teams that look the same and are in the same nodes or in nodes of one look."""
    spec = inputs.spec
    nodes = tuple(
        (spec.nodes[node].region, spec.nodes[node].switch, spec.nodes[node].gpu_kinds)
        for node in sorted({spec.node_of(rank) for rank in team.ranks})
    )
    return (team.look, nodes)
