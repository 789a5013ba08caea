"""Peaks of simulated memory, without what an emulation does not count."""

from zorse_megatron.simulate.memory_ledger import Category, changes_of
from zorse_megatron.simulate.result import SimulationResult


def peaks_without(result: SimulationResult, *left_out: Category) -> tuple[int, ...]:
    """Rank -> the most bytes that all other categories have at once."""
    found = []
    for rank in range(len(result.stands_in)):
        start, changes = changes_of(result.timeline, rank)
        counted = [
            n for category, n in zip(Category, start, strict=True) if category not in left_out
        ]
        total = highest = sum(counted)
        for _, category, num_bytes in changes:
            if category not in left_out:
                total += num_bytes
                highest = max(highest, total)
        found.append(highest)
    return tuple(found)
