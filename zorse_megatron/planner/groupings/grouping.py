"""A grouping: which ranks form a group."""

from collections.abc import Iterable
from typing import Any

from zorse_megatron.topology.cluster_topology import MeasuredNode

Grouping = tuple[tuple[int, ...], ...]
"""The ranks of each group, ascending; groups by their first rank. Every rank is in one group."""


def normalised(groups: Iterable[Iterable[int]]) -> Grouping:
    """Sort ranks and groups, and drop empty groups.

    >>> normalised([[5, 4], [], [0, 2]])
    ((0, 2), (4, 5))
    """
    return tuple(sorted(tuple(sorted(group)) for group in groups if group))


def hardware_key(node: MeasuredNode) -> tuple[Any, ...]:
    """Equal for nodes that differ in name, place and host memory only."""
    named = {"name", "first_rank", "host_memory_bytes", "region", "switch"}
    return tuple(value for field, value in vars(node).items() if field not in named)
