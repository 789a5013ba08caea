"""Water-filling of training state over free memory: as even as capacities allow."""

from collections.abc import Sequence


def water_fill(total: float, rooms: Sequence[float]) -> tuple[float, ...] | None:
    """Share `total` out so that no share exceeds its room and the largest is as small as can be.

    Every share is the smaller of its room and one common level. None where the rooms do not hold
    the total. O(n log n).

    >>> water_fill(9, [10, 10, 10]), water_fill(9, [1, 5, 10]), water_fill(9, [1, 2, 3])
    ((3.0, 3.0, 3.0), (1, 4.0, 4.0), None)
    """
    if total > sum(max(0.0, room) for room in rooms):
        return None
    left, level = float(total), 0.0
    order = sorted(range(len(rooms)), key=lambda index: rooms[index])
    for position, index in enumerate(order):
        level = left / (len(order) - position)
        room = max(0.0, rooms[index])
        if room >= level:
            break
        left -= room
    return tuple(max(0.0, room) if room < level else level for room in rooms)
