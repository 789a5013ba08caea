"""Orders in which groups follow one another in the model."""

from collections.abc import Iterator, Sequence
from itertools import permutations

from zorse_megatron.planner.closed_form.device_groups import DeviceGroup
from zorse_megatron.planner.inputs.search_inputs import Inputs

_EVERY_ORDER_UP_TO = 4  # groups; 4! = 24


def orders(inputs: Inputs, device_groups: Sequence[DeviceGroup]) -> list[tuple[DeviceGroup, ...]]:
    """Orders worth trying, different from one another, regions together in each.

    By rank; by free memory, because early groups hold more in flight; by speed both ways; by
    bandwidth inside. With few groups: every order.
    """
    found: dict[tuple[object, ...], tuple[DeviceGroup, ...]] = {}
    for order in _orders(inputs, device_groups):
        found.setdefault(tuple(_place(inputs, device_group) for device_group in order), order)
    return list(found.values())


def _orders(
    inputs: Inputs, device_groups: Sequence[DeviceGroup]
) -> Iterator[tuple[DeviceGroup, ...]]:
    by_rank = sorted(device_groups, key=lambda device_group: device_group.ranks)
    region = {device_group.ranks: _region(inputs, device_group) for device_group in device_groups}
    regions = list(dict.fromkeys(region[device_group.ranks] for device_group in by_rank))
    for way in (regions, regions[::-1]) if len(regions) > 1 else (regions,):
        for ranked in (
            by_rank,
            sorted(by_rank, key=lambda device_group: -_memory_per_speed(inputs, device_group)),
            sorted(
                by_rank,
                key=lambda device_group: (_num_nodes(inputs, device_group), device_group.ranks),
            ),
            sorted(by_rank, key=lambda device_group: _memory_per_speed(inputs, device_group)),
            by_rank[::-1],
        ):
            yield tuple(
                sorted(ranked, key=lambda device_group: way.index(region[device_group.ranks]))
            )
    if len(device_groups) <= _EVERY_ORDER_UP_TO:
        yield from permutations(by_rank)


def _memory_per_speed(inputs: Inputs, device_group: DeviceGroup) -> float:
    """Bytes per layer that the device group will have: those with most can hold most in flight."""
    memory = sum(
        gpu_class.capacity_bytes * len(gpu_class.ranks) for gpu_class in device_group.gpu_classes
    )
    speed = sum(
        len(gpu_class.ranks) / inputs.compute.layer(gpu_class.kind, 1).forward_s
        for gpu_class in device_group.gpu_classes
    )
    return memory / speed


def _num_nodes(inputs: Inputs, device_group: DeviceGroup) -> int:
    """Groups on many nodes reduce slowly: last in the model, they finish while others compute."""
    return len({inputs.spec.node_of(rank) for rank in device_group.ranks})


def _region(inputs: Inputs, device_group: DeviceGroup) -> tuple[str, ...]:
    spec = inputs.spec
    return tuple(sorted({spec.nodes[spec.node_of(rank)].region for rank in device_group.ranks}))


def _place(inputs: Inputs, device_group: DeviceGroup) -> tuple[object, ...]:
    """Equal for groups that look the same and are in the same nodes or in nodes of one look."""
    spec = inputs.spec
    nodes = tuple(
        (spec.nodes[node].region, spec.nodes[node].switch, spec.nodes[node].gpu_kinds)
        for node in sorted({spec.node_of(rank) for rank in device_group.ranks})
    )
    return (device_group.look, nodes)
