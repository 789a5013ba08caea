"""How evenly whole layers can be divided among groups: a quick score before any costing."""

import heapq
import math
from collections.abc import Sequence


def balanced_layers(
    num_layers: int, speeds: Sequence[float], most: Sequence[int] | None = None
) -> tuple[tuple[int, ...], float]:
    """Deal layers to groups, one each at least, so that the slowest is done soonest.

    `most`: layers that each group can hold. Returns layers of each group and the slowest group's
    layers / speed; infinite where the groups cannot hold all layers. Greedy is optimal here: every
    further layer goes where it is done soonest. O(layers * log groups).

    >>> balanced_layers(5, [1.0, 2.0]), balanced_layers(5, [1.0, 2.0], most=[9, 2])
    (((2, 3), 2.0), ((3, 2), 3.0))
    """
    room = list(most or [num_layers] * len(speeds))
    layers = [1] * len(speeds)
    if min(room) < 1 or sum(room) < num_layers or len(speeds) > num_layers:
        return tuple(layers), math.inf
    heap = [(2 / speed, index) for index, speed in enumerate(speeds) if room[index] > 1]
    heapq.heapify(heap)
    for _ in range(num_layers - len(speeds)):
        _, index = heap[0]
        layers[index] += 1
        if layers[index] < room[index]:
            heapq.heapreplace(heap, ((layers[index] + 1) / speeds[index], index))
        else:
            heapq.heappop(heap)
    slowest = max(count / speed for count, speed in zip(layers, speeds, strict=True))
    return tuple(layers), slowest
