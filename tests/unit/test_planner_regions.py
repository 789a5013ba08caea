"""Groups that span regions: samples stay in theirs, and sums have two levels."""

import dataclasses
from dataclasses import replace
from itertools import combinations, count, pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from scripts.launch_order.check import LIMITS, WAYS, Launched, random_plans
from tests.strategies import lowerable_plans
from tests.unit.fake_costs import FakeComm, FakeCompute, FakeMemory
from tests.unit.made_plans import even_plan, one_group, plan_of, replica
from tests.unit.planner_cases import simulated
from tests.unit.simulation import costs_of, run
from tests.unit.test_planner_search import lab
from tests.unit.test_simulate_times import B, F
from zorse_megatron.costs.process_memory import communicator_bytes
from zorse_megatron.plan.plan import Chunk, Plan, Schedule, has_equal_tp_shards
from zorse_megatron.planner import evaluate as evaluator_module
from zorse_megatron.planner import find_plan as find_plan_module
from zorse_megatron.planner.build_plan import Builder
from zorse_megatron.planner.closed_form.candidate import Candidate
from zorse_megatron.planner.closed_form.device_groups import DeviceGroups
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.evaluate import Evaluator
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import SearchStats
from zorse_megatron.planner.search.finish_plan import with_best_levels
from zorse_megatron.planner.search.zorse_search import SearchResult
from zorse_megatron.schedule.actions import SENDS, Kind
from zorse_megatron.schedule.communicators import (
    Communicator,
    communicators_of,
    planned_communicators,
    resident_kernels,
)
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.samples import Lanes, MicroBatch, micro_batches, pieces
from zorse_megatron.schedule.shards import RegionShards
from zorse_megatron.schedule.validate import check_executable
from zorse_megatron.simulate.memory_ledger import Category
from zorse_megatron.simulate.network import Hierarchical, NetworkLoads
from zorse_megatron.simulate.rank_bytes import RankSizes

# Plans.

REGIONS = """
nodes:
  - {name: west, gpus: 2 x A100-40, nics: 100 Gb/s, region: west}
  - {name: east, gpus: 2 x A100-40, nics: 100 Gb/s, region: east}
between_regions:
  - {regions: [west, east], bandwidth: 1 Gb/s, latency: 60 ms}
"""


def planned(inputs: Inputs, groups: list[tuple[int, ...]], sizes: tuple[int, ...]) -> Plan:
    """The plan of groups of these ranks, each group with one micro-batch size."""
    estimator, device_groups = Estimator(inputs), DeviceGroups(inputs)
    candidate = Candidate(
        device_groups=tuple(device_groups.of(ranks) for ranks in groups), levels=sizes
    )
    (estimate,) = estimator.best(candidate)
    plan = Builder(estimator).plan(estimate)
    assert plan is not None
    return plan


def regions_of(plan: Plan) -> list[list[str | None]]:
    return [[replica.region for replica in group.replicas] for group in plan.groups]


@pytest.mark.slow
def test_only_plans_with_a_group_in_two_regions_name_them() -> None:
    inputs = lab(REGIONS, batch=64)
    assert regions_of(planned(inputs, [(0, 2), (1, 3)], (1, 1))) == [["west", "east"]] * 2
    assert regions_of(planned(inputs, [(0, 1), (2, 3)], (1, 1))) == [[None, None]] * 2


@pytest.mark.slow
def test_no_activation_crosses_between_regions_with_equal_shares() -> None:
    """Micro-batches of 1 and 2 samples: in their order of time half of the samples would."""
    inputs = lab(REGIONS, batch=64)
    plan = planned(inputs, [(0, 2), (1, 3)], (1, 2))
    nowhere = replace(
        plan,
        groups=tuple(
            replace(group, replicas=tuple(replace(r, region=None) for r in group.replicas))
            for group in plan.groups
        ),
    )
    assert sent_between_regions(inputs, plan) == 0
    assert sent_between_regions(inputs, nowhere) == 64  # 32 activations, and as many gradients
    assert simulated(inputs, plan).iteration_s < simulated(inputs, nowhere).iteration_s


