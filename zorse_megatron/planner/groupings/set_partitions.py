"""All ways to part some items into sets, where there are few."""

from collections.abc import Iterator
from typing import TypeVar

Item = TypeVar("Item")


def set_partitions(items: tuple[Item, ...]) -> Iterator[tuple[tuple[Item, ...], ...]]:
    """Each partition once: Bell's number of them, 203 for 6 items."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for partition in set_partitions(rest):
        yield ((first,), *partition)
        for i, part in enumerate(partition):
            yield (*partition[:i], (first, *part), *partition[i + 1 :])
