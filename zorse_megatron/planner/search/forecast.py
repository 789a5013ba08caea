"""What an iteration takes, without a simulation: the pipeline, and each group's collectives."""

import math

from zorse_megatron.plan.memory_settings import settings_in
from zorse_megatron.plan.plan import Group, Plan
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schedule.micro_batch_order import pipeline_spans_s


class Forecast:
    """Foretells iterations, each collective once."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._of_layers: dict[object, tuple[float, float, float]] = {}

    def iteration_s(self, plan: Plan, limit_s: float = math.inf) -> float:
        """From when gradients are reduced to when they are again; infinite if beyond the limit.

        The update comes first: a group's first forward waits for it. Collectives of a group's other
        chunks are hidden behind its passes, or taken to be.
        """
        spans_s = pipeline_spans_s(plan, limit_s)
        if spans_s is None:
            return math.inf
        late_s = reduced_s = 0.0
        for number, group in enumerate(plan.groups):
            first = plan.chunks[plan.chunks_of_group(number)[0]].num_layers
            reduce_s, step_s, gather_s = self._of_a_layer(group)
            start_s, end_s = spans_s[number]
            late_s = max(
                late_s, plan.num_layers_of_group(number) * step_s + first * gather_s - start_s
            )
            reduced_s = max(reduced_s, end_s + first * reduce_s)
        return late_s + reduced_s

    def _of_a_layer(self, group: Group) -> tuple[float, float, float]:
        """Its gradients reduced, its shards updated, its parameters gathered."""
        key = (
            group.offload,
            tuple((each.ranks, each.shard_weight, each.offload) for each in group.replicas),
        )
        if key not in self._of_layers:
            self._of_layers[key] = self._computed(group)
        return self._of_layers[key]

    def _computed(self, group: Group) -> tuple[float, float, float]:
        memory, comm = self.inputs.memory, self.inputs.comm
        number = memory.layer_parameters()
        whole = sum(each.shard_weight for each in group.replicas)
        step_s, parts = 0.0, []
        for replica in group.replicas:
            rank = replica.ranks[0]
            own = int(number * replica.shard_weight / whole)
            parts.append(own)
            own_s = self.inputs.compute.step_s(self.inputs.kinds[rank], own)
            if settings_in(group, replica).offload.optimizer_state:
                own_s += 2 * memory.state_bytes(own) / comm.host_link_bytes_per_s(rank)
            step_s = max(step_s, own_s)
        ranks = tuple(each.ranks[0] for each in group.replicas)
        if len(ranks) == 1:
            return 0.0, step_s, 0.0
        gradients, parameters = (
            tuple(map(kept, parts)) for kept in (memory.gradient_bytes, memory.parameter_bytes)
        )
        reduce_s = comm.reduce_scatter_s(ranks, gradients)
        return reduce_s, step_s, comm.all_gather_s(ranks, parameters)
