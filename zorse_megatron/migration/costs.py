"""What a move takes, before it is made: bytes sent, and the most that a rank holds in host memory.

A parameter's states (main parameter, first and second moment) are moved one after the other,
parameter by parameter. `state_bytes`: what an element takes in each of them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from zorse_megatron.migration.transfers import Owned, Transfer


def elements(owned: Owned) -> int:
    """All that a rank owns."""
    return sum(block.numel for blocks in owned.values() for block in blocks)


def sent_bytes(transfers: Iterable[Transfer], state_bytes: Sequence[int]) -> Counter[int]:
    """Rank -> bytes that it sends to others."""
    found: Counter[int] = Counter()
    for each in transfers:
        if each.is_sent:
            found[each.source] += each.block.numel * sum(state_bytes)
    return found


def received_bytes(transfers: Iterable[Transfer], state_bytes: Sequence[int]) -> Counter[int]:
    """Rank -> bytes that it gets from others."""
    found: Counter[int] = Counter()
    for each in transfers:
        if each.is_sent:
            found[each.destination] += each.block.numel * sum(state_bytes)
    return found


def peak_bytes(
    rank: int, owned: Owned, transfers: Iterable[Transfer], state_bytes: Sequence[int]
) -> int:
    """The most bytes of host memory that a move takes on a rank.

    The rank has set aside all that it owned under the old plan, and lets a parameter go when it
    is done with it. While one state of a parameter is moved there is beside it what comes from
    other ranks, and a copy of what is sent to them.
    """
    passing: Counter[str] = Counter()
    for each in transfers:
        if each.is_sent and rank in (each.source, each.destination):
            passing[each.parameter] += each.block.numel
    of_parameter = {name: sum(block.numel for block in owned[name]) for name in owned}
    aside = sum(of_parameter.values()) * sum(state_bytes)
    highest = aside
    for name in sorted({*passing, *of_parameter}):
        highest = max(highest, aside + passing[name] * max(state_bytes))
        aside -= of_parameter.get(name, 0) * sum(state_bytes)
    return highest
