"""Replicas of several ranks, each simulated or one for all; what other frameworks do."""

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import given, settings

from tests.examples import examples
from tests.strategies import in_ascending_order, plans
from tests.unit.fake_costs import FakeComm, FakeCompute, FakeMemory, node_links
from tests.unit.fake_tp_costs import FakeTpCosts, RingComm
from tests.unit.made_plans import even_plan, in_tp_groups, plan_of, replica
from tests.unit.simulation import costs_of, run, transfers_of
from zorse_megatron.costs.communication import TpCollectives
from zorse_megatron.plan.plan import Group, TpShards
from zorse_megatron.schedule.actions import RECEIVES, SENDS
from zorse_megatron.simulate.assumptions import STOCK_1F1B, Framework, Perturbation, SimulationError
from zorse_megatron.simulate.memory_ledger import Category, changes_of
from zorse_megatron.simulate.rank_bytes import RankSizes


def tp_groups_of(*groups, counts=None, weights=None, layers=4):
    """Groups are lists of TP groups of ranks, all with one micro-batch unless `counts` say
    otherwise."""
    counts, weights = (
        counts or [[1] * len(g) for g in groups],
        weights or [[1.0] * len(g) for g in groups],
    )
    return plan_of(
        *(
            [replica(*r, size=2, count=n, weight=w) for r, n, w in zip(*row, strict=True)]
            for row in zip(groups, counts, weights, strict=True)
        ),
        layers=layers,
    )


def simulated(plan, tp_costs, **options):
    return run(plan, tp_costs=tp_costs, **tp_costs.alone(), **options)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_one_tp_group_alone_takes_its_share_and_four_sums_a_layer(degree, sequence_parallel):
    """Layers of 3 s a sample; an activation of 2 samples is 64 bytes, a ring of sums 2 (d-1)/d."""
    tp_costs = FakeTpCosts(boundary=32, sequence_parallel=sequence_parallel, whole=0, cut=640)
    plan = tp_groups_of([tuple(range(degree))])
    comm = RingComm(bytes_per_s=100.0)
    found = simulated(plan, tp_costs, comm=comm)
    sum_s = 2 * (degree - 1) / degree * 64 / 100
    inside_s = 4 * 4 * sum_s + 2 * sum_s  # of layers; of the embedding and the output layer
    inside_s += 3 * 2 * (degree - 1) / degree * 4 * 2 / 100  # the loss: 2 tokens of 4 bytes
    assert found.iteration_s == pytest.approx(4 * 2 * 3.0 / degree + inside_s)
    assert found.simulated_ranks == tuple(range(degree))
    assert len({usage.busy_s for usage in found.usage}) == 1


@pytest.mark.parametrize("learns_positions", [False, True])
def test_an_embedding_with_learned_positions_is_summed_whole(learns_positions):
    """Then cut, without a message; without a table of positions it is a reduce-scatter.

    Source: `megatron.core.models.common.embeddings.language_model_embedding`, where
    `reduce_scatter_embeddings` asks for no position embedding.
    """
    comm = RingComm(bytes_per_s=100.0)
    tp_costs = FakeTpCosts(boundary=32, sequence_parallel=True, learns_positions=learns_positions)
    inside = TpCollectives(comm=comm, traits=tp_costs.traits)
    found = inside.of("embedding", (0, 1, 2, 3), 64, 2)
    scatter_s, gather_s = (
        call((0, 1, 2, 3), (16,) * 4) for call in (comm.reduce_scatter_s, comm.all_gather_s)
    )
    sum_s = comm.all_reduce_s((0, 1, 2, 3), 64)
    assert found.forward_s == pytest.approx(sum_s if learns_positions else scatter_s)
    assert found.backward_s == pytest.approx(gather_s)
    assert scatter_s < 0.6 * sum_s
    plain = FakeTpCosts(boundary=32, sequence_parallel=True)
    plan = tp_groups_of([(0, 1, 2, 3)])
    more_s = (simulated(plan, one, comm=comm).iteration_s for one in (tp_costs, plain))
    assert next(more_s) - next(more_s) == pytest.approx(found.forward_s - scatter_s)


