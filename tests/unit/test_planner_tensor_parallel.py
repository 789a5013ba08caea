"""Tensor-parallel groups in plans: when they are found, that none better are missed, and bounds."""

import dataclasses
import itertools
import random
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tests.unit.made_plans import plan_of, replica
from zorse_megatron.costs.interface import TpShard
from zorse_megatron.emulate.compare import Planned, compared_systems
from zorse_megatron.inputs import cluster_yaml
from zorse_megatron.inputs.model import Computing, ModelShape
from zorse_megatron.inputs.profile import Profile, Source, Times
from zorse_megatron.plan.plan import Chunk, TpShards
from zorse_megatron.plan.plan_file import dump_plan
from zorse_megatron.planner import find_plan as find_plan_module
from zorse_megatron.planner.baselines.lower_bounds import lower_bound_s
from zorse_megatron.planner.explanation import tp_sentences
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import SearchSpace, make_inputs
from zorse_megatron.planner.inputs.tensor_parallel_members import TpGroup, with_tp_groups
from zorse_megatron.planner.outcome import NoPlanError, PlannerInputError, SearchStats
from zorse_megatron.planner.search import tensor_parallel_search as tp_search_module
from zorse_megatron.planner.search.effort import Effort
from zorse_megatron.planner.search.tensor_parallel_choices import (
    apportioned,
    tp_layouts_of,
    tp_shards_to_try,
)
from zorse_megatron.planner.search.zorse_search import SearchResult, search
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.schedule.lower import refuse_unsupported

MODEL = ModelShape(
    name="small",
    num_layers=3,
    hidden_size=2048,
    ffn_hidden_size=8192,
    num_attention_heads=16,
    num_query_groups=4,
    kv_channels=128,
    vocab_size=16384,
    seq_length=2048,
)
QUICK = SearchSpace(schedules=("1f1b",), recompute=("none",), offload=False, split_backward=False)
COLUMNS = 1024
"""Of the MLP, in the compositions that are all tried."""
NEAR = 1.02
SLOW = "PCIe 0.5 GB/s"


def parse_cluster(text):
    return cluster_yaml.parse_cluster(text.encode())


def inputs_of(gpus, *, batch, space=QUICK, link="NVLink 40 GB/s", model=MODEL, profile=None):
    cluster = parse_cluster(f"nodes: [{{gpus: [{gpus}], link: {link}}}]")
    return make_inputs(
        cluster, model, profile, global_batch_size=batch, dtype="float16", space=space
    )


def compositions(total, parts, least=1):
    if parts == 1:
        yield (total,)
        return
    for first in range(least, total - least * (parts - 1) + 1):
        for rest in compositions(total - first, parts - 1, least):
            yield (first, *rest)