def sent_between_regions(inputs: Inputs, plan: Plan) -> int:
    """Samples of all messages from one region to the other."""
    region = [inputs.spec.node_with(rank).region for rank in range(4)]
    actions = [
        (rank, action)
        for rank, found in enumerate(lower_plan(plan).ranks)
        for action in found
        if action.kind in SENDS
    ]
    return sum(
        action.samples[1] - action.samples[0]
        for rank, action in actions
        if action.samples and action.peer is not None and region[rank] != region[action.peer]
    )


@pytest.mark.slow
def test_a_long_batch_is_not_extrapolated_from_what_collectives_hide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One group in both regions: with few samples its sums over the link take longest."""
    monkeypatch.setattr(evaluator_module, "MOST_COMPUTATIONS", 100)
    inputs = lab(REGIONS.replace("1 Gb/s", "20 Gb/s"), batch=1024)
    estimator = Estimator(inputs)
    candidate = Candidate(
        device_groups=(DeviceGroups(inputs).of((0, 1, 2, 3)),),
        levels=(1,),
        schedule="breadth_first",
        num_chunks=4,
    )
    (estimate,) = estimator.best(candidate)
    found = Evaluator(inputs).evaluate(estimate)
    assert found is not None
    assert found.iteration_s == pytest.approx(simulated(inputs, found.plan).iteration_s, rel=0.02)


@pytest.mark.slow
def test_groups_in_several_regions_sum_in_two_levels_where_that_is_faster() -> None:
    """Two GPUs of each region: half of a buffer crosses in place of three quarters."""
    inputs = lab(REGIONS, batch=64)
    both = planned(inputs, [(0, 1, 2, 3)], (1,))
    assert both.groups[0].hierarchical
    ring = replace(both, groups=(replace(both.groups[0], hierarchical=None),))
    assert simulated(inputs, both).iteration_s < simulated(inputs, ring).iteration_s
    assert not any(each.hierarchical for each in planned(inputs, [(0, 1), (2, 3)], (1, 1)).groups)
    space = replace(inputs.space, hierarchical=False)
    assert planned(replace(inputs, space=space), [(0, 1, 2, 3)], (1,)) == ring


@pytest.mark.slow
def test_the_other_way_is_tried_in_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the closed form had it wrong."""
    inputs = lab(REGIONS, batch=64)
    plan = planned(inputs, [(0, 1, 2, 3)], (1,))
    ring = replace(plan, groups=(replace(plan.groups[0], hierarchical=None),))
    evaluator = Evaluator(inputs)
    found, slower = evaluator.evaluate_plan(plan), evaluator.evaluate_plan(ring)
    assert found is not None and slower is not None
    assert with_best_levels(evaluator, slower).plan == plan
    assert with_best_levels(evaluator, found).plan == plan
    cheaper = replace(slower, iteration_s=found.iteration_s / 2)
    monkeypatch.setattr(evaluator, "evaluate_plan", lambda _: cheaper)
    assert with_best_levels(evaluator, found) == cheaper


@pytest.mark.slow
def test_baselines_have_rings_only() -> None:
    plan = find_plan(lab(REGIONS, batch=64), strategy="cephalo").plan
    assert not any(group.hierarchical for group in plan.groups)
    assert {each.region for each in plan.groups[0].replicas} == {"west", "east"}


