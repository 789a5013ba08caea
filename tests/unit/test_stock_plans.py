"""A plan is read as the layout of stock that it is, or refused with every reason."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import plans
from zorse_megatron.errors import PlanError
from zorse_megatron.plan.plan import (
    Chunk,
    ClusterFingerprint,
    ModelFingerprint,
    Offload,
    Plan,
    Recompute,
    TpShards,
)
from zorse_megatron.plan.rules import problems_of
from zorse_megatron.planner.baselines.stock_layouts import Grid, plan_of_grid
from zorse_megatron.planner.baselines.stock_plans import grid_of_plan

SETTINGS = [("none", None), ("selective", None), ("full", None), ("full", 1), ("full", 2)]


def inputs_for(grid, rounds, dtype=None):
    """What a plan takes from the inputs of a search."""
    world = grid.world_size
    return SimpleNamespace(
        world_size=world,
        global_batch_size=grid.width * grid.micro_batch_size * rounds,
        num_layers=sum(grid.layers),
        model=ModelFingerprint(num_layers=sum(grid.layers)),
        cluster=ClusterFingerprint(gpu_kinds=("A100-40",) * world),
        recompute=None,
        dtype_of=lambda _ranks: dtype,
    )


@st.composite
def layouts(draw):
    """A grid, its inputs, nodes, and an order that they can give."""
    stages = draw(st.integers(1, 4))
    virtual = draw(st.integers(1, 3)) if stages > 1 else 1
    mode, recomputed = draw(st.sampled_from(SETTINGS))
    count = stages * virtual
    grid = Grid(
        layers=tuple(draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))),
        width=draw(st.integers(1, 3)),
        micro_batch_size=draw(st.integers(1, 3)),
        mode=mode,
        recomputed=recomputed,
        tensor=draw(st.sampled_from([1, 2, 4])),
        virtual=virtual,
        distributed=draw(st.booleans()),
    )
    rounds = draw(st.integers(1, 3)) * (stages if virtual > 1 else 1)
    sets = grid.world_size // grid.tensor
    cuts = sorted(draw(st.sets(st.integers(1, sets), max_size=3)) | {sets})
    ends = [grid.tensor * cut for cut in cuts]
    nodes = [range(first, stop) for first, stop in itertools.pairwise([0, *ends])]
    order = []
    for number in draw(st.permutations(range(len(nodes)))):
        ranks = draw(st.permutations(nodes[number]))
        for at in range(0, len(ranks), grid.tensor):
            order += sorted(ranks[at : at + grid.tensor])
    return grid, inputs_for(grid, rounds), nodes, tuple(order)


@given(layouts())
def test_a_layout_comes_back_from_its_plan(layout):
    grid, inputs, nodes, order = layout
    plan = plan_of_grid(inputs, grid, order)
    assert problems_of(plan) == ()
    assert grid_of_plan(plan, nodes) == (grid, order)


def comparable(plan):
    """Without names and predictions; groups in model order, what is recomputed where it is done."""
    stages = tuple(dict.fromkeys(chunk.group for chunk in plan.chunks))
    groups = tuple(
        dataclasses.replace(
            plan.groups[number],
            name=None,
            recompute=None,
            offload=None,
            split_backward=None,
            hierarchical=None,
            replicas=tuple(
                dataclasses.replace(
                    each,
                    shard_weight=1.0,
                    tp_shards=None,
                    offload=None,
                    recompute=each.recompute
                    or plan.groups[number].recompute
                    or Recompute(mode="none"),
                )
                for each in plan.groups[number].replicas
            ),
        )
        for number in stages
    )
    chunks = tuple(
        dataclasses.replace(each, group=stages.index(each.group)) for each in plan.chunks
    )
    return dataclasses.replace(plan, groups=groups, chunks=chunks, predictions=None)


ANY_PLAN = plans(
    4,
    2,
    max_chunks_per_group=2,
    max_ranks_per_replica=2,
    schedule_names=("1f1b", "interleaved", "breadth_first"),
    with_options=True,
)


@pytest.mark.slow
@given(plan=ANY_PLAN, cut=st.integers(1, 4))
def test_any_plan_is_refused_or_is_the_plan_of_its_layout(plan: Plan, cut: int):
    cut = min(cut, plan.world_size)
    try:
        grid, order = grid_of_plan(plan, [range(cut), range(cut, plan.world_size)])
    except PlanError as error:
        assert all(each.where and each.found and each.expected for each in error.problems)
        return
    inputs = inputs_for(grid, 1, plan.groups[0].compute_dtype)
    inputs.global_batch_size, inputs.model = plan.global_batch_size, plan.model
    inputs.cluster = plan.cluster
    assert comparable(plan_of_grid(inputs, grid, order)) == comparable(plan)


GRID = Grid(layers=(2, 1, 1, 2), width=2, micro_batch_size=2, mode="none", tensor=2, virtual=2)
PLAN = plan_of_grid(inputs_for(GRID, 2), GRID)
PLAIN = plan_of_grid(
    inputs_for(dataclasses.replace(GRID, layers=(3, 3), virtual=1), 2),
    dataclasses.replace(GRID, layers=(3, 3), virtual=1),
)
NODES = [range(4), range(4, 8)]


def with_group(number, plan=PLAN, **fields):
    groups = list(plan.groups)
    groups[number] = dataclasses.replace(groups[number], **fields)
    return dataclasses.replace(plan, groups=tuple(groups))


def with_replica(group, index, plan=PLAN, **fields):
    replicas = list(plan.groups[group].replicas)
    replicas[index] = dataclasses.replace(replicas[index], **fields)
    return with_group(group, plan, replicas=tuple(replicas))


def with_chunks(*groups):
    chunks = [
        Chunk(group=group, layers=chunk.layers)
        for group, chunk in zip(groups, PLAN.chunks, strict=False)
    ]
    return dataclasses.replace(PLAN, chunks=tuple(chunks))


def exchanged(plan, one, other):
    """Two TP groups, each of which takes the ranks of the other one."""
    first, second = (plan.groups[g].replicas[r].ranks for g, r in (one, other))
    return with_replica(*other, plan=with_replica(*one, plan=plan, ranks=second), ranks=first)


NO_MORE = dataclasses.replace(PLAN.groups[1], replicas=PLAN.groups[1].replicas[:1])


@pytest.mark.parametrize(
    ("plan", "where", "expected"),
    [
        (with_replica(1, 0, micro_batch_size=1), "groups[1].replicas[0].micro_batch_size", "2, "),
        (with_replica(1, 1, num_microbatches=1), "groups[1].replicas[1].num_microbatches", "2, "),
        (with_replica(0, 1, shard_weight=2.0), "groups[0].replicas[1].shard_weight", "equal"),
        (with_replica(1, 0, ranks=(4,)), "groups[1].replicas[0].ranks", "2 of them"),
        (with_replica(1, 0, ranks=(5, 4)), "groups[1].replicas[0].ranks", "in order"),
        (
            with_replica(1, 0, tp_shards=TpShards(kv_groups=(3, 1))),
            "groups[1].replicas[0].tp_shards",
            "equal ones",
        ),
        (with_replica(1, 0, region="east"), "groups[1].replicas[0].region", "any region"),
        (
            with_replica(1, 0, recompute=Recompute(mode="full", num_layers=1)),
            "groups[1].replicas[0].recompute",
            "none, in all groups",
        ),
        (with_group(1, recompute=Recompute(mode="selective")), "groups[1].recompute", "none"),
        (
            with_group(0, offload=Offload(optimizer_state=True)),
            "groups[0].offload.optimizer_state",
            "everything on the GPU",
        ),
        (with_group(1, split_backward=True), "groups[1].split_backward", "in one piece"),
        (
            with_group(0, grad_reduce_dtype="bf16"),
            "groups[0].grad_reduce_dtype",
            "as they are kept",
        ),
        (with_group(0, hierarchical=True), "groups[0].hierarchical", "over all ranks at once"),
        (with_group(1, compute_dtype="fp16"), "groups[1].compute_dtype", "nothing, as groups[0]"),
        (with_group(1, replicas=NO_MORE.replicas), "groups[1]", "2, as other groups have"),
        (with_chunks(0, 1, 1, 0), "chunks", "groups 0, 1 in turn"),
        (with_chunks(0, 1, 0), "chunks", "groups 0, 1 in turn"),
        (
            with_replica(1, 0, max_in_flight=9),
            "groups[1].replicas[0].max_in_flight",
            "as stock has",
        ),
        (
            dataclasses.replace(
                PLAN, schedule=dataclasses.replace(PLAN.schedule, name="breadth_first")
            ),
            "schedule.name",
            '"interleaved", stock\'s for several chunks a group',
        ),
        (
            dataclasses.replace(
                PLAIN, schedule=dataclasses.replace(PLAIN.schedule, name="interleaved")
            ),
            "schedule.name",
            '"1f1b", stock\'s for one chunk a group',
        ),
        (exchanged(PLAN, (0, 1), (1, 0)), "ranks 0 to 3, one node", "one after the other"),
    ],
)
def test_what_stock_cannot_do_is_named(plan, where, expected):
    with pytest.raises(PlanError) as caught:
        grid_of_plan(plan, NODES)
    (problem,) = [each for each in caught.value.problems if each.where == where]
    assert expected in problem.expected
    assert "zorse plan --strategy stock" in problem.remedy


def test_rounds_are_asked_for_with_virtual_stages_only():
    odd = inputs_for(GRID, 3)
    with pytest.raises(PlanError, match="found 3; expected a multiple of the 2 stages"):
        grid_of_plan(plan_of_grid(odd, GRID), NODES)
    grid = dataclasses.replace(GRID, layers=(3, 3), virtual=1)
    assert grid_of_plan(plan_of_grid(odd, grid), NODES)[0] == grid


def test_one_stage_is_not_interleaved():
    grid = Grid(layers=(2, 2), width=2, micro_batch_size=1, mode="none", virtual=2)
    plan = plan_of_grid(inputs_for(grid, 2), grid)
    alone = dataclasses.replace(
        plan,
        groups=(plan.groups[0],),
        chunks=tuple(dataclasses.replace(chunk, group=0) for chunk in plan.chunks),
    )
    with pytest.raises(PlanError, match="stock interleaves two stages or more"):
        grid_of_plan(alone, [range(2)])


def test_everything_is_told_at_once():
    plan = with_group(1, with_replica(0, 1, micro_batch_size=1), grad_reduce_dtype="bf16")
    plan = with_replica(1, 1, with_replica(1, 0, plan, micro_batch_size=4), micro_batch_size=4)
    some = Offload(optimizer_state=True, optimizer_state_fraction=0.5)  # once, for both
    plan = with_group(0, plan, offload=some)
    with pytest.raises(PlanError) as caught:
        grid_of_plan(plan, NODES, "plan.json")
    assert [each.where for each in caught.value.problems] == [
        "groups[1].grad_reduce_dtype",
        "groups[0].replicas[1].micro_batch_size",
        "groups[1].replicas[0].micro_batch_size",
        "groups[0].offload.optimizer_state",
    ]
    assert "4 (and 1 more of this group)" in str(caught.value)
    assert caught.value.title == "plan.json is no layout of stock Megatron"
