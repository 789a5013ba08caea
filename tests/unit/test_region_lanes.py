"""Samples stay in their region: against every other way to share them out."""

from dataclasses import replace
from itertools import combinations, count, pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from tests.strategies import lowerable_plans
from zorse_megatron.plan.plan import Chunk, Group, ModelFingerprint, Plan, Replica, Schedule
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.samples import MicroBatch, layouts, pieces
from zorse_megatron.schedule.validate import check_executable

Work = tuple[str | None, int, int]
"""Region, micro-batch size, micro-batches."""


def plan_of(groups: list[list[Work]]) -> Plan:
    """One chunk per group, one rank per replica."""
    rank = count()
    return Plan(
        schema_version=1,
        global_batch_size=sum(size * number for _, size, number in groups[0]),
        model=ModelFingerprint(num_layers=len(groups)),
        groups=tuple(
            Group(
                replicas=tuple(
                    Replica(
                        ranks=(next(rank),),
                        micro_batch_size=size,
                        num_microbatches=number,
                        shard_weight=1.0,
                        region=region,
                    )
                    for region, size, number in group
                )
            )
            for group in groups
        ),
        chunks=tuple(Chunk(group=each, layers=(each, each + 1)) for each in range(len(groups))),
        schedule=Schedule(name="1f1b"),
    )


def crossing(plan: Plan, left: int, right: int) -> int:
    """Samples that change region between two groups."""
    laid_out = layouts(plan)

    def region(group: int, micro_batch: MicroBatch) -> str | None:
        return plan.groups[group].replicas[micro_batch.replica].region

    return sum(
        piece.stop - piece.start
        for piece in pieces(laid_out[left], laid_out[right])
        if region(left, piece.source) != region(right, piece.target)
    )


def largest_lag(plan: Plan) -> int:
    """By how much the turns of a sample differ in two groups that follow one another, at most."""
    laid_out = layouts(plan)
    neighbours = pairwise(laid_out)
    return max(
        abs(piece.source.turn - piece.target.turn)
        for left, right in neighbours
        for piece in pieces(left, right)
    )


@st.composite
def two_regions(draw: DrawFn, groups: int = 2, most: int = 3) -> Plan:
    """Groups of equally many samples, each replica in one of two regions."""
    works = []
    for _ in range(groups):
        sizes = draw(st.lists(st.integers(1, most), min_size=1, max_size=4))
        works.append([(draw(st.sampled_from("ab")), size, 1) for size in sizes])
    batch = max(sum(size for _, size, _ in group) for group in works)
    for group in works:
        if missing := batch - sum(size for _, size, _ in group):
            group.append((draw(st.sampled_from("ab")), 1, missing))
    return plan_of(works)  # type: ignore[arg-type]


def fewest(plan: Plan) -> int:
    """Of all ways to choose the samples of a region in each of two groups."""
    batch = range(plan.global_batch_size)
    numbers = [
        sum(each.num_samples for each in group.replicas if each.region == "a")
        for group in plan.groups
    ]
    left = set(range(numbers[0]))
    return min(len(left.symmetric_difference(right)) for right in combinations(batch, numbers[1]))


@pytest.mark.slow
@given(plan=two_regions())
def test_no_way_keeps_more_samples_in_their_region(plan: Plan) -> None:
    assert crossing(plan, 0, 1) == fewest(plan)


@pytest.mark.slow
@given(plan=two_regions(groups=4, most=6))
def test_fewest_samples_change_region_between_any_two_groups(plan: Plan) -> None:
    in_a = [
        sum(each.num_samples for each in group.replicas if each.region == "a")
        for group in plan.groups
    ]
    for left, right in permutations(range(4), 2):
        assert crossing(plan, left, right) == abs(in_a[left] - in_a[right])


@pytest.mark.parametrize("order", list(permutations(["north", "east", "south"])), ids="-".join)
def test_no_sample_leaves_regions_with_equal_shares(order: tuple[str, ...]) -> None:
    one, two, three = order
    plan = plan_of(
        [
            [(one, 3, 4), (two, 4, 2), (three, 2, 5)],
            [(three, 5, 2), (one, 2, 5), (two, 8, 1), (one, 1, 2)],
        ]
    )
    assert crossing(plan, 0, 1) == 0


def test_samples_of_alike_groups_change_region_only_where_shares_differ() -> None:
    """In their order of time alone, half of them would."""
    groups: list[list[Work]] = [
        [("west", 4, 120), ("east", 4, 80)],
        [("west", 8, 60), ("east", 2, 160)],
    ]
    plan = plan_of(groups)
    nowhere = replace(
        plan,
        groups=tuple(
            replace(group, replicas=tuple(replace(r, region=None) for r in group.replicas))
            for group in plan.groups
        ),
    )
    west = [replica.region == "west" for replica in plan.groups[0].replicas]
    laid_out = layouts(nowhere)
    moved = sum(
        piece.stop - piece.start
        for piece in pieces(*laid_out)
        if west[piece.source.replica] != west[piece.target.replica]
    )
    assert (crossing(plan, 0, 1), moved) == (0, 320)


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param([[("w", 4, 120), ("e", 4, 80)], [("w", 8, 60), ("e", 2, 160)]], id="equal"),
        pytest.param([[("w", 4, 120), ("e", 4, 80)], [("w", 8, 50), ("e", 2, 200)]], id="10 %"),
        pytest.param([[("w", 4, 101), ("e", 4, 99)], [("w", 8, 50), ("e", 8, 50)]], id="few"),
        pytest.param(
            [
                [("w", 4, 200)],
                [("w", 4, 120), ("e", 4, 80)],
                [("w", 8, 50), ("e", 2, 200)],
                [("e", 5, 160)],
            ],
            id="ends in one region",
        ),
    ],
)
def test_a_sample_has_its_turn_at_the_same_time_in_all_groups(groups: list[list[Work]]) -> None:
    """Or a group would wait for what another one computes at the end of the step.

    Of 800 samples the shortest band has 80. A group that works at it with 8 samples at once does so
    after every 80 samples.
    """
    plan = plan_of(groups)
    sizes = {each.micro_batch_size for group in plan.groups for each in group.replicas}
    assert (plan.global_batch_size, max(sizes)) == (800, 8)
    assert largest_lag(plan) <= 80


@pytest.mark.slow
@given(plan=lowerable_plans(), data=st.data())
def test_lists_of_plans_in_several_regions_can_be_executed(plan: Plan, data: st.DataObject) -> None:
    names = st.sampled_from([None, "east", "west", "north"])
    groups = tuple(
        replace(g, replicas=tuple(replace(r, region=data.draw(names)) for r in g.replicas))
        for g in plan.groups
    )
    plan = replace(plan, groups=groups)
    check_executable(lower_plan(plan))
    for group, laid_out in zip(plan.groups, layouts(plan), strict=True):
        ordered = sorted(laid_out, key=lambda each: each.start)
        assert [each.start for each in ordered] == [0, *(each.stop for each in ordered)][:-1]
        for number, replica in enumerate(group.replicas):
            own = [each for each in laid_out if each.replica == number]
            assert [each.index for each in own] == list(range(replica.num_microbatches))
            assert {each.size for each in own} <= {replica.micro_batch_size}
