"""The GPUs of one group, as classes of equal ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zorse_megatron.planner.inputs.search_inputs import Inputs


@dataclass(frozen=True, kw_only=True)
class GpuClass:
    """GPUs of a device group that are equal to a planner: kind, memory, host."""

    kind: str
    capacity_bytes: int
    """What tensors may fill."""
    host_bytes: int | None
    """Each one's part of host memory; None where the cluster does not say."""
    host_link_bytes_per_s: float
    ranks: tuple[int, ...]

    @property
    def look(self) -> tuple[str, int, int, float, int]:
        """Equal for GPU classes that cost the same."""
        host = -1 if self.host_bytes is None else self.host_bytes
        return (
            self.kind,
            self.capacity_bytes,
            host,
            self.host_link_bytes_per_s,
            len(self.ranks),
        )


@dataclass(frozen=True)
class DeviceGroup:
    """The GPUs of one group."""

    gpu_classes: tuple[GpuClass, ...]
    """By kind, memory, host."""

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted(rank for gpu_class in self.gpu_classes for rank in gpu_class.ranks))

    @cached_property
    def _hash(self) -> int:
        return hash(self.gpu_classes)

    def __hash__(self) -> int:
        """Device groups are in the keys of everything that is costed once."""
        return self._hash

    def __reduce__(self) -> tuple[type["DeviceGroup"], tuple[tuple[GpuClass, ...]]]:
        """Leave the hash behind: another process hashes strings to other numbers."""
        return DeviceGroup, (self.gpu_classes,)

    @cached_property
    def look(self) -> tuple[tuple[str, int, int, float, int], ...]:
        """Equal for device groups whose computation and memory are equal."""
        return tuple(gpu_class.look for gpu_class in self.gpu_classes)


def round_samples_of(device_group: DeviceGroup, sizes: Sequence[int]) -> int:
    """Samples of one micro-batch on every GPU of a device group."""
    return sum(
        len(gpu_class.ranks) * size
        for gpu_class, size in zip(device_group.gpu_classes, sizes, strict=True)
    )


class DeviceGroups:
    """Makes device groups of ranks, each once."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._made: dict[tuple[int, ...], DeviceGroup] = {}
        links = {rank: inputs.comm.host_link_bytes_per_s(rank) for rank in range(inputs.world_size)}
        self._keys = [
            (
                inputs.kinds[rank],
                inputs.tensor_capacities_bytes[rank],
                -1 if (host := inputs.host_bytes[rank]) is None else host,
                links[rank],
            )
            for rank in range(inputs.world_size)
        ]

    def of(self, ranks: tuple[int, ...]) -> DeviceGroup:
        """The device group of these ranks. O(ranks) for new ones."""
        device_group = self._made.get(ranks)
        if device_group is None:
            device_group = self._made[ranks] = DeviceGroup(self._gpu_classes(ranks))
        return device_group

    def _gpu_classes(self, ranks: tuple[int, ...]) -> tuple[GpuClass, ...]:
        found: dict[tuple[str, int, int, float], list[int]] = {}
        for rank in ranks:
            found.setdefault(self._keys[rank], []).append(rank)
        return tuple(
            GpuClass(
                kind=kind,
                capacity_bytes=capacity,
                host_bytes=None if host < 0 else host,
                host_link_bytes_per_s=link,
                ranks=tuple(members),
            )
            for (kind, capacity, host, link), members in sorted(found.items())
        )