def test_gradients_of_learned_positions_are_whole_on_every_rank():
    """Of norms and biases they are summed over the TP group, with sequence parallelism."""
    comm, plan = RingComm(bytes_per_s=100.0), tp_groups_of([(0, 1)])
    times_s = [
        simulated(plan, FakeTpCosts(sequence_parallel=True, **sizes), comm=comm).iteration_s
        for sizes in ({}, {"positions": 1000}, {"whole": 140})
    ]
    assert times_s[0] == times_s[1] < times_s[2]


def test_times_measured_in_a_tp_group_have_its_collectives_in_them():
    plan, comm = tp_groups_of([(0, 1)]), RingComm(bytes_per_s=100.0)
    tp_costs = FakeTpCosts(boundary=32, measured=True)
    assert simulated(plan, tp_costs, comm=comm).iteration_s == pytest.approx(4 * 2 * 3.0 / 2)


def test_a_forward_in_parts_is_the_whole_forward():
    """Two TP groups share a sharded chunk of next to no parameters, so layers wait for nothing;
    four layers, embedding and head, and what the TP groups communicate in them.
    """

    class WithEnds(FakeTpCosts):
        def compute(self, degree, index=0):
            costs = super().compute(degree, index)
            costs.embedding_s, costs.head_s = 0.25, 0.5
            return costs

    tp_costs = WithEnds(boundary=32, whole=2, cut=0, positions=2)
    plan, comm = tp_groups_of([(0, 1), (2, 3)]), RingComm(bytes_per_s=1e4)
    whole = simulated(plan, tp_costs, comm=comm)
    schedule = dataclasses.replace(plan.schedule, name="breadth_first")
    parts = simulated(dataclasses.replace(plan, schedule=schedule), tp_costs, comm=comm)
    assert len(parts.timeline.program.tracks[0].main) > len(whole.timeline.program.tracks[0].main)
    assert parts.usage[0].busy_s == pytest.approx(whole.usage[0].busy_s, rel=1e-9)


def test_a_tp_group_is_as_fast_as_its_slowest_rank():
    tp_costs = FakeTpCosts(factors={"slow": 3.0})
    found = simulated(tp_groups_of([(0, 1)]), tp_costs, kinds=["x", "slow"])
    assert found.iteration_s == pytest.approx(3 * 4 * 2 * 3.0 / 2)
    slowed = Perturbation(rank_factors={0: 2.0})
    found = simulated(tp_groups_of([(0, 1)]), tp_costs, perturbation=slowed)
    assert found.iteration_s == pytest.approx(2 * 4 * 2 * 3.0 / 2)


def test_what_one_rank_saves_in_attention_does_not_make_up_for_its_mlp():
    """A sum is between the two: both ranks wait for the one that is slowest in each."""
    (group,) = tp_groups_of([(0, 1)]).groups
    replica = dataclasses.replace(group.replicas[0], tp_shards=TpShards(mlp_columns=(3, 5)))
    plan = dataclasses.replace(tp_groups_of([(0, 1)]), groups=(Group(replicas=(replica,)),))
    for shares, slower in (({0: 0.25, 1: 0.25}, 1.0), ({0: 0.75, 1: 0.5}, 1.25)):
        found = simulated(plan, FakeTpCosts(attention_shares=shares))
        assert found.iteration_s == pytest.approx(slower * 4 * 2 * 3.0 / 2)


def test_a_tp_group_starts_when_all_its_ranks_have_their_parts():
    """Rank 2's half comes over a link of a tenth of the speed of rank 1's."""

    class Comm(FakeComm):
        def transfer_s(self, source, target, num_bytes):
            return num_bytes / (1.6 if 2 in (source, target) else 16.0)

    tp_costs = FakeTpCosts(boundary=16)
    found = simulated(tp_groups_of([(0,)], [(1, 2)]), tp_costs, comm=Comm())
    moved = {(t.source, t.target): t.num_bytes for t in transfers_of(found)}
    assert moved == {(0, 1): 16, (0, 2): 16, (1, 0): 16, (2, 0): 16}
    starts = [next(s for s in found.spans(r) if s.action == "1F0").end_s for r in (1, 2)]
    assert starts == [pytest.approx(2 * 2 * 1.0 + 10.0 + 2 * 2 * 0.5)] * 2
    # there, half a forward and backward, and back
    assert found.iteration_s == pytest.approx(2 * 2 * 3.0 + 10.0 + 2 * 2 * 1.5 + 10.0)


