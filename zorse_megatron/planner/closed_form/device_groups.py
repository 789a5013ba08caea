"""A stage: a group's GPUs as classes of equal ones, its layers, its exact batch split."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from zorse_megatron.costs.interface import RecomputeMode
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


def layers_per_s(inputs: Inputs, device_group: DeviceGroup, sizes: Sequence[int]) -> float:
    """Layers of one sample per second, forward and backward; `sizes`: of each GPU class."""
    return sum(
        len(gpu_class.ranks) * size / inputs.compute.layer(gpu_class.kind, size).both_s
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


# A pipeline stage: a device group with a number of layers, at a position in the pipeline.


MicroBatchLevel = int | tuple[int, ...]
"""Largest micro-batch size of a group, or the micro-batch size of each of its GPU classes."""


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """What GPUs of a group do to fit."""

    mode: RecomputeMode = "none"
    recomputed: int = 0
    """Layers (of all its chunks together) that are recomputed."""
    offload_parameters: bool = False
    """Only under breadth_first, which releases them."""
    offload_state: bool = False
    offload_gradients: bool = False
    """Only under breadth_first, which reduces them chunk by chunk."""
    offload_activations: bool = False

    @property
    def offloads_anything(self) -> bool:
        """Whether anything waits in the host."""
        return (
            self.offload_parameters
            or self.offload_state
            or self.offload_gradients
            or self.offload_activations
        )


ClassSettings = tuple[MemorySettings, ...]
"""What each GPU class of a stage does to fit."""


@dataclass(frozen=True, kw_only=True)
class StagePosition:
    """Where a device group stands in the pipeline."""

    is_first: bool
    is_last: bool
    in_flight_limit: float
    """Samples in flight between forwards and backwards, once for each chunk (not breadth_first)."""
    schedule: str = "1f1b"
    num_chunks: int = 1
    slow_before: bool = False
    """Whether the transfer from the group before is given in the plan (see `build_plan`)."""
    slow_after: bool = False
    """Whether that to the group after is."""


@dataclass(frozen=True)
class Stage:
    """A device group with a number of layers, at a position in the pipeline."""

    device_group: DeviceGroup
    num_layers: int
    sizes: tuple[int, ...]
    """Micro-batch size of each GPU class."""
    position: StagePosition
    reserve_bytes: int = 0
    """To be left free on each GPU, beside the margin."""

    @cached_property
    def num_chunks(self) -> int:
        """No more than there are layers."""
        return min(self.position.num_chunks, self.num_layers)

    @cached_property
    def round_samples(self) -> int:
        """Samples of one micro-batch on every GPU."""
        return round_samples_of(self.device_group, self.sizes)

    def alike(self, settings: MemorySettings) -> ClassSettings:
        """The same settings for all GPU classes."""
        return (settings,) * len(self.device_group.gpu_classes)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for stages that cost the same."""
        position = self.position
        return (
            self.device_group.look,
            self.num_layers,
            self.sizes,
            (position.is_first, position.is_last, position.schedule),
            (position.in_flight_limit, self.num_chunks),
            self.reserve_bytes,
        )


# Exact min-max split of a batch over unequal replicas: sizes and counts.
#
# Each replica runs n micro-batches of m samples, n * m samples in all; 0 is allowed. The slowest
# replica's n * t(m) is minimised exactly, with the sums n * m adding up to the batch exactly.
#
# Replicas are given as classes of equal ones. For a time limit, the sample counts that one replica
# can reach are the bits of an integer; those of several replicas are its sumset, found by doubling.
# The least limit whose sumset contains the batch is found by bisection over the times n * t(m).


@dataclass(frozen=True, kw_only=True)
class ReplicaClass:
    """Replicas that are equal."""

    count: int
    times_s: Mapping[int, float]
    """Micro-batch size -> seconds, forward and backward; only sizes that are allowed."""


@dataclass(frozen=True, kw_only=True)
class ReplicaShare:
    """What one replica runs."""

    micro_batch_size: int
    num_microbatches: int


BatchSplit = list[tuple[ReplicaShare, ...]]
"""What every replica runs: class -> its replicas, those with most samples first."""


def best_split(batch: int, classes: Sequence[ReplicaClass]) -> BatchSplit | None:
    """Return the split with the least time; None where no replica may run anything.

    Of several ways to run as many samples in time, a replica takes the smallest micro-batches.
    O(classes * log(replicas) * sizes * batch) word operations for each of O(log) limits.
    """
    if not any(each.count and each.times_s for each in classes):
        return None
    limits = _limits(batch, classes)
    index = bisect_left(limits, True, key=lambda limit: _reaches(batch, classes, limit))
    if index == len(limits):
        return None
    return _reconstructed(batch, classes, limits[index])


def rate_bound_s(batch: int, classes: Sequence[ReplicaClass]) -> float:
    """Return the time that the batch takes if it can be cut at will: a lower bound of any split."""
    rate = sum(
        each.count * max((size / time_s for size, time_s in each.times_s.items()), default=0.0)
        for each in classes
    )
    return batch / rate if rate else math.inf


