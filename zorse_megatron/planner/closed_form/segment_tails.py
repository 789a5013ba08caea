"""Last reductions and all-gathers of the segments of a device order."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from zorse_megatron.planner.closed_form.communication import CommunicationCosts
from zorse_megatron.planner.closed_form.stage_costs import StageCostModel
from zorse_megatron.planner.inputs.search_inputs import Inputs

Floats = np.ndarray
# Of a fill/drain time the backwards: what groups before one still compute when it is done.
_BACKWARDS_PART = 2 / 3


class SegmentTails:
    """The same for all micro-batch sizes, and for all numbers of layers but for a factor."""

    def __init__(
        self,
        inputs: Inputs,
        cost_model: StageCostModel,
        communication: CommunicationCosts,
        units: Sequence[tuple[int, ...]],
    ) -> None:
        """O(units^2) collectives, of which those that look alike are costed once."""
        self.inputs = inputs
        self.units = tuple(units)
        memory, parameters = inputs.memory, cost_model.memory.layer_parameters
        self._num_bytes = memory.gradient_bytes(parameters) + memory.parameter_bytes(parameters)
        self.per_layer_s = self._per_layer_s(communication)
        """[start, stop]: reduction and gather of one layer. Infinite across regions: no group is
        worth sums over a link between those."""

    def _per_layer_s(self, communication: CommunicationCosts) -> Floats:
        spec, count = self.inputs.spec, len(self.units)
        regions = [spec.nodes[spec.node_of(unit[0])].region for unit in self.units]
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
