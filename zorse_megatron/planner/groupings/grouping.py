"""A grouping: which ranks form a group."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from zorse_megatron.topology.cluster_topology import MeasuredNode

Grouping = tuple[tuple[int, ...], ...]
"""The ranks of each group, ascending; groups by their first rank. Every rank is in one group."""

_NAMED = frozenset({"name", "first_rank", "host_memory_bytes", "region", "switch"})


def normalised(groups: Iterable[Iterable[int]]) -> Grouping:
    """Sort ranks and groups, and drop empty groups.

    >>> normalised([[5, 4], [], [0, 2]])
    ((0, 2), (4, 5))
    """
    return tuple(sorted(tuple(sorted(group)) for group in groups if group))


def hardware_key(node: MeasuredNode) -> tuple[Any, ...]:
    """Equal for nodes that differ in name, place and host memory only."""
    # Of fields alone: what a node has worked out and keeps does not tell it from another.
    return tuple(getattr(node, each.name) for each in fields(node) if each.name not in _NAMED)
