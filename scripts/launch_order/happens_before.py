"""How many kernels of NCCL can wait on a rank at once, exactly: what the bound is compared with.

A kernel waits from its start until all of its ranks have started theirs. Of two kernels of a rank,
one surely ends before the other starts if its end happens before that start, through whatever
chain of streams, events and other ranks' kernels. Kernels that can all wait at once are such that
none surely ends before another one starts; so the most of them is the width of this partial order,
by Dilworth's theorem the number of kernels less a maximum matching of "surely ends before". Without
limits to queues and room, some order of events does bring all of them together.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from itertools import chain

from scripts.launch_order.launches import Launch, Operation


def most_waiting_exactly(launches: Sequence[Sequence[Launch]]) -> list[int]:
    """Rank -> the most of its kernels that some order of events brings together."""
    ended = _ended_before(launches)
    return [
        _width([item for item in items if item.operation is not None], ended) for items in launches
    ]


def _ended_before(
    launches: Sequence[Sequence[Launch]],
) -> dict[Launch | Operation, set[Operation]]:
    """Start of a launch, or end of an operation -> operations that have surely ended by then."""
    waits_for = dict(_waits(launches))
    ended: dict[Launch | Operation, set[Operation]] = {}
    for event in TopologicalSorter(waits_for).static_order():
        found = set().union(*(ended[earlier] for earlier in waits_for[event]))
        if not isinstance(event, Launch):
            found.add(event)
        ended[event] = found
    return ended


def _waits(
    launches: Sequence[Sequence[Launch]],
) -> Iterator[tuple[Launch | Operation, set[Launch | Operation]]]:
    """Each event, and those that it waits for. The end of what is no kernel is its start."""
    members: dict[Operation, set[Launch | Operation]] = defaultdict(set)
    last: dict[tuple[int, object], Launch] = {}
    holds: dict[int, Launch] = {}
    """Rank -> what its host has waited for last."""
    for item in chain.from_iterable(launches):
        before = [*item.after, *([holds[item.rank]] if item.rank in holds else [])]
        if (item.rank, item.stream) in last:
            before.append(last[item.rank, item.stream])
        last[item.rank, item.stream] = item
        if item.holds_host:
            holds[item.rank] = item
        yield item, {each if each.operation is None else each.operation for each in before}
        if item.operation is not None:
            members[item.operation].add(item)
    yield from members.items()


def _width(kernels: Sequence[Launch], ended: dict[Launch | Operation, set[Operation]]) -> int:
    later = {
        kernel: [other for other in kernels if kernel.operation in ended[other]]
        for kernel in kernels
    }
    before: dict[Launch, Launch] = {}
    """The second of each pair that is matched -> the first."""

    def match(kernel: Launch, tried: set[Launch]) -> bool:
        for other in later[kernel]:
            if other not in tried:
                tried.add(other)
                if other not in before or match(before[other], tried):
                    before[other] = kernel
                    return True
        return False

    return len(kernels) - sum(match(kernel, set()) for kernel in kernels)
