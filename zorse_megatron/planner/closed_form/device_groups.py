"""The GPUs of one group, as classes of equal ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zorse_megatron.planner.inputs.search_inputs import Inputs


@dataclass(frozen=True, kw_only=True)
class Cell:
    """GPUs of a team that are equal to a planner: kind, memory, host."""

    kind: str
    capacity_bytes: int
    host_bytes: int | None
    """Each one's part of host memory; None where the cluster does not say."""
    host_link_bytes_per_s: float
    ranks: tuple[int, ...]

    @property
    def look(self) -> tuple[str, int, int, float, int]:
        """Equal for cells that cost the same."""
        host = -1 if self.host_bytes is None else self.host_bytes
        return (
            self.kind,
            self.capacity_bytes,
            host,
            self.host_link_bytes_per_s,
            len(self.ranks),
        )


@dataclass(frozen=True)
class Team:
    """The GPUs of one group."""

    cells: tuple[Cell, ...]
    """By kind, memory, host."""

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted(rank for cell in self.cells for rank in cell.ranks))

    @cached_property
    def _hash(self) -> int:
        return hash(self.cells)

    def __hash__(self) -> int:
        """Teams are in the keys of everything that is priced once."""
        return self._hash

    def __reduce__(self) -> tuple[type["Team"], tuple[tuple[Cell, ...]]]:
        """Leave the hash behind: another process hashes strings to other numbers."""
        return Team, (self.cells,)

    @cached_property
    def look(self) -> tuple[tuple[str, int, int, float, int], ...]:
        """Equal for teams whose computation and memory are equal."""
        return tuple(cell.look for cell in self.cells)


def round_of(team: Team, sizes: Sequence[int]) -> int:
    """Samples of one micro-batch on every GPU of a team."""
    return sum(len(cell.ranks) * size for cell, size in zip(team.cells, sizes, strict=True))


class Teams:
    """Makes teams of ranks, each once."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._made: dict[tuple[int, ...], Team] = {}
        links = {rank: inputs.comm.host_link_bytes_per_s(rank) for rank in range(inputs.world_size)}
        self._keys = [
            (
                inputs.kinds[rank],
                inputs.capacities_bytes[rank],
                -1 if (host := inputs.host_bytes[rank]) is None else host,
                links[rank],
            )
            for rank in range(inputs.world_size)
        ]

    def of(self, ranks: tuple[int, ...]) -> Team:
        """The team of these ranks. O(ranks) for new ones."""
        team = self._made.get(ranks)
        if team is None:
            team = self._made[ranks] = Team(self._cells(ranks))
        return team

    def _cells(self, ranks: tuple[int, ...]) -> tuple[Cell, ...]:
        found: dict[tuple[str, int, int, float], list[int]] = {}
        for rank in ranks:
            found.setdefault(self._keys[rank], []).append(rank)
        return tuple(
            Cell(
                kind=kind,
                capacity_bytes=capacity,
                host_bytes=None if host < 0 else host,
                host_link_bytes_per_s=link,
                ranks=tuple(members),
            )
            for (kind, capacity, host, link), members in sorted(found.items())
        )