def parts_of(degree):
    """Every composition of the KV groups with every one of the MLP in large grains."""
    for groups in compositions(4, degree):
        for grains in compositions(MODEL.ffn_hidden_size // COLUMNS, degree):
            total = sum(grains)
            yield TpShards(
                kv_groups=groups,
                mlp_columns=tuple(COLUMNS * each for each in grains),
                vocabulary_rows=tuple(MODEL.vocab_size * each // total for each in grains),
            )


def partitions(ranks):
    if not ranks:
        yield []
        return
    first, *rest = ranks
    for some in partitions(rest):
        yield [(first,), *some]
        for at, each in enumerate(some):
            yield [*some[:at], (first, *each), *some[at + 1 :]]


def all_plans(inputs, batch):
    """Each way to join GPUs, all parts; the units are groups in any order, or share the batch."""
    for tp_groups in partitions(list(range(inputs.world_size))):
        choices = [[None] if len(s) == 1 else list(parts_of(len(s))) for s in tp_groups]
        for chosen in itertools.product(*choices):
            units = list(zip(tp_groups, chosen, strict=True))
            for order in itertools.permutations(units):
                for layers in compositions(MODEL.num_layers, len(units)):
                    yield plan_in_order(inputs, batch, order, layers)
            if len(units) > 1:
                for counts in compositions(batch, len(units), 0):
                    yield sharing_plan(inputs, units, counts)


def unit_replica(unit, count):
    ranks, parts = unit
    return replica(*sorted(ranks), count=count, tp_shards=parts)


def plan_in_order(inputs, batch, order, layers):
    stops = list(itertools.accumulate(layers))
    plan = plan_of(*([unit_replica(unit, batch)] for unit in order))
    chunks = tuple(
        Chunk(group=number, layers=(stop - count, stop))
        for number, (count, stop) in enumerate(zip(layers, stops, strict=True))
    )
    return dataclasses.replace(plan, model=inputs.model, chunks=chunks)


def sharing_plan(inputs, units, counts):
    replicas = (unit_replica(unit, count) for unit, count in zip(units, counts, strict=True))
    plan = plan_of(sorted(replicas, key=lambda each: each.ranks), layers=MODEL.num_layers)
    return dataclasses.replace(plan, model=inputs.model)


def degrees(plan):
    return sorted(len(each.ranks) for group in plan.groups for each in group.replicas)


@pytest.mark.parametrize(
    ("gpus", "batch"), [("2 x T4", 1), ("1 x V100-16, 1 x T4", 1), ("1 x V100-16, 1 x T4", 2)]
)
def test_no_membership_and_no_parts_are_better(gpus, batch):
    inputs = inputs_of(gpus, batch=batch)
    found = find_plan(inputs)
    best_s = min(simulate_plan(inputs, plan).iteration_s for plan in all_plans(inputs, batch))
    assert found.iteration_s <= NEAR * best_s
    assert simulate_plan(inputs, found.plan).iteration_s == pytest.approx(found.iteration_s)
    assert degrees(found.plan) == [2], "with so few samples a TP group is faster"


def test_three_gpus_of_two_kinds():
    """A sample at a time: of all ways to join three GPUs with all compositions of KV groups."""
    inputs = inputs_of("2 x T4, 1 x V100-16", batch=1)
    draw = random.Random(1)
    plans = list(all_plans(inputs, 1))
    some = draw.sample(plans, 150)
    best_s = min(simulate_plan(inputs, plan).iteration_s for plan in some)
    assert find_plan(inputs).iteration_s <= NEAR * best_s


def test_equal_parts_may_be_asked_for():
    inputs = inputs_of("1 x V100-16, 1 x T4", batch=1)
    even = dataclasses.replace(
        inputs, space=dataclasses.replace(QUICK, uneven_tp_shards=False, recompute=("none",))
    )
    uneven, equal = find_plan(inputs), find_plan(even)
    assert uneven.iteration_s < 0.95 * equal.iteration_s
    assert all(each.tp_shards is None for group in equal.plan.groups for each in group.replicas)


def test_a_comparison_runs_the_planned_set_and_says_so():
    """As `zorse compare --quick` does before it trains."""
    outcome = find_plan(inputs_of("1 x V100-16, 1 x T4", batch=1))
    (ours,) = compared_systems(
        inputs_of("1 x V100-16, 1 x T4", batch=1),
        ["zorse"],
        lambda strategy: Planned(ranks=(0, 1), outcome=outcome),
    )
    assert ours.layout.startswith("1 V100-16, 1 T4: groups of a TP group of 2, 1 chunk")
    assert degrees(ours.system.plan) == [2]


def test_equal_inputs_give_equal_plans_with_tp_groups():
    inputs = inputs_of("1 x V100-16, 1 x T4", batch=2)
    assert dump_plan(find_plan(inputs).plan) == dump_plan(find_plan(inputs).plan)


def test_plans_without_tp_groups_are_climbed_from_too(monkeypatch):
    """Or one that ends faster would be missed because TP groups are faster at first."""
    climbed = []

    def climb(_evaluator, found, *_args):
        climbed.append([max(degrees(each.plan)) for each in found])
        return found[0]

    monkeypatch.setattr(find_plan_module, "climbed_from", climb)
    find_plan(inputs_of("1 x V100-16, 1 x T4", batch=2))
    (both, alone) = climbed
    assert both[0] == 2 and alone == [each for each in both if each == 1] != []


@pytest.mark.parametrize(
    ("gpus", "found_s", "effort", "searches"),
    [
        (66, 0.99, "normal", 1),
        (66, 0.999, "normal", 2),
        (66, 0.99, "high", 2),
        (64, 0.99, "normal", 2),
    ],
)
def test_a_light_search_is_enough_on_many_gpus_where_it_finds_a_faster_plan(
    monkeypatch, gpus, found_s, effort, searches
):
    found = SearchResult(
        evaluations=[SimpleNamespace(iteration_s=found_s)], considered=SearchStats()
    )
    efforts = []
    monkeypatch.setattr(tp_search_module, "workers_for", lambda *_: nullcontext())
    monkeypatch.setattr(
        tp_search_module, "search_with", lambda _, each, *__, **___: efforts.append(each) or found
    )
    space = dataclasses.replace(QUICK, effort=effort)
    alone = [SimpleNamespace(iteration_s=1.0, estimate=None)]
    tp_search_module._TpSearch(
        inputs_of(f"{gpus} x T4", batch=128, space=space),
        SearchResult(evaluations=alone, considered=SearchStats()),
        None,
        None,
    ).search((TpGroup(ranks=(0, 1)),))
    assert len(efforts) == searches


def test_a_plan_that_no_tp_group_betters_is_the_one_without_tp_groups():
    """On a slow link with many samples."""
    with_sets, without = (
        find_plan(inputs_of("2 x T4", batch=4, link=SLOW, space=space)).plan
        for space in (QUICK, dataclasses.replace(QUICK, max_tensor_parallel=1))
    )
    assert dump_plan(with_sets) == dump_plan(without)
    assert degrees(without) == [1, 1]


HUGE = dataclasses.replace(
    MODEL, num_layers=1, hidden_size=8192, ffn_hidden_size=163840, num_attention_heads=64
)


def test_a_layer_that_fits_no_gpu_is_planned_with_tp_groups():
    inputs = inputs_of("4 x T4", batch=4, model=HUGE, space=SearchSpace())
    with pytest.raises(NoPlanError):
        find_plan(
            dataclasses.replace(
                inputs, space=dataclasses.replace(inputs.space, max_tensor_parallel=1)
            )
        )
    found = find_plan(inputs)
    refuse_unsupported(found.plan)
    assert max(degrees(found.plan)) == 4
    peaks = simulate_plan(inputs, found.plan).peak_memory_bytes
    assert all(a <= b for a, b in zip(peaks, inputs.capacities_bytes, strict=True))


def profile_of_tp_groups(share):
    """A pair takes `share` of the time of one T4."""
    return Profile(
        schema_version=1,
        sources=(Source(name="here", kind="measured"),),
        models=(MODEL,),
        times=tuple(
            Times(
                part="layer",
                model="small",
                gpu_kind="T4",
                seq_length=MODEL.seq_length,
                dtype="float16",
                tensor_parallel=degree,
                source="here",
                micro_batch_sizes=(1, 4),
                forward_s=tuple(0.01 * size * factor for size in (1, 4)),
                backward_s=tuple(0.02 * size * factor for size in (1, 4)),
            )
            for degree, factor in ((1, 1.0), (2, share))
        ),
    )


@pytest.mark.parametrize("share", [None, 0.3, 0.6])
def test_no_plan_with_tp_groups_beats_the_bound(share):
    """Also where a pair was measured to be faster than two GPUs apart."""
    gpus = "2 x T4" if share else "1 x V100-16, 1 x T4"
    profile = None if share is None else profile_of_tp_groups(share)
    inputs = inputs_of(gpus, batch=2, profile=profile)
    bound_s = lower_bound_s(inputs)
    fastest_s = min(simulate_plan(inputs, plan).iteration_s for plan in all_plans(inputs, 2))
    assert bound_s <= fastest_s


def test_times_of_tp_groups_are_used_for_tp_groups_of_that_degree_alone():
    inputs = inputs_of("4 x T4", batch=4, profile=profile_of_tp_groups(0.3))
    alone, two, four = (
        inputs.tp_costs.of_rank(TpShard(degree=degree), None).compute for degree in (1, 2, 4)
    )
    assert alone.layer("T4", 1).forward_s == 0.01
    assert two.layer("T4", 1).forward_s == pytest.approx(0.003)
    assert two.includes_collectives("T4", "layer")
    assert not four.includes_collectives("T4", "layer")
    assert four.layer("T4", 1).forward_s >= 0.0025, "a quarter of one GPU's at least"


def test_a_unit_is_costed_as_the_simulator_times_it():
    """One TP group, one group: all of it but the optimizer step and statistics."""
    inputs = inputs_of("1 x V100-16, 1 x T4", batch=4)
    tp_shards = tp_shards_to_try(inputs, (0, 1))[1]
    units = with_tp_groups(inputs, (TpGroup(ranks=(0, 1), tp_shards=tp_shards),))
    found = search(units, lambda progress: None).evaluations[0]
    (stage,), (cost,) = found.estimate.stages, found.estimate.costs
    computed_s = cost.busy_s
    usage = found.result or simulate_plan(inputs, found.plan)
    assert stage.num_layers == MODEL.num_layers
    assert computed_s == pytest.approx(max(each.busy_s for each in usage.usage), rel=0.05)
    assert computed_s <= found.iteration_s


def test_the_plans_of_units_name_all_ranks_once():
    inputs = inputs_of("3 x T4, 1 x V100-16", batch=2)
    for tp_layout in tp_layouts_of(inputs)[::9]:
        units = with_tp_groups(inputs, tp_layout)
        found = search(units, lambda progress: None, Effort.of(units).light).evaluations[:1]
        for each in found:
            ranks = sorted(rank for group in each.plan.groups for rank in group.ranks)
            assert ranks == [0, 1, 2, 3]
            assert len(each.peaks_bytes) == 4
            refuse_unsupported(each.plan)


def test_tp_groups_stay_on_a_node_unless_asked():
    cluster = parse_cluster("nodes: [{count: 2, gpus: 1 x T4, nics: 100 Gb/s}]")
    made_for = [
        make_inputs(
            cluster,
            MODEL,
            None,
            global_batch_size=1,
            dtype="float16",
            space=dataclasses.replace(QUICK, tp_across_nodes=across),
        )
        for across in (False, True)
    ]
    assert [len(tp_layouts_of(inputs)) for inputs in made_for] == [0, 1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"requested_tensor_parallel": 8}, "at most 2"),
        ({"requested_tensor_parallel": 8, "tp_across_nodes": True}, "whole KV group"),
        ({"requested_tensor_parallel": 2, "max_tensor_parallel": 1}, "at most 1"),
    ],
)
def test_wishes_that_cannot_be(changes, said):
    with pytest.raises(PlannerInputError) as caught:
        inputs_of("2 x T4", batch=1, space=SearchSpace(**changes))
    assert len(caught.value.problems) == (2 if said == "at most 2" else 1)
    assert said in str(caught.value)


