"""Where an iteration loses what the GPUs of a cluster could do alone.

Of a plan on our runtime, and of stock's layouts as plans on Megatron's.
"""

from collections.abc import Iterator
from itertools import pairwise

from zorse_megatron.costs.interface import PassTimes
from zorse_megatron.emulate.compare import aggregate_tokens_per_s
from zorse_megatron.plan.plan import Plan
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schedule.actions import ON_LAYERS, parse_action
from zorse_megatron.simulate.result import SimulationResult

LOSSES = (
    "GPUs left out",
    "micro-batch sizes and TP groups",
    "recomputation",
    "imbalance",
    "fill, drain, waits",
    "update",
)


def lost_s(whole: Inputs, inputs: Inputs, plan: Plan, result: SimulationResult) -> dict[str, float]:
    """Seconds of an iteration that each of LOSSES adds; with `ideal_s` they are all of it.

    `whole`: the cluster; `inputs`: the GPUs of the plan. Imbalance is what the busiest rank
    computes longer than if the ranks, each as fast as it is under the plan, shared the work to the
    last bit. The update is the last reduction, norm, optimizer step and all-gathers.
    """
    seconds = [ideal_s(whole), ideal_s(inputs), *_with_losses_s(inputs, plan, result)]
    return {
        name: after_s - before_s
        for name, (before_s, after_s) in zip(LOSSES, pairwise(seconds), strict=True)
    }


def ideal_s(inputs: Inputs) -> float:
    """An iteration in which nothing is lost: every GPU alone at its best micro-batch size."""
    tokens = inputs.global_batch_size * inputs.sequence_length
    return tokens / aggregate_tokens_per_s(inputs)


def _with_losses_s(inputs: Inputs, plan: Plan, result: SimulationResult) -> Iterator[float]:
    """An iteration with one loss after the other, but for the first."""
    spans = [
        [span for span in result.spans(rank) if parse_action(span.action).kind in ON_LAYERS]
        for rank in result.stands_in
    ]
    busy_s = [sum(span.end_s - span.start_s - span.waited_s for span in each) for each in spans]
    again_s = [_recomputing_s(inputs, plan, rank) for rank in range(plan.world_size)]
    once_s = [busy - again for busy, again in zip(busy_s, again_s, strict=True)]
    yield _shared_evenly_s(plan, inputs, once_s)
    yield _shared_evenly_s(plan, inputs, busy_s)
    yield max(busy_s)
    yield max(each[-1].end_s for each in spans if each) - min(s[0].start_s for s in spans if s)
    yield result.iteration_s


def _shared_evenly_s(plan: Plan, inputs: Inputs, busy_s: list[float]) -> float:
    """How long all ranks would be busy if they shared the batch at the speeds they have."""
    rates = []
    for rank, took_s in enumerate(busy_s):
        if took_s > 0:  # a rank may hold state only
            size, whole_s = _best(inputs, inputs.kinds[rank])
            rates.append(size / whole_s * _at_best_s(plan, inputs, rank) / took_s)
    return plan.global_batch_size / sum(rates)


def _at_best_s(plan: Plan, inputs: Inputs, rank: int) -> float:
    """How long the rank's work would take it at its best micro-batch size; its part of a TP
    group's."""
    number, index = plan.replica_of_rank(rank)
    replica, kind = plan.groups[number].replicas[index], inputs.kinds[rank]
    size, _ = _best(inputs, kind)
    sample_s = 0.0
    for chunk in plan.chunks_of_group(number):
        first, stop = plan.chunks[chunk].layers
        sample_s += (stop - first) * _both_s(inputs.compute.layer(kind, size))
        sample_s += _both_s(inputs.compute.embedding(kind, size)) if chunk == 0 else 0.0
        is_last = chunk == len(plan.chunks) - 1
        sample_s += _both_s(inputs.compute.head(kind, size)) if is_last else 0.0
    return (
        sample_s / size * replica.micro_batch_size * replica.num_microbatches / len(replica.ranks)
    )


def _recomputing_s(inputs: Inputs, plan: Plan, rank: int) -> float:
    """How long the rank recomputes; its part of a TP group's."""
    number, index = plan.replica_of_rank(rank)
    replica, setting = plan.groups[number].replicas[index], plan.groups[number].recompute
    if setting is None or setting.mode == "none":
        return 0.0
    spans = [plan.chunks[chunk].layers for chunk in plan.chunks_of_group(number)]
    layers = sum(min(stop - first, setting.num_layers or stop) for first, stop in spans)
    kind, size = inputs.kinds[rank], replica.micro_batch_size
    layer_s = inputs.compute.recompute_s(kind, size, setting.mode)
    return layers * layer_s * replica.num_microbatches / len(replica.ranks)


def _best(inputs: Inputs, kind: str) -> tuple[int, float]:
    """The micro-batch size at which a kind is fastest, and the seconds of one through the model."""
    compute = inputs.compute

    def whole_s(size: int) -> float:
        ends_s = _both_s(compute.embedding(kind, size)) + _both_s(compute.head(kind, size))
        return inputs.num_layers * _both_s(compute.layer(kind, size)) + ends_s

    size = min(inputs.best_sizes[kind], key=lambda each: whole_s(each) / each)
    return size, whole_s(size)


def _both_s(times: PassTimes) -> float:
    """Forward and backward."""
    return times.forward_s + times.backward_s
