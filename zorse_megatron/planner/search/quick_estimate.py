"""A quick estimate of the best iteration among some units, to compare ways to join GPUs."""

import math
from dataclasses import dataclass

from zorse_megatron.planner.closed_form.device_groups import DeviceGroups
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.closed_form.memory_classes import best_sizes
from zorse_megatron.planner.closed_form.segment_costs import SegmentCosts
from zorse_megatron.planner.closed_form.segment_tails import SegmentTails
from zorse_megatron.planner.evaluate.evaluator import Evaluation
from zorse_megatron.planner.inputs.joined_inputs import joined
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.inputs.units import Joining
from zorse_megatron.planner.search.contiguous_partition import best_partitions
from zorse_megatron.planner.search.device_orders import FINE, DeviceOrder, device_orders
from zorse_megatron.planner.search.effort import Effort
from zorse_megatron.planner.search.groupings import EVERY_PARTITION_UP_TO
from zorse_megatron.planner.search.worker import SearchWorker

_LEVELS = (1, 2)
_LIGHT = Effort(
    listed=30,
    costed=4,
    widened=2,
    finalists=1,
    computations=0,
    polished=1,
    orders=2,
    levels=(1, 2, 4),
    assignments=1,
)


@dataclass(frozen=True, kw_only=True)
class QuickEstimate:
    """The same simple search for all of them."""

    inputs: Inputs
    first_to_last: tuple[str, ...] = ()
    """Kinds of GPU in the order in which the best plan so far has them; (): any order."""

    @classmethod
    def beside(cls, inputs: Inputs, best: Evaluation) -> "QuickEstimate":
        """In the order of a plan's groups."""
        at = [
            inputs.kinds[rank]
            for chunk in best.plan.chunks
            for rank in best.plan.groups[chunk.group].ranks
        ]
        return cls(inputs=inputs, first_to_last=tuple(dict.fromkeys(at)))

    def iteration_s(self, inputs: Inputs) -> float:
        """Infinite where nothing fits. `inputs`: of the GPUs, or of units of them."""
        if inputs.world_size > EVERY_PARTITION_UP_TO:
            return self._by_partition(inputs)
        worker = SearchWorker(inputs, _LIGHT, lambda progress: None)
        found = worker.cost(("groupings",))
        return min((each.iteration_s for each in found), default=math.inf)

    def _by_partition(self, inputs: Inputs) -> float:
        """The best contiguous partition of one device order."""
        estimator, device_groups = Estimator(inputs), DeviceGroups(inputs)
        most = min(inputs.space.max_groups or inputs.num_layers, inputs.num_layers)
        best_s = math.inf
        order = self._order(inputs)
        tails = SegmentTails(inputs, estimator.cost_model, estimator.communication, order)
        for level in _LEVELS:
            sizes = best_sizes(inputs, estimator.cost_model, level)
            costs = SegmentCosts(
                inputs, estimator.cost_model, device_groups, tails, sizes=sizes, nested=False
            )
            found = best_partitions(costs, most_groups=most)
            best_s = min([best_s, *(each.value_s for each in found[:1])])
        return best_s

    def _order(self, inputs: Inputs) -> DeviceOrder:
        orders = device_orders(inputs, most_units=FINE, halved=False)
        return min(orders, key=lambda order: self._distance(inputs, order))

    def _distance(self, inputs: Inputs, order: DeviceOrder) -> list[int]:
        """Where the kinds of the plan come in an order, to compare: least is most alike."""
        kinds = dict.fromkeys(self._gpu_kind(inputs, unit[0]) for unit in order)
        return [
            self.first_to_last.index(kind) if kind in self.first_to_last else len(kinds)
            for kind in kinds
        ]

    @staticmethod
    def _gpu_kind(inputs: Inputs, unit: int) -> str:
        units = inputs.units
        return units.base.kinds[units.sets[unit].ranks[0]]


@dataclass(frozen=True)
class QuickTask:
    """An estimate, for a worker that has the inputs of single GPUs."""

    first_to_last: tuple[str, ...]
    joining: Joining
    """Without any set: the GPUs themselves."""

    def run(self, worker: SearchWorker) -> float:
        """Estimate them."""
        quick = QuickEstimate(inputs=worker.inputs, first_to_last=self.first_to_last)
        joining, inputs = self.joining, worker.inputs
        return quick.iteration_s(joined(inputs, joining) if joining else inputs)
