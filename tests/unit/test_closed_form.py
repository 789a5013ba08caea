"""The planner's closed form: splits of layers, batches and memory, against trying all."""

import math
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.topologies import node
from tests.unit.planner_cases import CaseCompute, fits, random_case, simulated
from tests.unit.test_simulate_memory import peak_of_backward
from zorse_megatron.costs import stage_formulas
from zorse_megatron.costs.communication import GraphComm
from zorse_megatron.costs.topology import Topology
from zorse_megatron.plan.memory_settings import settings_by_rank
from zorse_megatron.planner.build_plan import Builder
from zorse_megatron.planner.closed_form.candidate import Candidate, balanced_layers, best_sizes
from zorse_megatron.planner.closed_form.device_groups import (
    DeviceGroups,
    MemorySettings,
    ReplicaClass,
    Stage,
    StagePosition,
    best_split,
    rate_bound_s,
)
from zorse_megatron.planner.closed_form.estimator import (
    Estimator,
    GroupCost,
    best_layer_assignments,
)
from zorse_megatron.planner.closed_form.segment_costs import SegmentCosts, SegmentTails
from zorse_megatron.planner.closed_form.stage_memory import water_fill
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.search.device_orders import (
    FINE,
    _covers,
    _least_fill_drain,
    best_partitions,
    device_orders,
)
from zorse_megatron.schedule.lower import refuse_unsupported

# Layers.

costs = st.builds(
    lambda busy, passage: GroupCost(busy_s=float(busy), fill_drain_s=float(passage)),
    st.integers(1, 20),
    st.integers(0, 9),
)
tables = st.lists(
    st.dictionaries(st.integers(1, 5), costs, min_size=1, max_size=5), min_size=1, max_size=4
)


def value(table, layers):
    chosen = [costs[number] for costs, number in zip(table, layers, strict=True)]
    return max(cost.busy_s for cost in chosen) + sum(cost.fill_drain_s for cost in chosen)


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(tables, st.integers(1, 12))
def test_no_layout_is_better(table, num_layers):
    every = [layers for layers in product(*table) if sum(layers) == num_layers]
    found = best_layer_assignments(table, num_layers, most=3)
    if not every:
        assert found == []
        return
    assert set(found) <= set(every)
    values = [value(table, layers) for layers in found]
    assert values[0] == min(value(table, layers) for layers in every)
    assert values == sorted(values)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 9), st.data())
def test_no_deal_is_faster(speeds, num_layers, data):
    most = [data.draw(st.integers(1, 9)) for _ in speeds]
    every = [
        layers
        for layers in product(*(range(1, room + 1) for room in most))
        if sum(layers) == num_layers
    ]
    layers, slowest = balanced_layers(num_layers, speeds, most)
    if not every:
        assert slowest == float("inf")
        return
    assert layers in every
    assert slowest == min(
        max(count / speed for count, speed in zip(each, speeds, strict=True)) for each in every
    )


@given(st.lists(st.integers(-3, 20), min_size=1, max_size=6), st.integers(0, 60))
def test_the_largest_share_is_as_small_as_can_be(rooms, total):
    shares = water_fill(total, rooms)
    free = [max(0, room) for room in rooms]
    if total > sum(free):
        assert shares is None
        return
    assert shares is not None
    assert sum(shares) == pytest.approx(total)
    assert all(share <= room + 1e-9 for share, room in zip(shares, free, strict=True))
    # With a lower level than the largest share, the rooms do not hold the total.
    lower = max(shares) - 1e-6
    assert total == 0 or sum(min(room, lower) for room in free) < total


# Micro-batches.


@st.composite
def worker_classes(draw):
    def one():
        fixed, per_sample = draw(st.integers(0, 5)), draw(st.integers(1, 9))
        most = draw(st.integers(1, 4))
        times = {size: float(fixed + per_sample * size) for size in range(1, most + 1)}
        return ReplicaClass(count=draw(st.integers(1, 2)), times_s=times)

    return [one() for _ in range(draw(st.integers(1, 2)))]


