"""A device order is partitioned as trying every partition would."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.planner_cases import random_case
from zorse_megatron.planner.closed_form.candidate import best_sizes
from zorse_megatron.planner.closed_form.device_groups import DeviceGroups
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.closed_form.segment_costs import SegmentCosts, SegmentTails
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.search.device_orders import (
    FINE,
    _covers,
    _least_fill_drain,
    best_partitions,
    device_orders,
)


def costs_of(inputs: Inputs, *, level: int = 2, nested: bool = False) -> SegmentCosts:
    """Of the first device order of a cluster."""
    estimator = Estimator(inputs)
    device_order = device_orders(inputs, most_units=FINE, halved=False)[0]
    return SegmentCosts(
        inputs,
        estimator.cost_model,
        DeviceGroups(inputs),
        SegmentTails(inputs, estimator.cost_model, estimator.communication, device_order),
        sizes=best_sizes(inputs, estimator.cost_model, level),
        nested=nested,
    )


def every_partition(costs: SegmentCosts, start: int = 0, left: int | None = None):
    """All (start, stop, layers) of segments that cover the device order and hold all layers."""
    left = costs.num_layers if left is None else left
    if start == costs.num_units:
        if left == 0:
            yield ()
        return
    for stop in range(start + 1, costs.num_units + 1):
        for held in range(1, left + 1):
            if costs.busy_s[start, stop, held] < math.inf:
                for rest in every_partition(costs, stop, left - held):
                    yield ((start, stop, held), *rest)


def partitions_looked_at(costs: SegmentCosts, ceiling_s: float):
    """Those in which every segment has as many layers as the ceiling allows, or one less."""
    most = costs.most_layers(ceiling_s * (1 + 1e-9))
    return [
        partition
        for partition in every_partition(costs)
        if all(held in (most[a, b], most[a, b] - 1) for a, b, held in partition)
    ]


@given(seed=st.integers(0, 10_000), level=st.sampled_from([1, 2, 4]), nested=st.booleans())
@example(seed=4532, level=1, nested=True)
@settings(max_examples=examples(60), deadline=None)
def test_the_least_busy_partition_is_found(seed, level, nested):
    inputs = random_case(seed, most_gpus=5, most_layers=7)
    costs = costs_of(inputs, level=level, nested=nested)
    busy = [
        max(costs.busy_s[segment] for segment in partition) for partition in every_partition(costs)
    ]
    if not busy:
        assert best_partitions(costs, most_groups=9) == []
        return
    assert _covers(costs, min(busy) * (1 + 1e-9))
    assert not _covers(costs, min(busy) * (1 - 1e-9))
    [partition] = _least_fill_drain(costs, [min(busy) * (1 + 1e-9)])
    assert partition is not None and sum(partition.layers) == inputs.num_layers
    assert sorted(rank for group in partition.groups for rank in group) == list(
        range(inputs.world_size)
    )


@given(seed=st.integers(0, 10_000), slack=st.sampled_from([1.0, 1.1, 1.5]))
@settings(max_examples=examples(60), deadline=None)
def test_of_a_ceiling_the_least_fill_and_drain_is_found(seed, slack):
    """Where every segment has as many layers as the ceiling allows, or one less."""
    costs = costs_of(random_case(seed, most_gpus=5, most_layers=7))
    partitions = list(every_partition(costs))
    if not partitions:
        return
    ceiling_s = slack * min(
        max(costs.busy_s[segment] for segment in partition) for partition in partitions
    )
    allowed = partitions_looked_at(costs, ceiling_s)
    if not allowed:
        return

    def value_s(partition):
        passed_s = 0.0
        for start, stop, held in partition:
            tail_s = costs.tails.per_layer_s[start, stop] * held
            exposed_s = max(0.0, tail_s - 2 / 3 * passed_s)
            passed_s += costs.fill_drain_s[start, stop, held] + exposed_s
        return passed_s

    longer_s = 3 * ceiling_s
    _, found = _least_fill_drain(costs, [longer_s, ceiling_s * (1 + 1e-9)])
    assert found is not None
    bounds = [0]
    sizes = [len(group) for group in found.groups]
    for size in sizes:
        held = 0
        stop = bounds[-1]
        while held < size:
            held += len(costs.units[stop])
            stop += 1
        bounds.append(stop)
    segments = list(zip(bounds, bounds[1:], found.layers, strict=False))
    assert value_s(segments) == pytest.approx(min(map(value_s, allowed)), rel=1e-9)