def test_a_proposal_is_tried_and_bettered():
    """TP groups of two on a slow link: they are searched, and single GPUs are faster."""
    space = dataclasses.replace(QUICK, requested_tensor_parallel=2)
    found = find_plan(inputs_of("2 x T4", batch=4, link=SLOW, space=space))
    assert degrees(found.plan) == [1, 1]
    assert any("x (2 T4)" in each.what for each in found.rejected)


def test_why_there_are_tp_groups_or_none():
    slow = inputs_of("2 x T4", batch=4, link=SLOW)
    (never,) = tp_sentences(slow, find_plan(slow).plan)
    assert re.match(r"TP=2 not used on T4: \d\d % slower over PCIe than two GPUs apart \(", never)
    fast = inputs_of("2 x T4", batch=1)
    (used,) = tp_sentences(fast, find_plan(fast).plan)
    assert used.startswith("TP=2 used on T4: with TP=2 a layer takes ")


def test_sequence_parallelism_halves_what_a_tp_group_keeps_whole():
    cluster = parse_cluster("nodes: [{gpus: 2 x T4}]")
    whole, parted = (
        with_tp_groups(
            make_inputs(
                cluster,
                MODEL,
                None,
                global_batch_size=1,
                dtype="float16",
                computing=Computing(attention="flash", sequence_parallel=sequence_parallel),
            ),
            (TpGroup(ranks=(0, 1)),),
        )
        for sequence_parallel in (False, True)
    )
    kind = whole.kinds[0]
    less, more = (each.members.activation_bytes_on(kind, 1, "none") for each in (parted, whole))
    assert less < more
    assert whole.members.arrival_s(kind, 1) > 0 == parted.members.arrival_s(kind, 1)


def test_parts_in_proportion():
    for total, degree in itertools.product((4, 7, 16, 100), (2, 3, 4)):
        draw = random.Random(total * degree)
        weights = [draw.random() + 0.01 for _ in range(degree)]
        counts = apportioned(total, weights)
        assert sum(counts) == total
        assert min(counts) >= 1