def least_time_by_trying(batch, classes):
    """Over all (size, count) of all replicas."""
    workers = [each.times_s for each in classes for _ in range(each.count)]
    best = {0: 0.0}  # samples -> least time of the slowest so far
    for times in workers:
        options = [(0, 0.0)] + [
            (size * count, count * time_s)
            for size, time_s in times.items()
            for count in range(1, batch // size + 1)
        ]
        found: dict[int, float] = {}
        for (done, slowest), (samples, time_s) in product(best.items(), options):
            if done + samples <= batch:
                reached = max(slowest, time_s)
                found[done + samples] = min(found.get(done + samples, float("inf")), reached)
        best = found
    return best[batch]


def time_s(split, classes):
    return max(
        share.num_microbatches * each.times_s.get(share.micro_batch_size, 0.0)
        for each, row in zip(classes, split, strict=True)
        for share in row
    )


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(1, 24), worker_classes())
def test_no_split_is_faster(batch, classes):
    split = best_split(batch, classes)
    assert split is not None
    assert abs(time_s(split, classes) - least_time_by_trying(batch, classes)) < 1e-9
    assert sum(s.micro_batch_size * s.num_microbatches for row in split for s in row) == batch
    for each, row in zip(classes, split, strict=True):
        assert len(row) == each.count
        for share in row:
            assert share.num_microbatches == 0 or share.micro_batch_size in each.times_s
    assert time_s(split, classes) >= rate_bound_s(batch, classes) - 1e-9


def test_equal_replicas_get_equal_work_where_it_divides():
    split = best_split(1024, [ReplicaClass(count=8, times_s={1: 1.0, 2: 1.5, 4: 2.8})])
    assert split is not None
    assert {(share.micro_batch_size, share.num_microbatches) for share in split[0]} == {(4, 32)}


def test_a_slow_replica_may_get_nothing():
    fast = ReplicaClass(count=1, times_s={1: 1.0})
    slow = ReplicaClass(count=1, times_s={1: 100.0})
    split = best_split(3, [fast, slow])
    assert split is not None
    assert split[1][0].num_microbatches == 0
    assert time_s(split, [fast, slow]) == 3.0


def test_nobody_may_run_anything():
    assert best_split(4, [ReplicaClass(count=2, times_s={})]) is None


# Device orders.


def costs_of(inputs: Inputs, *, level: int = 2, nested: bool = False) -> SegmentCosts:
    """Of the first device order of a cluster."""
    estimator = Estimator(inputs)
    device_order = device_orders(inputs, most_units=FINE, halved=False)[0]
    return SegmentCosts(
        estimator,
        SegmentTails(estimator, device_order),
        sizes=best_sizes(inputs, level),
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


# The same physics for single stages and arrays.

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
        estimator,
        SegmentTails(estimator, order),
        sizes=best_sizes(inputs, level),
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
            len(each.ranks) * size / one.both_s
            for each, size, one in zip(
                stage.device_group.gpu_classes, stage.sizes, passes, strict=True
            )
        )
        busy_s = costs.busy_s[start, stop, layers]
        assert busy_s == pytest.approx(inputs.global_batch_size / rate, rel=1e-12)
        transfer_s = 0.0
        if start:
            ends = order[start - 1][-1], order[start][0]
            size = int(costs.sizes.max()) * inputs.memory.boundary_bytes(1)
            transfer_s = inputs.comm.transfer_s(*ends, size)
        assert costs.fill_drain_s[start, stop, layers] == pytest.approx(
            max(one.both_s for one in passes) + 2 * transfer_s, rel=1e-12
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
    kept = stage_formulas.saved_bytes(layers, times, 90, 40)
    for at, (number, time_s, count) in enumerate(values):
        assert together[at] == stage_formulas.pass_s(number, time_s, count * 0.3, 0.1, limit)
        assert in_flight[at] == stage_formulas.in_flight_micro_batches(limit, count, 16)
        assert kept[at] == stage_formulas.saved_bytes(number, time_s, 90, 40)


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

    whole, recompute_savings = memory.saved(kind), memory.recompute_savings(kind, "full")
    saved = whole - recompute_savings
    in_flight = memory.limit(position, 8.0)
    assert recompute_savings > 0 and in_flight > 1
    per_sample = (in_flight - 1) * (4 * whole - recomputed * recompute_savings) + peak_of_backward(
        4, recomputed, 1, (whole, saved, 0)
    )
    added = local_bytes(recomputed) - local_bytes(0)
    assert added == pytest.approx(2 * (per_sample - in_flight * 4 * whole))


# Settings of GPU classes.


@dataclass(frozen=True, kw_only=True)
class SlowAttention(CaseCompute):
    """Core attention is a third of a layer."""

    def recompute_s(self, kind, micro_batch_size, mode):
        whole_s = super().recompute_s(kind, micro_batch_size, "full")
        return {"none": 0.0, "selective": whole_s / 3, "full": whole_s}[mode]


def mixed_case(seed, *, layers=6):
    """Inputs of a small cluster of several kinds, whose plans may recompute core attention too."""
    inputs = random_case(seed, most_gpus=4, most_layers=layers)
    compute = SlowAttention(sample_s=inputs.compute.sample_s, fixed_s=inputs.compute.fixed_s)
    space = replace(inputs.space, recompute=("none", "selective", "full"))
    return replace(inputs, compute=compute, space=space)


def all_ways(stage):
    """Every number of layers, and core attention, of every GPU class."""
    full = [
        MemorySettings(mode="full", recomputed=number) for number in range(1, stage.num_layers + 1)
    ]
    selective = MemorySettings(mode="selective", recomputed=stage.num_layers)
    each = [MemorySettings(), selective, *full]
    return product(each, repeat=len(stage.device_group.gpu_classes))


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2000),
    num_layers=st.integers(1, 5),
    size=st.sampled_from([1, 2, 4]),
    in_flight=st.sampled_from([2.0, 6.0, 12.0]),
)
def test_no_way_to_recompute_is_faster(seed, num_layers, size, in_flight):
    """Against all of them: the greedy choice may round to a micro-batch more at most."""
    inputs = mixed_case(seed)
    model = Estimator(inputs).cost_model
    group = DeviceGroups(inputs).of(tuple(range(inputs.world_size)))
    position = StagePosition(is_first=False, is_last=False, in_flight_limit=in_flight)
    stage = Stage(group, num_layers, (size,) * len(group.gpu_classes), position)
    cost = model.cost(stage)
    best_s = min(
        (
            model.with_settings(stage, way, 0.0).busy_s
            for way in all_ways(stage)
            if model.memory.free_bytes(stage, model.counts(stage, way), way) >= 0
        ),
        default=None,
    )
    if best_s is None:
        assert cost is None
        return
    assert cost is not None
    slowest_s = max(each.both_s for each in cost.passes)
    assert cost.busy_s <= best_s + slowest_s
    assert model.memory.free_bytes(stage, model.counts(stage, cost.settings), cost.settings) >= 0