@pytest.mark.slow
@pytest.mark.parametrize("hierarchical", [True, False])
def test_plans_with_rings_are_searched_for_beside_one_in_two_levels(
    hierarchical: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second search finds a faster one, which the first one has left out."""
    inputs = lab(REGIONS, batch=64)
    groups = [(0, 1, 2, 3)] if hierarchical else [(0, 1), (2, 3)]
    plan = planned(inputs, groups, (1,) * len(groups))
    evaluator = Evaluator(inputs)
    first = evaluator.evaluate_plan(plan)
    assert first is not None
    second = replace(first, iteration_s=first.iteration_s / 2)
    searched = []

    def search_with_tp(each: Inputs, _progress: object) -> SearchResult:
        searched.append(each.space.hierarchical)
        considered = SearchStats(groupings=1, estimated=2, simulated=3)
        found = first if each.space.hierarchical else second
        return SearchResult(evaluations=[found], considered=considered)

    monkeypatch.setattr(find_plan_module, "search_with_tp", search_with_tp)
    outcome = find_plan(inputs, stock=())  # a layout of stock's may be faster than both
    assert searched == ([True, False] if hierarchical else [True])
    assert outcome.iteration_s == (second if hierarchical else first).iteration_s
    assert outcome.considered.estimated == (4 if hierarchical else 2)
    assert any("two levels" in note for note in outcome.notes) == hierarchical


# Samples.

Work = tuple[str | None, int, int]
"""Region, micro-batch size, micro-batches."""


def placed(groups: list[list[Work]]) -> Plan:
    """One chunk per group, one rank per replica."""
    rank = count()
    return plan_of(
        *(
            [replica(next(rank), size=size, count=n, region=region) for region, size, n in group]
            for group in groups
        )
    )


def layouts(plan: Plan) -> list[tuple[MicroBatch, ...]]:
    """Group -> its micro-batches."""
    lanes = Lanes.of(plan)
    return [micro_batches(group, lanes) for group in plan.groups]


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
def groups_in_two_regions(draw: DrawFn, groups: int = 2, most: int = 3) -> Plan:
    """Groups of equally many samples, each replica in one of two regions."""
    works = []
    for _ in range(groups):
        sizes = draw(st.lists(st.integers(1, most), min_size=1, max_size=4))
        works.append([(draw(st.sampled_from("ab")), size, 1) for size in sizes])
    batch = max(sum(size for _, size, _ in group) for group in works)
    for group in works:
        if missing := batch - sum(size for _, size, _ in group):
            group.append((draw(st.sampled_from("ab")), 1, missing))
    return placed(works)  # type: ignore[arg-type]


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
@given(plan=groups_in_two_regions())
def test_no_way_keeps_more_samples_in_their_region(plan: Plan) -> None:
    assert crossing(plan, 0, 1) == fewest(plan)


@pytest.mark.slow
@given(plan=groups_in_two_regions(groups=4, most=6))
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
    plan = placed(
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
    plan = placed(groups)
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
    plan = placed(groups)
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
        for number, planned in enumerate(group.replicas):
            own = [each for each in laid_out if each.replica == number]
            assert [each.index for each in own] == list(range(planned.num_microbatches))
            assert {each.size for each in own} <= {planned.micro_batch_size}


# Sums in two levels.


def hierarchical(plan: Plan, regions: str) -> Plan:
    """The plan; in each group the ranks in ascending order are in regions with these letters."""
    groups = []
    for group in plan.groups:
        letter = dict(zip(sorted(group.ranks), regions, strict=False))
        replicas = tuple(
            dataclasses.replace(each, region=letter[each.ranks[0]]) for each in group.replicas
        )
        groups.append(dataclasses.replace(group, replicas=replicas, hierarchical=True))
    return dataclasses.replace(plan, groups=tuple(groups))


# Communicators.


def test_one_in_each_region_and_one_across():
    plan = hierarchical(even_plan(2, 3, 3), "eww")
    found = communicators_of(plan, [lower_plan(plan)])
    assert found == planned_communicators(plan)
    by_use = {use: [c.ranks for c in found if c.use == use] for use in ("region", "across")}
    assert by_use == {"region": [(1, 2), (4, 5)], "across": [(0, 1, 2), (3, 4, 5)]}
    flat = resident_kernels(planned_communicators(even_plan(2, 3, 3)))
    assert [resident_kernels(found)[rank] - flat[rank] for rank in range(3)] == [1, 2, 2]


def test_messages_across_regions_take_buffers_for_two_peers_each_way():
    sizes = [
        communicator_bytes(Communicator(use=use, ranks=(0, 1, 2, 3)), 0, 2)
        for use in ("region", "across")
    ]
    assert sizes[1] == 2 * sizes[0]
    two = Communicator(use="across", ranks=(0, 1))
    assert communicator_bytes(two, 0, 2) == sizes[0]


# Price and memory.


@dataclasses.dataclass(kw_only=True)
class TwoRegions(FakeComm):
    """Ranks 0 and 1, and 2 and 3; the regions are joined by a link with a latency."""

    between_bytes_per_s: float
    between_s: float
    faster: tuple[float, float] = (1.0, 1.0)
    """How much each region's own links are."""

    def reduce_scatter_s(self, ranks, shard_bytes):
        return super().reduce_scatter_s(ranks, shard_bytes) / self.faster[ranks[0] // 2]

    def transfer_s(self, source, target, num_bytes):
        if source // 2 == target // 2:
            return super().transfer_s(source, target, num_bytes)
        return self.between_s + num_bytes / self.between_bytes_per_s

    def shared_links(self, source, target):
        if source // 2 == target // 2:
            return ()
        return ((f"{source // 2}>{target // 2}", self.between_bytes_per_s),)


@pytest.mark.parametrize(
    ("schedule", "pieces", "faster"),
    [("breadth_first", 3, (1, 1)), ("1f1b", 1, (1, 1)), ("1f1b", 1, (9, 1)), ("1f1b", 1, (1, 9))],
)
@pytest.mark.parametrize("rate", [4.0, 4096.0])
@pytest.mark.parametrize("forward_s", [F, 500.0])
def test_stages_of_layers_overlap(schedule, pieces, faster, rate, forward_s):
    """Three layers of S bytes. In each region a ring of two sums what the other region owns, S / 2,
    and then its own; half of S crosses in each direction. All of that in turn for each layer, but
    the region's link and the link between regions work at the same time. Who is faster waits. The
    forward waits for each layer of its own.
    """
    plan = dataclasses.replace(
        one_group((1, 1), (1, 1), (1, 1), (1, 1), layers=3), schedule=Schedule(name=schedule)
    )
    comm = TwoRegions(bytes_per_s=64.0, between_bytes_per_s=rate, between_s=0.25, faster=faster)

    def stages_s(num_bytes):
        layers_bytes = num_bytes * 3 * 640 / pieces
        return layers_bytes / 2 / 2 / 64.0, 0.25 + layers_bytes / 2 / rate

    in_region_s, between_s = stages_s(4)
    reduce_s = in_region_s + pieces * between_s
    if between_s <= in_region_s:
        reduce_s = pieces * 2 * in_region_s
    in_region_s, between_s = stages_s(2)
    gathered_s = computed_s = 0.0
    for number in range(1, pieces + 1):
        gathered_s = max(gathered_s + in_region_s, number * between_s) + in_region_s
        computed_s = max(computed_s, gathered_s) + 3 / pieces * forward_s
    expected_s = computed_s + 3 * B + reduce_s
    placed, costs = hierarchical(plan, "eeww"), {"comm": comm}
    costs["compute"] = FakeCompute(forward_s=forward_s)
    found = run(placed, **costs)
    assert found.iteration_s == pytest.approx(expected_s)
    assert run(placed, **costs, merge_equal_ranks=True).iteration_s == found.iteration_s
    assert run(plan, **costs).iteration_s != found.iteration_s


@pytest.mark.parametrize("faster", [(9, 1), (1, 9)])
@pytest.mark.parametrize("between_s", [0.1, 5.0])
def test_several_buffers_wait_for_the_slowest_region_or_for_messages(faster, between_s):
    """In closed form: rings of two over 32 bytes of others and 32 of their own, at 64 bytes/s."""
    comm = TwoRegions(
        bytes_per_s=64.0, between_bytes_per_s=float("inf"), between_s=between_s, faster=faster
    )
    buffer = RegionShards(bounds=((0, 16), (16, 32), (32, 48), (48, 64)), regions=((0, 2), (2, 4)))
    levels = Hierarchical(
        ranks=range(4), to_bytes=int, loads=NetworkLoads(comm), reduces=True
    ).times(buffer)
    assert (levels.foreign_s, levels.own_s, levels.between_s) == (0.25, 0.25, between_s)
    assert levels.several_s(3) == pytest.approx(max(3 * 0.5, 0.25 + 3 * between_s))


def test_messages_are_on_their_way_while_regions_work_on_the_next_chunk():
    """Two chunks of a layer: their gathers share the link, and what the first spreads in its
    regions hides behind the second one's messages. A reduction waits for the one before it, whose
    memory it needs.
    """
    plan = dataclasses.replace(
        one_group((1, 1), (1, 1), (1, 1), (1, 1), layers=2),
        chunks=(Chunk(group=0, layers=(0, 1)), Chunk(group=0, layers=(1, 2))),
        schedule=Schedule(name="breadth_first"),
    )
    comm = TwoRegions(bytes_per_s=64.0, between_bytes_per_s=16.0, between_s=0.0)
    found = run(
        hierarchical(plan, "eeww"), comm=comm, compute=FakeCompute(forward_s=0.0, backward_s=0.0)
    )
    between_s, inside_s = 640 / 2 / 16.0, 640 / 4 / 64.0  # of a byte for each parameter
    gathers_s, reductions_s = 2 * between_s + inside_s, 2 * (between_s + inside_s)
    assert found.iteration_s == pytest.approx(2 * gathers_s + 4 * reductions_s)


def test_a_region_goes_on_while_another_one_still_gathers():
    """Rank 2 is alone in its region: when the messages are there, it has all parameters."""
    plan = one_group((1, 1), (1, 1), (1, 1), layers=4)
    comm = TwoRegions(bytes_per_s=1.0, between_bytes_per_s=64.0, between_s=0.0)
    spans = [
        {span.action: span for span in run(hierarchical(plan, "eew"), comm=comm).spans(rank)}
        for rank in range(3)
    ]
    ends_s = [found["0F0"].end_s for found in spans]
    assert ends_s[0] == ends_s[1] > ends_s[2] + 100
    assert spans[2]["0F0"].end_s == spans[2]["0UNSHARD"].end_s + 4 * F


@pytest.mark.parametrize("in_two_levels", [True, False])
def test_the_loss_is_summed_beside_gathers_in_two_levels(in_two_levels):
    """Behind the update, over the last group: on a communicator that rings share with it."""
    plan = dataclasses.replace(
        one_group((1, 1), (1, 1), (1, 1), (1, 1), layers=4),
        chunks=(Chunk(group=0, layers=(0, 1)), Chunk(group=0, layers=(1, 4))),
        schedule=Schedule(name="interleaved"),
    )
    comm = TwoRegions(bytes_per_s=64.0, between_bytes_per_s=16.0, between_s=0.0)
    found = run(hierarchical(plan, "eeww") if in_two_levels else plan, comm=comm)
    spans = {span.action: span for span in found.spans(0)}
    waited_for = spans["0UNSHARD" if in_two_levels else "1UNSHARD"]
    assert spans["0F0"].end_s == pytest.approx(waited_for.end_s + F)
    assert spans["0UNSHARD"].end_s + F < spans["1UNSHARD"].end_s


def test_arriving_sums_are_counted_beside_the_gradients():
    """Between two regions sums arrive in as much as the rank owns; among three they are packed."""
    memory, weights = FakeMemory(layer_count=768), [1.0, 0.0, 3.0, 2.0]
    plan = one_group((1, 1), (1, 1), (1, 1), (1, 1), weights=weights, layers=2)
    for regions, others in (("eeww", 1), ("aabc", 2)):
        placed = hierarchical(plan, regions)
        result = run(placed, memory=memory)
        sizes = RankSizes(placed, costs_of(placed, memory=memory))
        for rank, weight in enumerate(weights):
            own = int(2 * 768 * weight / sum(weights))
            packed = 0
            if others > 1:
                alone = rank > 1
                packed = (2 * 768 - own) if alone else int(2 * 768 * 5 / 6) // 2
            expected = 4 * (others * own + packed)
            buffers = result.memory[rank].by_category_bytes[Category.BUFFERS]
            assert buffers == sizes.exchange_bytes(Kind.REDUCE_GRAD, rank, 0) == expected
            gathered = sizes.exchange_bytes(Kind.UNSHARD, rank, 0)
            assert gathered == (0 if others == 1 else expected // 2)


# Order of launches.


@pytest.mark.slow
def test_launches_of_hierarchical_groups_end():
    """If all that can wait at once fits, and with any number of hardware queues."""
    plans = []
    for plan in random_plans(60, 7):
        if all(map(has_equal_tp_shards, plan.groups)) and all(
            len(each.ranks) == 1 for group in plan.groups for each in group.replicas
        ):
            most = max(len(group.ranks) for group in plan.groups)
            plans.append(hierarchical(plan, "e" * (most // 2) + "w" * most))
    across = [any(c.use == "across" for c in planned_communicators(plan)) for plan in plans]
    assert sum(across) > 20
    for plan in plans:
        launched = Launched.of(plan, WAYS[0], forward_only=False)
        for limits in LIMITS:
            if limits[1] == "fit":
                assert launched.hang(*limits) is None
