"""Cost of every segment of a device order with every number of layers, vectorised.

The formulas are those of a single stage (`stage_formulas`), for 1f1b and interleaved with one
chunk, on arrays. What is costed here only chooses partitions, which `Estimator` costs again, so it
is simpler in what it asks of them:

- numbers of micro-batches of a replica are not rounded for its time;
- recomputed layers are found from the linear formula, not tried; only full recomputation;
- the head's logits count twice, and what a recomputed layer needs for a moment counts beside them;
- host memory suffices; tied embeddings are not shared; the optimizer step is not counted;
- in flight is what the device order alone says (`_in_flight_limit`).
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from zorse_megatron.costs.stage_formulas import (
    Value,
    frozen_bytes,
    in_flight_micro_batches,
    micro_batches_per_replica,
    pass_s,
    replica_bytes,
    samples_per_s,
    saved_bytes,
    section_parameters,
    stage_parameters,
)
from zorse_megatron.planner.closed_form.candidate import MemoryClass, memory_classes_of
from zorse_megatron.planner.closed_form.communication import CommunicationCosts
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.closed_form.stage_memory import BUFFERS

# Last reductions and all-gathers of the segments of a device order.


Floats = np.ndarray
# Of a fill/drain time the backwards: what groups before one still compute when it is done.
_BACKWARDS_PART = 2 / 3


class SegmentTails:
    """The same for all micro-batch sizes, and for all numbers of layers but for a factor."""

    def __init__(self, estimator: Estimator, units: Sequence[tuple[int, ...]]) -> None:
        """O(units^2) collectives, of which those that look alike are costed once."""
        self.inputs = estimator.inputs
        self.units = tuple(units)
        memory, parameters = self.inputs.memory, estimator.cost_model.memory.layer_parameters
        self._num_bytes = memory.gradient_bytes(parameters) + memory.parameter_bytes(parameters)
        self.per_layer_s = self._per_layer_s(estimator.communication)
        """[start, stop]: reduction and gather of one layer. Infinite across regions: no group is
        worth sums over a link between those."""

    def _per_layer_s(self, communication: CommunicationCosts) -> Floats:
        spec, count = self.inputs.spec, len(self.units)
        regions = [spec.node_with(unit[0]).region for unit in self.units]
        result = np.full((count + 1, count + 1), np.inf)
        for start in range(count):
            ranks: tuple[int, ...] = ()
            on_node: Counter[int] = Counter()
            for stop in range(start + 1, count + 1):
                if regions[stop - 1] != regions[start]:
                    break
                ranks += self.units[stop - 1]
                on_node.update(map(spec.node_of, self.units[stop - 1]))
                result[start, stop] = communication.like_gather_s(ranks, self._num_bytes, on_node)
        return result

    def exposed_s(
        self, starts: np.ndarray, stop: int, held: np.ndarray, before_s: Floats
    ) -> Floats:
        """What is left of the tails of segments that end at `stop` when those before have drained.

        `held`: [..., segment], layers of the segments that begin at `starts`; 0: no segment.
        `before_s`: [..., segment, layers], fill/drain times before them.
        """
        tails_s = np.where(held > 0, self.per_layer_s[starts, stop], 0.0) * held
        return np.maximum(0.0, tails_s[..., None] - _BACKWARDS_PART * before_s)


class SegmentCosts:
    """Costs of one device order for given micro-batch sizes. What is known: [start, stop, layers].

    While they are found, arrays hold only segments that can be groups: [class, segment, layers].
    """

    def __init__(
        self,
        estimator: Estimator,
        tails: SegmentTails,
        *,
        sizes: Mapping[MemoryClass, int],
        nested: bool,
    ) -> None:
        """`sizes`: of a micro-batch by class of GPUs. `nested`: only segments whose rounds are
        powers of two times one another, so that 1f1b's samples in flight suffice, with those in
        transfer. Otherwise groups are out of step, and as much is in flight as under interleaved.
        """
        inputs = self.inputs = estimator.inputs
        self.memory = estimator.cost_model.memory
        self.device_groups = estimator.device_groups
        self.tails = tails
        self.units = tails.units
        self.nested = nested
        self.num_units = len(self.units)
        self.num_layers = inputs.num_layers
        self.classes = memory_classes_of(inputs)
        self.sizes = np.array([sizes[each] for each in self.classes], dtype=float)
        counts = np.zeros((len(self.classes), self.num_units + 1))
        for number, unit in enumerate(self.units):
            counts[self.classes.index(self._class(unit[0])), number + 1] = len(unit)
        self._ahead = counts.cumsum(axis=1)
        """[class, unit]: GPUs before it."""
        possible = np.isfinite(tails.per_layer_s)
        if nested:
            possible &= self._is_nested()
        self.starts, self.stops = np.nonzero(possible)
        self.counts = self._ahead[:, self.stops] - self._ahead[:, self.starts]
        """[class, segment]: GPUs of it."""
        self._find_costs()

    def _class(self, rank: int) -> MemoryClass:
        return self.inputs.kinds[rank], self.inputs.tensor_capacities_bytes[rank]

    def sizes_of(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Micro-batch size of each GPU class of the device group of these ranks."""
        by_class = dict(zip(self.classes, self.sizes, strict=True))
        gpu_classes = self.device_groups.of(ranks).gpu_classes
        return tuple(
            int(by_class[gpu_class.kind, gpu_class.capacity_bytes]) for gpu_class in gpu_classes
        )

    def _per_class(self, value: object) -> Floats:
        return np.array(value, dtype=float)[:, None, None]

    def _find_costs(self) -> None:
        rows = list(zip(self.classes, map(int, self.sizes), strict=True))
        compute, counts = self.inputs.compute, self.counts[..., None]
        layer_s = self._per_class([compute.layer(k, m).both_s for (k, _), m in rows])
        again_s = self._per_class([compute.recompute_s(k, m, "full") for (k, _), m in rows])
        layers = np.arange(self.num_layers + 1, dtype=float)[None, None, :]
        first_s, last_s = self._ends_s(rows)
        sizes, batch = self.sizes[:, None, None], self.inputs.global_batch_size
        busy_s = np.full(self._shape, np.inf)
        slowest_s = np.full(self._shape, np.inf)

        def both_s(recomputed: Floats | int) -> Floats:
            return np.asarray(pass_s(layers, layer_s, recomputed * again_s, first_s, last_s))

        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            for recomputed, copies_s in self._ways(both_s(0), layers):
                each_s = both_s(recomputed)
                time_s = batch / samples_per_s(counts * sizes, each_s) + copies_s
                fits = np.isfinite(recomputed).all(axis=0)
                better = fits & (layers[0] > 0) & (time_s < busy_s)
                busy_s = np.where(better, time_s, busy_s)
                longest_s = np.where(counts > 0, each_s, 0.0).max(axis=0)
                slowest_s = np.where(better, longest_s, slowest_s)
        fill_drain_s = np.where(np.isfinite(slowest_s), slowest_s, 0.0)
        fill_drain_s += 2 * self._transfers_s()[self.starts, None]
        self.busy_s = self._by_ends(busy_s)
        self.fill_drain_s = self._by_ends(np.where(np.isfinite(busy_s), fill_drain_s, np.inf))

    def _by_ends(self, of_segments: Floats) -> Floats:
        """[start, stop, layers], infinite where no group can be."""
        ends = self.num_units + 1
        result = np.full((ends, ends, self.num_layers + 1), np.inf)
        result[self.starts, self.stops] = of_segments
        return result

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self.starts), self.num_layers + 1

    def _ends_s(self, rows: Sequence[tuple[tuple[str, int], int]]) -> tuple[Floats, Floats]:
        """Embedding and head, where the segment has the order's first or last unit."""
        compute = self.inputs.compute
        first = [compute.embedding(kind, size) for (kind, _), size in rows]
        last = [compute.head(kind, size) for (kind, _), size in rows]
        first_s = self._per_class([each.both_s for each in first])
        last_s = self._per_class([each.both_s for each in last])
        arrival_s = self._per_class(
            [self.inputs.members.arrival_s(kind, size) for (kind, _), size in rows]
        )
        is_first, is_last = self._is_first[:, None], self._is_last[:, None]
        return (
            first_s * is_first + arrival_s * ~is_first,
            last_s * is_last + arrival_s * ~is_last,
        )

    @property
    def _is_first(self) -> np.ndarray:
        return self.starts == 0

    @property
    def _is_last(self) -> np.ndarray:
        return self.stops == self.num_units

    def _ways(self, both_s: Floats, layers: Floats) -> Iterator[tuple[Floats, Floats]]:
        """Layers that each class must recompute (infinite where that does not help), [class,
        segment, layers], and what it costs beside: with optimizer state on the GPUs, in the host.

        `both_s`: of a micro-batch without recomputation.
        """
        sizes, counts = self.sizes[:, None, None], self.counts[..., None]
        memory, batch = self.memory, self.inputs.global_batch_size
        recompute_savings = self._per_class(
            [memory.recompute_savings(kind, "full") for kind, _ in self.classes]
        )
        saved = self._per_class([memory.saved(kind) for kind, _ in self.classes])
        boundaries = self._per_class([memory.boundary_on(kind) for kind, _ in self.classes])
        parameters = self._parameters(layers)
        number = np.stack(micro_batches_per_replica(batch, counts, sizes, both_s))
        whole = np.ceil(number - 1e-9)
        in_flight = in_flight_micro_batches(self._in_flight_limit(), whole, batch)
        free = self._per_class([capacity for _, capacity in self.classes]) - replica_bytes(
            memory.costs.parameter_bytes(parameters)
            + memory.costs.gradient_bytes(parameters)
            + self._frozen_bytes(layers),
            sizes,
            activations=in_flight * saved_bytes(layers, 0, saved, saved),
            working=BUFFERS * boundaries + self._head(),
        )
        # Per sample a recomputed layer spares what it keeps, and needs all of it for a moment.
        moment, gain = sizes * recompute_savings, sizes * in_flight * recompute_savings
        present = counts > 0
        by_rank = np.where(present & (free < 0), (moment - free) / gain, 0.0)
        state: Floats = np.asarray(memory.costs.state_bytes(parameters))[0]
        left = np.where(present, counts * free, 0.0).sum(axis=0) - state
        yield (
            self._whole(self._level(by_rank, left, counts * gain, counts * moment), layers),
            np.zeros(self._shape),
        )
        if self.inputs.space.offload:
            copies_s = state / np.maximum(counts.sum(axis=0), 1) / self._host_link
            yield self._whole(by_rank, layers), copies_s

    @staticmethod
    def _level(floors: Floats, left: Floats, gain: Floats, moment: Floats) -> Floats:
        """Layers of each class, at least its floor, with which all of them have enough together.

        As many of each class, but where a floor is higher. `left`: what they have without
        recomputation, below 0 where it is not enough, [segment, layers]; `gain`: by a layer;
        `moment`: what is needed while one is recomputed; of all GPUs of a class.
        """
        own = np.where(floors > 0, gain * floors - moment, 0.0).sum(axis=0)
        missing = moment.sum(axis=0) - left
        level = np.full_like(left, np.inf)
        for _ in range(len(floors)):
            higher = floors > level
            from_floors = np.where(higher, gain * floors, 0.0).sum(axis=0)
            others = np.maximum(np.where(higher, 0.0, gain).sum(axis=0), 1.0)
            level = np.maximum(0.0, (missing - from_floors) / others)
        return np.where(left + own >= 0, floors, np.maximum(floors, level))

    def _whole(self, needed: Floats, layers: Floats) -> Floats:
        """Whole layers, infinite where there are not as many."""
        whole = np.maximum(0.0, np.ceil(needed - 1e-9))
        most = layers[0] if "full" in self.inputs.space.recompute else 0.0
        return np.where(whole <= most, whole, np.inf)

    @cached_property
    def _host_link(self) -> float:
        """Bandwidth of the slowest GPU's host link."""
        comm = self.inputs.comm
        return min(comm.host_link_bytes_per_s(rank) for unit in self.units for rank in unit)

    def _in_flight_limit(self) -> Floats:
        """Samples in flight of segments, [1, segment, 1]."""
        own = self.sizes @ self.counts
        from_here = self._samples_from()[self.starts]
        if self.nested:
            return (from_here + self._in_transit()[self.stops])[None, :, None]
        return (2 * from_here - own)[None, :, None]

    def _samples_from(self) -> Floats:
        """Samples of one micro-batch on each GPU from a unit on, [start]."""
        ahead: Floats = self.sizes @ self._ahead
        return ahead[-1] - ahead

    def _is_nested(self) -> np.ndarray:
        """[start, stop]: whether the round is a power of two times the smallest micro-batch."""
        from_here = self._samples_from() / self.sizes.min()
        own = from_here[:, None] - from_here[None, :]
        with np.errstate(divide="ignore", invalid="ignore"):
            exponents = np.log2(own)
            return np.abs(exponents - np.round(exponents)) < 1e-9

    def _in_transit(self) -> Floats:
        """Samples in transfer after a segment and back, [stop]: between all later nodes."""
        per_s = sum(
            count * size / self.inputs.compute.layer(kind, int(size)).both_s
            for count, size, (kind, _) in zip(
                self._ahead[:, -1], self.sizes, self.classes, strict=True
            )
        )
        transfers_s = self._transfers_s()
        spec = self.inputs.spec
        nodes = [spec.node_of(unit[0]) for unit in self.units]
        crossed = [0.0] + [
            transfers_s[at] if nodes[at] != nodes[at - 1] else 0.0
            for at in range(1, self.num_units)
        ]
        after = np.concatenate([np.cumsum(crossed[::-1])[::-1], [0.0]])
        return np.asarray(2 * after * per_s / self.num_layers)

    def _parameters(self, layers: Floats) -> Value:
        """[1, segment, layers]."""
        sections = section_parameters(self.inputs.memory, *self._ends, tied_on_same_rank=False)
        return stage_parameters(layers, *sections)

    def _frozen_bytes(self, layers: Floats) -> Value:
        return frozen_bytes(self.inputs.memory, layers, *self._ends, tied_on_same_rank=False)

    @property
    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        return self._is_first[None, :, None], self._is_last[None, :, None]

    def _head(self) -> Floats:
        """Bytes per sample where the segment is the last, [1, segment, 1]."""
        return np.where(self._is_last, 2.0 * self.memory.head, 0.0)[None, :, None]

    def _transfers_s(self) -> Floats:
        """One micro-batch's way to the segment that starts at each unit, [start]."""
        result = np.zeros(self.num_units + 1)
        size = int(self.sizes.max())
        for start in range(1, self.num_units):
            ends = self.units[start - 1][-1], self.units[start][0]
            result[start] = self.inputs.comm.transfer_s(*ends, size * self.memory.boundary)
        return result

    @cached_property
    def highest_s(self) -> float:
        """The longest time of any segment that fits, infinite where none does."""
        finite = self.busy_s[np.isfinite(self.busy_s)]
        return float(finite.max()) if finite.size else math.inf

    def most_layers(self, ceiling_s: float) -> np.ndarray:
        """[start, stop]: the most layers in time; more layers always take longer."""
        return (self.busy_s <= ceiling_s).sum(axis=2)
