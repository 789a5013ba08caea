"""The search over device orders and the costs of single stages mean the same physics."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.planner_cases import random_case
from tests.unit.test_simulate_memory import peak_of_backward
from zorse_megatron.costs import stage_formulas
from zorse_megatron.planner.closed_form.candidate import best_sizes
from zorse_megatron.planner.closed_form.device_groups import (
    DeviceGroups,
    MemorySettings,
    Stage,
    StagePosition,
)
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.closed_form.segment_costs import SegmentCosts, SegmentTails
from zorse_megatron.planner.search.device_orders import FINE, device_orders

POSITIVE = st.floats(1e-3, 1e3)


@given(seed=st.integers(0, 10_000), level=st.sampled_from([1, 2, 4]))
@settings(max_examples=examples(25), deadline=None)
def test_every_segment_takes_what_its_stage_takes(seed, level):
    """With memory to spare: nothing is recomputed, and micro-batches are not rounded."""
    inputs = random_case(seed, most_gpus=5, most_layers=6)
    inputs = replace(inputs, capacities_bytes=(10**12,) * inputs.world_size)
    estimator, groups = Estimator(inputs), DeviceGroups(inputs)
    model = estimator.cost_model
    order = device_orders(inputs, most_units=FINE, halved=False)[0]
    costs = SegmentCosts(
        inputs,
        model,
        groups,
        SegmentTails(inputs, model, estimator.communication, order),
        sizes=best_sizes(inputs, model, level),
        nested=False,
    )
    for start, stop, layers in zip(*np.nonzero(np.isfinite(costs.busy_s)), strict=True):
        ranks = tuple(sorted(rank for unit in order[start:stop] for rank in unit))
        position = StagePosition(
            is_first=start == 0, is_last=stop == len(order), in_flight_limit=1.0
        )
        stage = Stage(groups.of(ranks), int(layers), costs.sizes_of(ranks), position)
        passes = model.passes(stage, stage.alike(MemorySettings()))
        rate = sum(
            len(each.ranks) * one.size / (one.forward_s + one.backward_s)
            for each, one in zip(stage.device_group.gpu_classes, passes, strict=True)
        )
        busy_s = costs.busy_s[start, stop, layers]
        assert busy_s == pytest.approx(inputs.global_batch_size / rate, rel=1e-12)
        transfer_s = 0.0
        if start:
            ends = order[start - 1][-1], order[start][0]
            size = int(costs.sizes.max()) * inputs.memory.boundary_bytes(1)
            transfer_s = inputs.comm.transfer_s(*ends, size)
        assert costs.fill_drain_s[start, stop, layers] == pytest.approx(
            max(one.forward_s + one.backward_s for one in passes) + 2 * transfer_s, rel=1e-12
        )


@given(
    values=st.lists(st.tuples(POSITIVE, POSITIVE, POSITIVE), min_size=2, max_size=5),
    limit=POSITIVE,
)
def test_arrays_hold_what_single_numbers_give(values, limit):
    """To the bit: the same operations in the same order."""
    layers, times, counts = (np.array(column) for column in zip(*values, strict=True))
    together = stage_formulas.pass_s(layers, times, counts * 0.3, 0.1, limit)
    in_flight = stage_formulas.in_flight_micro_batches(limit, counts, 16)
    kept = stage_formulas.kept_bytes(layers, times, 90, 40)
    for at, (number, time_s, count) in enumerate(values):
        assert together[at] == stage_formulas.pass_s(number, time_s, count * 0.3, 0.1, limit)
        assert in_flight[at] == stage_formulas.in_flight_micro_batches(limit, count, 16)
        assert kept[at] == stage_formulas.kept_bytes(number, time_s, 90, 40)


@pytest.mark.parametrize("recomputed", [0, 1, 3, 4])
def test_recomputed_layers_need_what_their_backwards_need_one_by_one(recomputed):
    """A stage of four layers, from its last one's backward to its first one's."""
    inputs = random_case(3, most_gpus=5, most_layers=6)
    model, groups = Estimator(inputs).cost_model, DeviceGroups(inputs)
    position = StagePosition(is_first=False, is_last=False, in_flight_limit=3.0)
    stage = Stage(groups.of((0,)), 4, (2,), position)
    kind, memory = stage.device_group.gpu_classes[0].kind, model.memory

    def local_bytes(number):
        chosen = MemorySettings(mode="full" if number else "none", recomputed=number)
        return memory.local_bytes(stage, chosen, 2, 8.0, kind)

    whole, spared = memory.kept(kind), memory.spared(kind, "full")
    kept = whole - spared
    in_flight = memory.limit(position, 8.0)
    assert spared > 0 and in_flight > 1
    per_sample = (in_flight - 1) * (4 * whole - recomputed * spared) + peak_of_backward(
        4, recomputed, 1, (whole, kept, 0)
    )
    added = local_bytes(recomputed) - local_bytes(0)
    assert added == pytest.approx(2 * (per_sample - in_flight * 4 * whole))
