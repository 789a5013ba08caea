"""Search device orders, micro-batch sizes and contiguous partitions for the best pipeline."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from zorse_megatron.planner.closed_form.candidate import Candidate
from zorse_megatron.planner.closed_form.device_groups import DeviceGroups
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.closed_form.memory_classes import MemoryClass, best_sizes
from zorse_megatron.planner.closed_form.segment_costs import SegmentCosts
from zorse_megatron.planner.closed_form.segment_tails import SegmentTails
from zorse_megatron.planner.search.contiguous_partition import Partition, best_partitions
from zorse_megatron.planner.search.device_orders import COARSE, FINE, DeviceOrder, device_orders

_FIRST_LEVEL, _OTHER_LEVELS = 2, (1, 3, 4)
_FINE_ORDERS = 6  # that are costed in fine units
_KEPT_ORDERS = 3  # that are costed at all levels
_KEPT_PARTITIONS = 2  # of each device order and choice of sizes
_DESCENTS = 2  # partitions from which the sizes of single classes are changed
_STEPS = 3
_SIZES = (1, 2, 3, 4, 6, 8)

ClassSizes = dict[MemoryClass, int]


@dataclass(frozen=True, kw_only=True)
class _Found:
    device_order: DeviceOrder
    sizes: ClassSizes
    partition: Partition


class DeviceOrderSearch:
    """The best partitions of all device orders: into groups in step (nested), or into any."""

    def __init__(
        self, estimator: Estimator, device_groups: DeviceGroups, *, nested: bool, most_groups: int
    ) -> None:
        """`nested`: see `SegmentCosts`."""
        self.inputs = estimator.inputs
        self.estimator = estimator
        self.device_groups = device_groups
        self.nested = nested
        self.most_groups = most_groups
        most = self.inputs.space.max_micro_batch_size or self.inputs.global_batch_size
        self.most_size = min(most, self.inputs.global_batch_size)
        self.found: list[_Found] = []
        self._tails: dict[DeviceOrder, SegmentTails] = {}

    def candidates(self) -> Iterator[Candidate]:
        """Candidates of the partitions, best first; the same for the same inputs."""
        for device_order in self._promising_orders():
            self._try_sizes(device_order, self._level(_FIRST_LEVEL))
        best_orders = list(dict.fromkeys(found.device_order for found in self._ranked()))
        for device_order in best_orders[:_KEPT_ORDERS]:
            for level in _OTHER_LEVELS:
                self._try_sizes(device_order, self._level(level))
        if not self.nested:
            for found in self._ranked()[:_DESCENTS]:
                self._descend(found)
        for found in self._ranked():
            yield self._candidate(found.partition)

    def _promising_orders(self) -> list[DeviceOrder]:
        """The device orders whose partitions along coarse units are best."""
        fine, coarse = (
            device_orders(self.inputs, most_units=most, halved=self.nested)
            for most in (FINE, COARSE)
        )
        if len(fine) <= _FINE_ORDERS:
            return fine
        values: list[float] = []
        for device_order in coarse:
            found = self._try_sizes(device_order, self._level(_FIRST_LEVEL))
            values.append(found.partition.value_s if found else math.inf)
        self.found.clear()
        ranked = sorted(range(len(fine)), key=lambda at: (values[at], at))
        return [fine[at] for at in ranked[:_FINE_ORDERS]]

    def _ranked(self) -> list[_Found]:
        return sorted(self.found, key=lambda found: found.partition.value_s)

    def _try_sizes(self, device_order: DeviceOrder, sizes: ClassSizes) -> _Found | None:
        """Find the best partitions, and return the best of all."""
        costs = SegmentCosts(
            self.inputs,
            self.estimator.cost_model,
            self.device_groups,
            self._tails_of(device_order),
            sizes=sizes,
            nested=self.nested,
        )
        partitions = best_partitions(costs, most_groups=self.most_groups)[:_KEPT_PARTITIONS]
        new = [
            _Found(device_order=device_order, sizes=sizes, partition=partition)
            for partition in partitions
        ]
        self.found += new
        return new[0] if new else None

    def _tails_of(self, device_order: DeviceOrder) -> SegmentTails:
        if device_order not in self._tails:
            communication = self.estimator.communication
            self._tails[device_order] = SegmentTails(
                self.inputs, self.estimator.cost_model, communication, device_order
            )
        return self._tails[device_order]

    def _descend(self, start: _Found) -> None:
        """Change the size of one class at a time, as long as that helps."""
        best = start
        for _ in range(_STEPS):
            tried = [self._try_sizes(start.device_order, sizes) for sizes in self._near(best.sizes)]
            better = min(
                (found for found in tried if found is not None),
                key=lambda found: found.partition.value_s,
                default=best,
            )
            if better.partition.value_s >= best.partition.value_s:
                return
            best = better

    def _near(self, sizes: ClassSizes) -> Iterator[ClassSizes]:
        for each, size in sizes.items():
            larger = [other for other in _SIZES if size < other <= self.most_size][:1]
            smaller = [other for other in _SIZES if other < size][-1:]
            for other in smaller + larger:
                yield {**sizes, each: other}

    def _level(self, level: int) -> ClassSizes:
        level = min(level, self.most_size)
        found = best_sizes(self.inputs, self.estimator.cost_model, level)
        return dict.fromkeys(found, level) if self.nested else found

    def _candidate(self, partition: Partition) -> Candidate:
        return Candidate(
            device_groups=tuple(map(self.device_groups.of, partition.groups)),
            levels=partition.sizes,
            schedule="1f1b" if self.nested else "interleaved",
            origin="device order",
        )