def _limits(batch: int, classes: Sequence[ReplicaClass]) -> list[float]:
    """All times that the slowest replica of the best split can take, ascending.

    It takes no longer than with one micro-batch more on everyone than the lower bound has, if the
    sum can then be reached; where it cannot, the window is doubled.
    """
    low = rate_bound_s(batch, classes) * (1 - 1e-12)
    slowest = max(time_s for each in classes for time_s in each.times_s.values())
    width = slowest
    while not _reaches(batch, classes, low + width) and width < 4 * batch * slowest:
        width *= 2
    high = low + width
    found = {
        count * time_s
        for each in classes
        for size, time_s in each.times_s.items()
        for count in range(
            max(1, math.floor(low / time_s)), min(batch // size, math.floor(high / time_s) + 1) + 1
        )
    }
    return sorted(limit for limit in found if low <= limit <= high * (1 + 1e-12))


def _reaches(batch: int, classes: Sequence[ReplicaClass], limit_s: float) -> bool:
    reached = 1
    for each in classes:
        reached = _sumset(reached, _power(_reachable(batch, each, limit_s), each.count, batch))
        reached &= (1 << (batch + 1)) - 1
    return bool(reached >> batch & 1)


def _options(batch: int, each: ReplicaClass, limit_s: float) -> Iterator[tuple[int, int, float]]:
    """(size, most micro-batches, time of one) of a replica within the limit."""
    for size, time_s in sorted(each.times_s.items()):
        most = min(batch // size, math.floor(limit_s / time_s * (1 + 1e-12)))
        if most > 0:
            yield size, most, time_s


def _reachable(batch: int, each: ReplicaClass, limit_s: float) -> int:
    """Bit s is set where one replica can run s samples in time."""
    bits = 1
    for size, most, _ in _options(batch, each, limit_s):
        for count in range(1, most + 1):
            bits |= 1 << (size * count)
    return bits


def _sumset(first: int, second: int) -> int:
    """Bit s + t is set for every bit s of one and bit t of the other."""
    if first.bit_count() < second.bit_count():
        first, second = second, first
    result = at = 0
    while second:  # one run of TP group bits after the other
        zeros = (second & -second).bit_length() - 1
        second >>= zeros
        ones = (~second & (second + 1)).bit_length() - 1
        second >>= ones
        result |= _smeared(first, ones) << (at + zeros)
        at += zeros + ones
    return result


def _smeared(bits: int, length: int) -> int:
    """The sumset with the numbers below `length`."""
    done = 1
    while done < length:
        step = min(done, length - done)
        bits |= bits << step
        done += step
    return bits


def _power(bits: int, count: int, batch: int) -> int:
    """The sumset of `count` equal TP groups, up to the batch."""
    mask = (1 << (batch + 1)) - 1
    result, square = 1, bits
    while count:
        if count & 1:
            result = _sumset(result, square) & mask
        count >>= 1
        if count:
            square = _sumset(square, square) & mask
    return result


def _reconstructed(batch: int, classes: Sequence[ReplicaClass], limit_s: float) -> BatchSplit:
    sets = [_reachable(batch, each, limit_s) for each in classes]
    powers = [_power(bits, each.count, batch) for bits, each in zip(sets, classes, strict=True)]
    after = [1]  # sums of all classes from here on
    mask = (1 << (batch + 1)) - 1
    for power in reversed(powers):
        after.append(_sumset(after[-1], power) & mask)
    after.reverse()
    shares, left = [], batch
    # A class gets the part of what is left that is closest to its part of the rate.
    rates = [each.count / min_time_per_sample(each) for each in classes]
    for number, each in enumerate(classes):
        wanted = left * rates[number] / (sum(rates[number:]) or 1.0)
        samples = _closest(powers[number], after[number + 1], left, wanted)
        left -= samples
        counts = _dealt(sets[number], each.count, samples, batch)
        shares.append(
            tuple(
                _share(batch, each, limit_s, samples_of_one)
                for samples_of_one in sorted(counts, reverse=True)
            )
        )
    return shares


def min_time_per_sample(each: ReplicaClass) -> float:
    """Seconds per sample at the best size; infinite where nothing is allowed."""
    return min((t / size for size, t in each.times_s.items()), default=math.inf)


def _closest(here: int, rest: int, total: int, wanted: float) -> int:
    """The s closest to `wanted` with s in `here` and total - s in `rest`."""
    for distance in range(total + 1):
        for s in (math.floor(wanted) - distance, math.floor(wanted) + 1 + distance):
            if 0 <= s <= total and here >> s & 1 and rest >> (total - s) & 1:
                return s
    raise AssertionError("the sumset contained the total")


def _dealt(bits: int, count: int, samples: int, batch: int) -> list[int]:
    """Sample counts of `count` replicas that add up to `samples`, as even as halving makes them."""
    if count == 0:
        return []
    if count == 1:
        return [samples]
    half = count // 2
    # Equal counts are the common case, and need no sumsets.
    even, rest = divmod(samples, count)
    if not rest and bits >> even & 1:
        return [even] * count
    first, second = _power(bits, half, batch), _power(bits, count - half, batch)
    part = _closest(first, second, samples, samples * half / count)
    return _dealt(bits, half, part, batch) + _dealt(bits, count - half, samples - part, batch)


def _share(batch: int, each: ReplicaClass, limit_s: float, samples: int) -> ReplicaShare:
    if samples == 0:
        return ReplicaShare(micro_batch_size=1, num_microbatches=0)
    size = next(
        size
        for size, most, _ in _options(batch, each, limit_s)
        if samples % size == 0 and samples // size <= most
    )
    return ReplicaShare(micro_batch_size=size, num_microbatches=samples // size)
