"""Which elements cross in sums and gathers among ranks that hold different parts of a tensor.

What `runtime.part_exchange` does, in numbers: each owner gets what it owns of the gradients from
one rank of every other replica, and each holder gets the new parameters from their owners.
"""

from collections import Counter
from collections.abc import Iterable

from zorse_megatron.schedules.tensor_parts import OwnedBlock

Messages = Counter[tuple[int, int]]
"""(source, target) -> elements that cross; ranks, never the same one."""


def sum_messages(blocks: Iterable[OwnedBlock]) -> Messages:
    """Of gradients, to their owners."""
    return _added(
        ((source, each.owner), each.block.numel)
        for each in blocks
        for source in each.contributors
        if source != each.owner
    )


def gather_messages(blocks: Iterable[OwnedBlock]) -> Messages:
    """Of parameters, from their owners."""
    return _added(
        ((each.owner, target), each.block.numel)
        for each in blocks
        for target in each.holders
        if target != each.owner
    )


def _added(entries: Iterable[tuple[tuple[int, int], int]]) -> Messages:
    found = Messages()
    for pair, elements in entries:
        found[pair] += elements
    return found