@pytest.mark.parametrize(("lower", "upper"), [(1, 2), (2, 1), (2, 4), (3, 2), (2, 2)])
def test_each_element_crosses_a_boundary_once(lower, upper):
    ranks = tuple(range(lower + upper))
    found = simulated(tp_groups_of([ranks[:lower]], [ranks[lower:]]), FakeTpCosts(boundary=48))
    of_kind = {name: 0 for name in ("SEND_F", "SEND_B")}
    for transfer in transfers_of(found):
        of_kind["SEND_F" if "SEND_F" in transfer.action else "SEND_B"] += transfer.num_bytes
    assert of_kind == {"SEND_F": 2 * 48, "SEND_B": 2 * 48}


def test_equal_tp_groups_are_those_that_one_rank_stands_for():
    """With nothing to send between groups and free collectives inside, as one rank of each.

    Costs do not depend on how many ranks there are.
    """
    plain = even_plan(stages=3, replicas=2, count=5)
    plan, tp_costs = in_tp_groups(plain, 4), FakeTpCosts(whole=0, cut=640)
    comm = FakeComm(bytes_per_s=100.0)
    every = simulated(plan, tp_costs, comm=comm)
    one = run(plain, compute=tp_costs.compute(4), memory=tp_costs.memory(4), comm=comm)
    assert every.iteration_s == pytest.approx(one.iteration_s)
    assert every.peak_memory_bytes == tuple(b for b in one.peak_memory_bytes for _ in range(4))


def test_unlike_replicas_sum_and_gather_overlaps():
    """A rank of everything beside a TP group of two: of what is cut, each element crosses once a
    way.

    Weights 1 and 1: of each of 4 layers rank 0 owns half, rank 1 and 2 half of their halves, and of
    what is whole rank 1.
    """
    plan, tp_costs = tp_groups_of([(0,), (1, 2)]), FakeTpCosts(cut=512, whole=128)
    sizes = RankSizes(plan, costs_of(plan, memory=tp_costs.memory(1), tp_costs=tp_costs))
    assert [sizes.held(rank, 0) for rank in range(3)] == [4 * 640, 4 * 384, 4 * 384]
    assert sizes.shards[0] == {0: 4 * 320, 1: 4 * (128 + 64), 2: 4 * 128}
    ((sums, times),) = sizes.mixed_tp[0].sums
    assert times == 4
    assert sums == {(0, 1): 192, (0, 2): 128, (1, 0): 192, (2, 0): 128}
    ((gathers, _),) = sizes.mixed_tp[0].gathers
    assert sum(gathers.values()) == 512 + 2 * 128  # what is whole, to both others
    found = simulated(plan, tp_costs, comm=FakeComm(bytes_per_s=100.0))
    # Rank 0 has most to do: it receives and sends 320, and tells of 256 once and of 64 twice.
    exchanged_s = 4 * (320 * 4 + (256 + 2 * 64) * 2) / 100
    assert found.iteration_s == pytest.approx(4 * 2 * 3.0 + exchanged_s)


def test_shared_links_carry_all_messages_of_an_exchange():
    plan, tp_costs = tp_groups_of([(0,), (1, 2)]), FakeTpCosts(cut=512, whole=0)
    fast = simulated(plan, tp_costs, comm=FakeComm(bytes_per_s=1000.0))
    nics = node_links(1, 100.0)
    slow = simulated(plan, tp_costs, comm=FakeComm(bytes_per_s=1000.0, links=nics))
    # 256 elements leave rank 0 in each of four layers: of 4 bytes, and then of 2
    assert slow.iteration_s - fast.iteration_s == pytest.approx(4 * 256 * 6 * (1 / 100 - 1 / 1000))


