"""Water-filling of training state over free memory: as even as capacities allow."""

from collections.abc import Sequence


def water_fill(total: float, capacities: Sequence[float]) -> tuple[float, ...] | None:
    """Share `total` out so that none exceeds its capacity and the largest is as small as can be.

    Every share is the smaller of its capacity and one common level. None where the capacities do
    not hold the total. O(n log n).

    >>> water_fill(9, [10, 10, 10]), water_fill(9, [1, 5, 10]), water_fill(9, [1, 2, 3])
    ((3.0, 3.0, 3.0), (1, 4.0, 4.0), None)
    """
    if total > sum(max(0.0, capacity) for capacity in capacities):
        return None
    left, level = float(total), 0.0
    order = sorted(range(len(capacities)), key=lambda index: capacities[index])
    for position, index in enumerate(order):
        level = left / (len(order) - position)
        capacity = max(0.0, capacities[index])
        if capacity >= level:
            break
        left -= capacity
    return tuple(max(0.0, capacity) if capacity < level else level for capacity in capacities)
