"""Hierarchical groups: communicators, price, memory, order of launches."""

import dataclasses

import pytest

from scripts.launch_order.check import LIMITS, WAYS, Launched, random_plans
from tests.unit.fake_costs import FakeComm, FakeCompute, FakeMemory
from tests.unit.simulation import costs_of, run
from tests.unit.test_schedules import even_plan
from tests.unit.test_simulate_times import B, F, one_group
from zorse_megatron.costs.process_memory import communicator_bytes
from zorse_megatron.plan.plan import Chunk, Plan, Schedule, holds_equal_parts
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.schedule.communicators import (
    Communicator,
    communicators_of,
    planned_communicators,
    resident_kernels,
)
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.shards import RegionShards
from zorse_megatron.simulate.memory_ledger import Category
from zorse_megatron.simulate.network import Hierarchical, NetworkLoads
from zorse_megatron.simulate.rank_bytes import RankSizes


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
    assert spans[2]["0F0"].end_s == spans[2]["0GATHER"].end_s + 4 * F


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
    waited_for = spans["0GATHER" if in_two_levels else "1GATHER"]
    assert spans["0F0"].end_s == pytest.approx(waited_for.end_s + F)
    assert spans["0GATHER"].end_s + F < spans["1GATHER"].end_s


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
            buffers = result.memory[rank].by_category[Category.BUFFERS]
            assert buffers.num_bytes == sizes.exchange_bytes(Kind.REDUCE, rank, 0) == expected
            gathered = sizes.exchange_bytes(Kind.GATHER, rank, 0)
            assert gathered == (0 if others == 1 else expected // 2)


# Order of launches.


@pytest.mark.slow
def test_launches_of_hierarchical_groups_end():
    """If all that can wait at once fits, and with any number of hardware queues."""
    plans = []
    for plan in random_plans(60, 7):
        if all(map(holds_equal_parts, plan.groups)) and all(
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