@settings(max_examples=examples(40))
@given(plan=plans(max_world=7, max_ranks_per_replica=3).map(in_ascending_order))
def test_random_tp_groups_end_and_give_all_memory_back(plan):
    tp_costs = FakeTpCosts(cut=600, whole=64, boundary=60)
    found = simulated(plan, tp_costs, comm=FakeComm(latency_s=0.1, bytes_per_s=500.0))
    for rank in range(plan.world_size):
        start, changes = changes_of(found.timeline, rank)
        left = dict.fromkeys(Category, 0)
        for _, category, num_bytes in changes:
            left[category] += num_bytes
        assert not any(left.values())
        assert found.memory[rank].by_category_bytes[Category.PARAMETERS] >= start[0] > 0
    lists = found.timeline.program.tracks
    sends = [a for t in lists.values() for a in t.actions if a.kind in SENDS]
    receives = [a for t in lists.values() for a in t.actions if a.kind in RECEIVES]
    assert len(sends) == len(receives)


def test_memory_of_each_rank_is_that_of_its_degree():
    plan = tp_groups_of([(0,), (1, 2)], [(3, 4)], counts=[[1, 1], [2]])
    tp_costs = FakeTpCosts(cut=512, whole=128, boundary=32)
    found = simulated(plan, tp_costs)
    saved = [each.by_category_bytes[Category.ACTIVATIONS] for each in found.memory]
    assert saved == [2 * 2 * 1000, 2 * 2 * 500, 2 * 2 * 500, 2 * 2 * 500, 2 * 2 * 500]
    # TP groups of one degree hold no second copy of what they own; replicas that differ in TP
    # shards do.
    parameters = [each.by_category_bytes[Category.PARAMETERS] for each in found.memory]
    owned = [2 * 320, 2 * (128 + 64), 2 * 128]
    held = [2 * 640, 2 * 384, 2 * 384]
    assert parameters[:3] == [2 * (h + o) for h, o in zip(held, owned, strict=True)]
    assert parameters[3:] == [2 * 2 * 384] * 2
    state = [each.by_category_bytes[Category.OPTIMIZER_STATE] for each in found.memory]
    assert state == [12 * o for o in owned] + [12 * 2 * 384] * 2


def test_sequence_parallel_tp_groups_have_parts_of_what_they_receive():
    plan = tp_groups_of([(0,)], [(1, 2)])
    whole = simulated(plan, FakeTpCosts(boundary=64))
    parts = simulated(plan, FakeTpCosts(boundary=64, sequence_parallel=True))
    assert [len(transfers_of(each)) for each in (whole, parts)] == [4, 4]
    buffers = [
        [each.memory[r].by_category_bytes[Category.BUFFERS] for r in (1, 2)]
        for each in (whole, parts)
    ]
    assert buffers[0] > buffers[1] and min(buffers[1]) >= 64


def test_unequal_parts_are_held_and_owned():
    """Of 512 cut elements, rank 1 has three eighths and rank 2 five, and own half of that."""
    plan, tp_costs = tp_groups_of([(0,), (1, 2)]), FakeTpCosts(cut=512, whole=128)
    group = plan.groups[0]
    uneven = dataclasses.replace(group.replicas[1], tp_shards=TpShards(mlp_columns=(3, 5)))
    group = dataclasses.replace(group, replicas=(group.replicas[0], uneven))
    plan = dataclasses.replace(plan, groups=(group,))
    sizes = RankSizes(plan, costs_of(plan, memory=tp_costs.memory(1), tp_costs=tp_costs))
    assert sizes.shards[0] == {0: 4 * 320, 1: 4 * (96 + 64), 2: 4 * 160}
    assert simulated(plan, tp_costs).iteration_s == pytest.approx(4 * 2 * 3.0)


def test_tp_groups_need_costs_of_tp_groups():
    with pytest.raises(SimulationError, match="expected the costs of TP groups"):
        run(tp_groups_of([(0, 1)]))


# Other frameworks.

PLAIN = even_plan(stages=3, replicas=2, count=5)


