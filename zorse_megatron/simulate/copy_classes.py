"""Which copies of a pipeline run at the same times (see `equal_ranks`).

Colour refinement (one-dimensional Weisfeiler-Leman) on copies and links: copies that look the same
are of one class; links are alike if they have the same bandwidth and are crossed by equally many
copies of each transfer in each class; copies of a class that cross links that are not alike are
told apart. Repeated until nothing changes. O(rounds x transfers x links on a way).
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from zorse_megatron.costs.interface import CommCost
from zorse_megatron.simulate.network_loads import EqualLinks

Edge = tuple[int, int]
"""(source, target), as global ranks."""


@dataclass(frozen=True, kw_only=True)
class CopyClasses:
    """A partition of the copies."""

    first: tuple[int, ...]
    """Copy -> the first copy of its class."""
    links: EqualLinks
    """For a simulation of the first copy of each class."""


def classify_copies(
    comm: CommCost,
    copies: Sequence[Mapping[int, int]],
    edges: Sequence[Edge],
    rings: Sequence[Sequence[int]],
    looks: Sequence[Hashable],
) -> CopyClasses:
    """Partition the copies.

    `copies`: for each copy, rank of copy 0 -> the rank in its place; `edges`: pairs of ranks of
    copy 0 that send something; `rings`: the ranks of each collective, which loads the links of its
    ring once; `looks`: what must be equal in copies of one class to begin with.
    """
    network = _CopyNetwork(comm, copies, edges, rings)
    classes = _numbered(looks)
    while True:
        colours, loads = network.colours(classes)
        finer = _numbered(
            [
                (
                    classes[copy],
                    tuple(tuple(sorted(colours[name] for name in path)) for path in paths),
                )
                for copy, paths in enumerate(network.paths)
            ]
        )
        if max(finer) == max(classes):
            break
        classes = finer
    first = [classes.index(number) for number in classes]
    one_of: dict[int, str] = {}
    return CopyClasses(
        first=tuple(first),
        links=EqualLinks(
            same_as={name: one_of.setdefault(colour, name) for name, colour in colours.items()},
            copies={
                (copies[copy][edge[0]], copies[copy][edge[1]]): {
                    name: loads[name][number, classes[copy]] for name in path
                }
                for copy in sorted(set(first))
                for number, (edge, path) in enumerate(zip(edges, network.paths[copy], strict=True))
            },
        ),
    )


class _CopyNetwork:
    """The links that each copy's transfers and the collectives cross."""

    def __init__(
        self,
        comm: CommCost,
        copies: Sequence[Mapping[int, int]],
        edges: Sequence[Edge],
        rings: Sequence[Sequence[int]],
    ) -> None:
        self.comm = comm
        self.capacity: dict[str, float] = {}
        self.paths = [
            [self._path(names[source], names[target]) for source, target in edges]
            for names in copies
        ]
        """Copy -> names of the links on the way of each of its transfers."""
        self.rings = [
            tuple(
                dict.fromkeys(
                    name
                    for pair in zip(ring, [*ring[1:], ring[0]], strict=True)
                    for name in self._path(*pair)
                )
            )
            for ring in rings
            if len(ring) > 1
        ]

    def _path(self, source: int, target: int) -> tuple[str, ...]:
        found = dict(self.comm.shared_links(source, target))
        self.capacity.update(found)
        return tuple(found)

    def colours(
        self, classes: Sequence[int]
    ) -> tuple[dict[str, int], dict[str, Counter[Hashable]]]:
        """Link -> its colour, and link -> (number of the transfer, class) -> copies on it."""
        loads: dict[str, Counter[Hashable]] = {name: Counter() for name in self.capacity}
        for copy, paths in enumerate(self.paths):
            for number, path in enumerate(paths):
                for name in path:
                    loads[name][number, classes[copy]] += 1
        for number, ring in enumerate(self.rings):
            for name in ring:
                loads[name]["ring", number] += 1
        looks = [(self.capacity[name], frozenset(load.items())) for name, load in loads.items()]
        return dict(zip(loads, _numbered(looks), strict=True)), loads


def _numbered(looks: Sequence[Hashable]) -> list[int]:
    """Number of each look, in the order in which looks appear first."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(look, len(numbers)) for look in looks]
