"""Items in batches: `itertools.batched`, which Python has from 3.12 on only."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

_Item = TypeVar("_Item")


def batched(items: Iterable[_Item], size: int) -> Iterator[tuple[_Item, ...]]:
    """Yield the items in tuples of `size`, at least 1; the last one may be shorter.

    >>> list(batched("abcde", 2))
    [('a', 'b'), ('c', 'd'), ('e',)]
    """
    remaining = iter(items)
    while batch := tuple(islice(remaining, size)):
        yield batch