def test_a_fast_gpu_keeps_what_the_slow_one_beside_it_recomputes():
    """The plan says so, it fits and can be executed, and no settings for both are as fast."""
    inputs = mixed_case(0)
    inputs = replace(inputs, **shared_by_unlike_gpus(inputs))
    estimator = Estimator(inputs)
    groups = (DeviceGroups(inputs).of((0, 1)),)
    (estimate,) = estimator.best(Candidate(device_groups=groups, levels=((2, 1),)))
    plan = Builder(estimator).plan(estimate)
    assert plan is not None
    refuse_unsupported(plan)
    found = settings_by_rank(plan)
    assert found[0].recompute is None
    assert found[1].recompute is not None
    result = simulated(inputs, plan)
    assert fits(inputs, result)
    stage = estimate.stages[0]
    model = estimator.cost_model
    alike = [
        model.with_settings(stage, way, 0.0).busy_s
        for way in all_ways(stage)
        if len(set(way)) == 1 and model.memory.free_bytes(stage, model.counts(stage), way) >= 0
    ]
    assert estimate.costs[0].busy_s < min(alike)


def shared_by_unlike_gpus(inputs):
    """Two GPUs, of which the slow one has too little memory for all activations."""
    kinds = ("fast", "slow")
    memory = inputs.memory
    parameters = inputs.num_layers * memory.layer_parameters() + 600
    whole = memory.parameter_bytes(parameters) + memory.gradient_bytes(parameters)
    spec = Topology.of(
        (
            node(
                "n0",
                gpu_kinds=kinds,
                link_bytes_per_s=1e6,
                link_latency_s=1e-4,
                host_link_bytes_per_s=1e6,
                nic_bytes_per_s=2e5,
                nic_latency_s=1e-3,
            ),
        )
    )
    return {
        "spec": spec,
        "comm": GraphComm(spec),
        "kinds": kinds,
        "capacities_bytes": (whole + memory.state_bytes(parameters) + 40_000, whole + 3_000),
        "host_bytes": (None, None),
        "cluster": replace(inputs.cluster, gpu_kinds=kinds),
    }
