"""Models with dense layers among those with experts: costs, simulation, and the plans found."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_expert_costs import MODEL, NUMBER
from tests.unit.test_shared_experts import sharing
from tests.unit.test_stock_expert_parallel import ONE_NODE, inputs_of
from zorse_megatron.costs.interface import TpShard
from zorse_megatron.costs.shared_experts import ExpertLoad
from zorse_megatron.costs.stage_formulas import (
    saved_bytes,
    working_bytes,
    working_bytes_of_layers,
)
from zorse_megatron.flags.model_in_flags import layers_with_experts, shape_from_flags
from zorse_megatron.inputs.model import JobRecompute, flags_of_shape
from zorse_megatron.plan.plan import Chunk, Group, Plan, Recompute, Replica, Schedule, TpShards
from zorse_megatron.planner.baselines.lower_bounds import lower_bound_s
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import with_load
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.simulate.action_costs import ActionCosts
from zorse_megatron.simulate.network import NetworkLoads
from zorse_megatron.simulate.rank_bytes import RankSizes

LAYERS, DENSE = 4, (0, 2)
MIXED_MODEL = replace(MODEL, dense_layers=DENSE)
UNIFORM = {"experts": MODEL, "dense": MODEL.dense}


def alone(ranks, size=2, count=2):
    return Replica(
        ranks=tuple(ranks), micro_batch_size=size, num_microbatches=count, shard_weight=1.0
    )


def tp_group(ranks):
    shards = TpShards(experts=(NUMBER // len(ranks),) * len(ranks))
    return replace(alone(ranks), tp_shards=shards)


def plan_of(inputs, replicas, layers=(0, LAYERS), **group):
    """One chunk, of these layers of the model."""
    first, stop = layers
    outer = [
        Chunk(group=0, layers=pair) for pair in ((0, first), (stop, LAYERS)) if pair[0] < pair[1]
    ]
    chunks = sorted([Chunk(group=0, layers=layers), *outer], key=lambda each: each.layers)
    return Plan(
        schema_version=2,
        global_batch_size=inputs.global_batch_size,
        model=inputs.model,
        groups=(Group(replicas=tuple(replicas), **group),),
        chunks=tuple(chunks),
        schedule=Schedule(name="1f1b" if len(chunks) == 1 else "breadth_first"),
    )


def inputs_for(replicas, model):
    """Of a node with as many GPUs as there are ranks."""
    count = sum(len(each.ranks) for each in replicas)
    return inputs_of(ONE_NODE.replace(b"4 x", b"%d x" % count), model)


def costs_of(inputs, plan):
    return ActionCosts(RankSizes(plan, inputs), NetworkLoads(inputs.comm))


WAYS = {
    "whole": [alone([0]), alone([1])],
    "TP group": [tp_group([0, 1])],
    "shared": [sharing([0, 1, 2], (NUMBER - 3, 3, 0), (1, 2, 1), 1)],
    "shared evenly": [sharing([0, 1, 2, 3], (NUMBER // 4,) * 4, (1,) * 4, 1)],
}


NONE, FULL = Recompute(mode="none"), Recompute(mode="full")
RECOMPUTED = {
    "nothing": (NONE, (NONE,) * LAYERS),
    "attention": (Recompute(mode="selective"), (Recompute(mode="selective"),) * LAYERS),
    "all": (FULL, (FULL,) * LAYERS),
    "the first layer": (replace(FULL, num_layers=1), (FULL, *(NONE,) * (LAYERS - 1))),
}


@pytest.mark.parametrize("recomputed", RECOMPUTED)
@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_chunk_costs_what_its_layers_do(way, splits, recomputed):
    """Those of two models whose layers are all alike, of which each chunk has one."""
    recompute, of_layers = RECOMPUTED[recomputed]
    replicas = WAYS[way]
    rank, size = replicas[0].ranks[0], replicas[0].micro_batch_size
    how = {"split_backward": splits}
    inputs = inputs_for(replicas, MIXED_MODEL)
    found = costs_of(inputs, plan_of(inputs, replicas, recompute=recompute, **how))
    times = {kind: sum(found.seconds(rank, 0, kind, size, splits=splits)) for kind in KINDS}
    exchanges = way not in ("whole", "shared")  # of unlike ranks each waits for the others
    if exchanges:
        inside = found.tp_collectives(replicas[0].ranks, 0, size, gathers=False)
        times["inside"] = inside.both_s
    parts = dict.fromkeys(times, 0.0)
    held = saved = delayed = 0
    for layer in range(LAYERS):
        kind = "dense" if layer in DENSE else "experts"
        each = replicas
        if kind == "dense" and way == "TP group":  # whose columns are divided, then
            each = [replace(one, tp_shards=None) for one in replicas]
        if kind == "dense" and way in (
            "shared",
            "shared evenly",
        ):  # where ranks have samples, and nothing else
            each = [alone([0], size=1, count=1)]
        own = inputs_for(each, UNIFORM[kind])
        plan = plan_of(own, each, (layer, layer + 1), recompute=of_layers[layer], **how)
        chunk = next(n for n, c in enumerate(plan.chunks) if c.layers == (layer, layer + 1))
        one, here = costs_of(own, plan), each[0].micro_batch_size
        for what in KINDS:
            parts[what] += sum(one.seconds(rank, chunk, what, here, splits=splits))
        if exchanges and len(each[0].ranks) > 1:
            inside = one.tp_collectives(each[0].ranks, chunk, here, gathers=False)
            parts["inside"] += inside.both_s
        held += one.sizes.held(rank, chunk)
        kept = one.sizes.micro_batch_bytes(rank, chunk, 0)
        saved, delayed = saved + kept.saved, delayed + kept.delayed
    for what, seconds_s in parts.items():
        assert times[what] == pytest.approx(seconds_s, rel=1e-9), what
    kept = found.sizes.micro_batch_bytes(rank, 0, 0)
    assert (found.sizes.held(rank, 0), kept.saved, kept.delayed) == (held, saved, delayed)


KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT_GRADIENT)


@given(*[st.integers(1, 9)] * 2, st.integers(1, 4), st.tuples(*[st.integers(0, 1000)] * 3))
def test_layers_that_are_alike_take_what_the_formula_says(layers, again, at_once, sizes):
    more, left, arriving = sizes
    recomputed = min(layers, again) // at_once * at_once
    whole, kept = more + 10, 10
    each = whole, kept, left, arriving
    found = working_bytes_of_layers([each] * layers, recomputed, at_once=at_once)
    stage = layers, recomputed, whole, kept
    assert found == (
        saved_bytes(*stage, at_once=at_once),
        working_bytes(*stage, at_once=at_once, left=left) + arriving,
    )


@given(st.lists(st.tuples(*[st.integers(0, 99)] * 4), min_size=1, max_size=7), st.integers(0, 7))
def test_the_most_that_a_backward_takes(layers, recomputed):
    """Layer by layer: what is kept is there until a layer's backward, and then what it leaves;
    in it what arrives, too."""
    recomputed = min(recomputed, len(layers))
    kept = [saved if n < recomputed else whole for n, (whole, saved, *_) in enumerate(layers)]
    most = before = sum(kept)
    now = before
    for n in reversed(range(len(layers))):
        whole, _, left, arriving = layers[n]
        now -= kept[n]
        most = max(most, now + whole + arriving, now + left + arriving)
        now += left
    most = max(most, now)
    assert working_bytes_of_layers(layers, recomputed) == (before, max(0, most - max(before, now)))


@pytest.mark.parametrize(("again", "at_once"), [(4, 2), (3, 3), (2, 1), (0, 1)])
def test_what_leaves_is_that_of_each_layer(again, at_once):
    """Of layers that are computed again at once the input of the first, whatever the others are."""
    setting = JobRecompute(mode="full", num_layers=again, layers_at_once=at_once)
    model = replace(MODEL, dense_layers=(0, 3))
    inputs = replace(inputs_for([alone([0])], model), recompute=setting if again else None)
    found = RankSizes(plan_of(inputs, [alone([0])]), inputs).saved_tensors(0, 0)
    expected = []
    for layer in range(LAYERS):
        memory = inputs.mean(layer, layer + 1).memory
        if layer >= again:
            expected += memory.saved_tensor_bytes(2, "none", "A100-40")
        elif not layer % at_once:
            expected += memory.saved_tensor_bytes(2, "full", "A100-40")
    assert sorted(found) == sorted(expected)


def test_flags_and_plans_say_which_layers_have_experts():
    again = shape_from_flags(flags_of_shape(MIXED_MODEL))
    assert again.dense_layers == DENSE
    assert layers_with_experts("([0]+[1])*2", LAYERS) == MIXED_MODEL.fingerprint().moe_layer_freq
    apart = [LAYERS * each.layer_parameters() for each in (MODEL, MODEL.dense)]
    ends = MODEL.num_parameters - apart[0]
    assert MIXED_MODEL.num_parameters == sum(apart) // 2 + ends


@pytest.mark.parametrize(
    "text",
    [
        *("[0]*3", "[1", "0", "x", "[2]*4", "[1]*[4]", "[1]+1", "-1", "[[0],1,1,1]", "([1],[0])"),
        # What Megatron's parser stops at, or would take all memory for.
        *("[0, 1, 1, 1]", "[0x1]*4", "[True]*4", "1+1", "[1]*9999999999999999", f"[1]*{9**99}"),
        pytest.param("+".join(["[]"] * 9999), id="many"),
    ],
)
def test_other_frequencies_are_refused(text):
    with pytest.raises(ValueError):
        layers_with_experts(text, LAYERS)


def test_the_plan_found_is_the_best_cut_of_unequal_layers():
    """Where all experts are in the first layers: of all cuts into stages, whoever comes first."""
    text = b"nodes:\n  - {name: a, gpus: [1 x A100-40, 1 x A10G], nics: 100 Gb/s}\n"
    model = replace(MODEL, num_layers=6, dense_layers=(3, 4, 5))
    inputs = inputs_of(text, model, batch=8)
    inputs = replace(
        inputs,
        space=replace(inputs.space, schedules=("1f1b",), max_tensor_parallel=1, offload=False),
    )
    found = find_plan(inputs)
    best_s = min(
        simulate_plan(inputs, replace(found.plan, groups=groups, chunks=cut)).iteration_s
        for groups in itertools.permutations(found.plan.groups)
        for cut in (
            (Chunk(group=0, layers=(0, at)), Chunk(group=1, layers=(at, 6))) for at in range(1, 6)
        )
    )
    assert len(found.plan.groups) == 2
    assert simulate_plan(inputs, found.plan).iteration_s <= best_s * (1 + 1e-9)


def test_no_plan_is_faster_than_the_bound():
    """Which is the best way to share the work of two GPUs: one has most of what suits it best."""
    text = b"nodes:\n  - {name: a, gpus: [1 x V100-32, 1 x L4], nics: 100 Gb/s}\n"
    model = replace(MODEL, dense_layers=(0, 1), seq_length=128)
    inputs = inputs_of(text, model, batch=8)
    inputs = replace(inputs, space=replace(inputs.space, max_tensor_parallel=1))

    def least_s(compute, part, kind):
        return min(getattr(compute, part)(kind, size).both_s / size for size in range(1, 9))

    kinds = [inputs.runs(layer, layer + 1)[0][0].compute for layer in (0, 2)]
    parts = [(each, "layer", 2) for each in kinds]
    parts += [(kinds[0], "embedding", 1), (kinds[0], "head", 1)]
    work = [
        [8 * number * least_s(compute, part, kind) for kind in ("V100-32", "L4")]
        for compute, part, number in parts
    ]
    work.sort(key=lambda pair: pair[0] / pair[1])
    one_s, other_s = 0.0, sum(theirs for _, theirs in work)
    for mine, theirs in work:
        share = min(1.0, (other_s - one_s) / (mine + theirs))
        one_s, other_s = one_s + share * mine, other_s - share * theirs
    assert one_s == pytest.approx(other_s)
    assert lower_bound_s(inputs) <= one_s


def test_dense_layers_of_a_rank_without_samples_cost_nothing():
    inputs = inputs_of(ONE_NODE, replace(MODEL, dense_layers=tuple(range(LAYERS - 1))))
    shared = sharing([0, 1], (NUMBER // 2, NUMBER // 2), (4, 0), 4).expert_parallel
    costs = inputs.runs(0, 1)[0][0].tp_costs.of_rank(TpShard(shared=shared, index=1), None)
    assert costs.compute.layer("A100-40", 4).both_s == 0
    assert costs.memory.activation_bytes(4, "none") == costs.memory.arriving_bytes(4) == 0


def test_uneven_routing_reaches_layers_with_experts_alone():
    """Half of the layers have some, so time grows by half as much as where all have."""
    shared = [sharing([0, 1], (NUMBER // 2, NUMBER // 2), (4, 4), 2)]
    load = ExpertLoad.falling(2.0, NUMBER)
    more = {}
    for name, model in {"mixed": MIXED_MODEL, "uniform": MODEL}.items():
        inputs = inputs_for(shared, model)
        plans = [(each, plan_of(each, shared)) for each in (inputs, with_load(inputs, load))]
        even, uneven = (costs_of(*each).seconds(0, 0, KINDS[0], 8, splits=False) for each in plans)
        more[name] = sum(uneven) - sum(even)
    assert more["mixed"] == pytest.approx(more["uniform"] / 2, rel=1e-6) != 0