def test_replicated_state():
    """All-reduce: as much as the scatter and the gather of gradients; no gather of parameters."""
    plan = even_plan(stages=1, replicas=4, count=1)
    comm = FakeComm(bytes_per_s=100.0)
    compute = FakeCompute(step_per_parameter_s=1e-3)
    parameters = 640 * plan.model.num_layers
    sharded = run(plan, comm=comm, compute=compute)
    whole = run(plan, comm=comm, compute=compute, framework=Framework(state="replicated"))
    assert sharded.iteration_s == pytest.approx(
        3.0 * plan.model.num_layers + 0.75 * (4 + 2) * parameters / 100 + 1e-3 * parameters / 4
    )
    assert whole.iteration_s == pytest.approx(
        3.0 * plan.model.num_layers + 0.75 * 2 * 4 * parameters / 100 + 1e-3 * parameters
    )
    state = [
        each.memory[0].by_category_bytes[Category.OPTIMIZER_STATE] for each in (sharded, whole)
    ]
    assert state == [12 * parameters // 4, 12 * parameters]


def test_blocking_transfers_and_rebuilds_stop_the_ranks():
    """Two stages, one micro-batch: everything is in one row either way."""
    plan = even_plan(stages=2, replicas=1, count=1)
    costs = {"memory": FakeMemory(boundary=8), "comm": FakeComm(bytes_per_s=16.0)}
    in_a_row_s = 3.0 * plan.model.num_layers + 2 * 0.5
    assert run(plan, **costs).iteration_s == pytest.approx(in_a_row_s)
    blocking = Framework(blocking_transfers=True, rebuild_bytes_per_s=32.0)
    assert run(plan, framework=blocking, **costs).iteration_s == pytest.approx(
        in_a_row_s + 2 * 0.25
    )


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_blocking_transfers_are_not_hidden(stages):
    """With transfers of half a forward, a middle stage stops for them at every micro-batch."""
    plan = even_plan(stages=stages, replicas=1, count=20)
    costs = {"memory": FakeMemory(boundary=8), "comm": FakeComm(bytes_per_s=16.0)}
    hidden = run(plan, **costs).iteration_s
    blocking = run(plan, framework=Framework(blocking_transfers=True), **costs).iteration_s
    assert blocking >= hidden + 20 * 0.5


def test_stock_starts_an_activation_and_a_gradient_together():
    """Two stages in step: each micro-batch takes a forward, a backward and one transfer.

    Stage 1 runs them one after the other, from the first arrival on; then the last gradient
    travels and stage 0 runs its last backward. Started one after the other, there are two transfers
    for each micro-batch.
    """
    count, transfer_s = 20, 0.5
    plan = even_plan(stages=2, replicas=1, count=count)
    costs = {"memory": FakeMemory(boundary=8), "comm": FakeComm(bytes_per_s=16.0)}
    both_s = 3.0 * plan.model.num_layers / 2
    paired = run(plan, framework=STOCK_1F1B, **costs).iteration_s
    assert paired == pytest.approx((count + 1) * (both_s + transfer_s))
    alone = run(plan, framework=Framework(blocking_transfers=True), **costs).iteration_s
    assert alone >= paired + (count - 2) * transfer_s


@dataclasses.dataclass(kw_only=True)
class _CommByRanks(FakeComm):
    sums_s: Mapping[tuple[int, ...], float]

    def all_reduce_s(self, ranks, num_bytes):
        return self.sums_s[tuple(ranks)]


def test_stock_broadcasts_the_number_of_tokens_along_pipelines():
    """Half a sum of the slower pipeline, a sum over the slower stage; the loss is one, too."""
    plan = even_plan(stages=2, replicas=2, count=2)
    pipelines, stages = {(0, 2): 2.0, (1, 3): 4.0}, {(0, 1): 1.0, (2, 3): 16.0}
    comm = _CommByRanks(sums_s={(0, 1, 2, 3): 8.0, **pipelines, **stages})
    free_s = run(plan, framework=STOCK_1F1B, comm=FakeComm()).iteration_s
    found_s = run(plan, framework=STOCK_1F1B, comm=comm).iteration_s
    assert found_s - free_s == pytest.approx(4.0 / 2 + 16.0 + (1 + 1 + 3) * 8.0 + 16.0)


def test_merging_leaves_other_frameworks_alone():
    blocking = Framework(blocking_transfers=True)
    assert len(run(PLAIN, merge_equal_ranks=True, framework=blocking).simulated_ranks) == 6
