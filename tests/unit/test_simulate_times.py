"""Simulated times: closed forms, and a second implementation on random plans."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.strategies import plans
from tests.unit.fake_costs import FakeComm, FakeCompute, FakeMemory, node_links
from tests.unit.made_plans import dealt_out, even_plan, one_group
from tests.unit.simulation import Reference, run, traces_of, transfers_of
from zorse_megatron.costs.interface import DtypeCosts
from zorse_megatron.plan.plan import (
    Group,
    ModelFingerprint,
    Offload,
    Recompute,
    Schedule,
)
from zorse_megatron.schedule.action_sequence import Durations
from zorse_megatron.schedule.actions import COMPUTE, Action, Kind, from_norm
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.micro_batch_order import Pipeline
from zorse_megatron.schedule.pipeline_schedules import policy_of
from zorse_megatron.schedule.samples import Boundaries
from zorse_megatron.simulate.assumptions import SimulationError
from zorse_megatron.simulate.memory_ledger import Category
from zorse_megatron.simulate.tasks import REPORT

F, B = 1.0, 2.0


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("count", [1, 2, 5, 16])
@pytest.mark.parametrize("replicas", [1, 3])
def test_1f1b_of_equal_stages(stages, count, replicas):
    """(n + S - 1) (f + b): Narayanan et al., SC 2021, section 2.2."""
    result = run(even_plan(stages, replicas, count))
    assert result.iteration_s == (count + stages - 1) * (F + B)
    for usage in result.usage:
        assert usage.busy_s == count * (F + B)
        assert usage.communication_s == 0


@pytest.mark.parametrize(("schedule", "pieces"), [("breadth_first", 3), ("1f1b", 1)])
def test_sharded_chunks_are_gathered_and_reduced_layer_by_layer(schedule, pieces):
    """Three layers: each has a latency of its own where the chunk is sharded.

    There only the first one's gather stops the forward, as the others take no longer than a layer.
    """
    plan = dataclasses.replace(
        one_group((1, 1), (1, 1), layers=3), schedule=Schedule(name=schedule)
    )
    comm = FakeComm(collective_latency_s=1.0, bytes_per_s=64.0)
    reduce_s = pieces * 1.0 + 1 / 2 * 4 * 3 * 640 / 64
    gather_s = 1.0 + 1 / 2 * 2 * (3 // pieces) * 640 / 64
    found = run(plan, comm=comm, compute=FakeCompute(forward_s=20.0))
    assert found.iteration_s == pytest.approx(gather_s + 3 * (20.0 + B) + reduce_s)


@pytest.mark.parametrize("schedule", ["1f1b", "breadth_first"])
def test_equal_weights_make_equal_shards(schedule):
    """Also where their number does not divide the parameters: Megatron pads its buffers."""

    class Seen(FakeComm):
        def reduce_scatter_s(self, ranks, shard_bytes):
            seen.append(shard_bytes)
            return 1.0

    seen = []
    plan = one_group((1, 1), (1, 1), (1, 1), layers=2)
    plan = dataclasses.replace(plan, schedule=Schedule(name=schedule))
    run(plan, memory=FakeMemory(layer_count=1000), comm=Seen())
    assert seen and all(len(set(shard_bytes)) == 1 for shard_bytes in seen)


def test_the_loss_travels_to_the_last_rank():
    """The last chunk is on rank 0: after the step the number of rank 0 goes to rank 1.

    That has the first chunk, and begins when it has come.
    """
    plan = even_plan(2, 1, 1)
    turned = dataclasses.replace(plan, groups=plan.groups[::-1])
    comm = FakeComm(latency_s=1.0, bytes_per_s=8.0)
    told = run(turned, comm=comm)
    assert told.iteration_s == pytest.approx(run(plan, comm=comm).iteration_s + 1.0 + 4 / 8.0)
    assert [step.action for step in told.critical_path[:2]] == [REPORT, "0F0"]


def test_one_group_is_its_slowest_replica_and_its_collectives():
    plan = one_group((4, 3), (1, 8), (1, 0), weights=[3.0, 1.0, 0.0])
    compute = FakeCompute(factors={"slow": 2.0}, step_per_parameter_s=0.001)
    comm = FakeComm(collective_latency_s=1.0, bytes_per_s=64.0, statistic_s=0.5)
    memory = FakeMemory(layer_count=1024)
    result = run(plan, compute=compute, memory=memory, comm=comm, kinds=["x", "slow", "x"])
    passes_s = max(12 * (F + B), 8 * 2 * (F + B))
    reduce_s = 1 + 2 / 3 * 4 * 1024 / 64
    gather_s = 1 + 2 / 3 * 2 * 1024 / 64
    step_s = max(0.001 * 768, 2 * 0.001 * 256)
    # Tokens, and what the norm is made of; the loss.
    expected = passes_s + reduce_s + 0.5 + step_s + gather_s + 0.5
    assert result.iteration_s == pytest.approx(expected, rel=1e-12)
    idle = result.usage[2]
    assert idle.busy_s == 0
    assert idle.communication_s == pytest.approx(reduce_s + 1.0 + gather_s)


@pytest.mark.parametrize(
    ("recompute", "added_s"),
    [
        (Recompute(mode="none"), 0.0),
        (Recompute(mode="selective"), 4 * 0.1),
        (Recompute(mode="full"), 4 * 1.0),
        (Recompute(mode="full", num_layers=3), 3 * 1.0),
        (Recompute(mode="full", num_layers=9), 4 * 1.0),
    ],
)
def test_recomputation_lengthens_backwards(recompute, added_s):
    plan = one_group((2, 3), layers=4, recompute=recompute)
    compute = FakeCompute(recomputed_s={"selective": 0.1, "full": 1.0})
    result = run(plan, compute=compute)
    assert result.iteration_s == pytest.approx(6 * (4 * (F + B) + added_s))


def test_a_shared_nic_halves_two_concurrent_transfers():
    """Two pipelines from one node to another: their activations cross one NIC at once."""
    memory = FakeMemory(boundary=8)

    def activation_s(nic_bytes_per_s):
        comm = FakeComm(bytes_per_s=8.0, links=node_links(2, nic_bytes_per_s))
        result = run(even_plan(2, 2, 1), memory=memory, comm=comm)
        return [t.end_s - t.start_s for t in transfers_of(result) if "SEND_F" in t.action]

    assert activation_s(16.0) == [1.0, 1.0]  # wide enough for both
    assert activation_s(8.0) == [2.0, 2.0]


def test_reductions_of_two_groups_share_a_nic():
    """Groups 0, 2 and 1, 3 over two nodes: alone 1 s each, together through one NIC 2 s."""
    plan = even_plan(2, 2, 1)
    groups = tuple(
        Group(
            replicas=tuple(
                dataclasses.replace(replica, ranks=(rank,))
                for replica, rank in zip(group.replicas, ranks, strict=True)
            )
        )
        for group, ranks in zip(plan.groups, ((0, 2), (1, 3)), strict=True)
    )
    comm = FakeComm(bytes_per_s=1280.0, links=node_links(2, 1280.0))
    both = run(
        dataclasses.replace(plan, groups=groups),
        # The first group has no backward to wait for at its end, so both reduce at once.
        compute=FakeCompute(backward_s=0.0, forward_s=0.0),
        comm=comm,
    )
    reduce_s = [s.end_s - s.start_s for s in both.spans(0) if s.action == "0REDUCE_GRAD"]
    assert reduce_s == [2.0]
    apart = run(plan, compute=FakeCompute(backward_s=0.0, forward_s=0.0), comm=comm)
    assert [s.end_s - s.start_s for s in apart.spans(0) if s.action == "0REDUCE_GRAD"] == [1.0]


def test_a_tied_embedding_is_swapped_between_owners():
    plan = dataclasses.replace(
        even_plan(2, 2, 1), model=ModelFingerprint(num_layers=2, tied_embeddings=True)
    )
    memory = FakeMemory(layer_count=0, embedding_count=256)
    comm = FakeComm(bytes_per_s=64.0, latency_s=0.5)
    result = run(plan, memory=memory, comm=comm)
    # Both groups own halves of 128 numbers of 4 bytes, so each rank swaps with one other.
    for rank in range(4):
        (tie,) = [span for span in result.spans(rank) if span.action == "TIE"]
        assert tie.end_s - tie.start_s - tie.waited_s == pytest.approx(0.5 + 128 * 4 / 64)


@st.composite
def priced(draw):
    plan = draw(plans())
    kinds = draw(
        st.lists(
            st.sampled_from(["x", "y", "z"]), min_size=plan.world_size, max_size=plan.world_size
        )
    )
    compute = FakeCompute(
        factors={"y": 1.7, "z": 0.3},
        embedding_s=draw(st.sampled_from([0.0, 0.4])),
        head_s=draw(st.sampled_from([0.0, 0.9])),
        step_per_parameter_s=0.001,
    )
    comm = FakeComm(
        latency_s=draw(st.sampled_from([0.0, 0.3, 5.0])),
        bytes_per_s=draw(st.sampled_from([float("inf"), 10.0, 1.0])),
        collective_latency_s=draw(st.sampled_from([0.0, 1.3])),
        statistic_s=draw(st.sampled_from([0.0, 0.7])),
    )
    return plan, kinds, compute, FakeMemory(boundary=draw(st.integers(0, 7))), comm


@pytest.mark.slow
@given(case=priced(), forward_only=st.booleans())
@settings(max_examples=examples(150))
def test_random_plans_agree_with_a_second_implementation(case, forward_only):
    plan, kinds, compute, memory, comm = case
    lists = lower_plan(plan, forward_only=forward_only)
    reference = Reference(
        plan=plan, lists=lists, compute=compute, memory=memory, comm=comm, kinds=kinds
    )
    result = run(
        plan, compute=compute, memory=memory, comm=comm, kinds=kinds, forward_only=forward_only
    )
    assert result.iteration_s == pytest.approx(reference.end_s, rel=1e-9)
    for rank, actions in enumerate(lists.ranks):
        assert [span.action for span in result.spans(rank)] == list(map(str, from_norm(actions)))
        for span in result.spans(rank):
            if (rank, span.action) in reference.spans:
                start_s, end_s = reference.spans[rank, span.action]
                assert span.start_s + span.waited_s == pytest.approx(start_s, rel=1e-9, abs=1e-9)
                assert span.end_s == pytest.approx(end_s, rel=1e-9, abs=1e-9)


def of_balanced_work(plan):
    """The plan, of which no times are known, without halves."""
    groups = tuple(
        dataclasses.replace(
            group,
            replicas=tuple(
                dataclasses.replace(each, compute_s=None, halved=None) for each in group.replicas
            ),
        )
        for group in plan.groups
    )
    return dataclasses.replace(plan, groups=groups)


@pytest.mark.slow
@given(plan=plans().map(of_balanced_work))
def test_times_are_those_of_the_simulation_that_made_the_order(plan):
    """It takes a replica's n micro-batches as 1/n each, a third of it forward.

    With these costs and free communication every computation starts when it did there; earlier at
    most where it got stuck at its limits.
    """
    pipeline = Pipeline(plan, Boundaries(plan), policy_of(plan), forward_only=False)
    events = list(pipeline.simulate())
    stuck = pipeline.was_stuck
    factors, kinds = {}, [""] * plan.world_size
    unit = {}
    durations = Durations(plan)
    for chunk, each in enumerate(plan.chunks):
        first, stop = each.layers
        for number, replica in enumerate(plan.groups[each.group].replicas):
            if replica.num_microbatches:
                (rank,) = replica.ranks
                kinds[rank] = str(rank)
                factors[str(rank)] = durations.of(Kind.FORWARD, chunk, number) / (stop - first)
                unit[chunk, number] = rank
    compute = FakeCompute(forward_s=1.0, backward_s=2.0, factors=factors, by_micro_batch=True)
    result = run(plan, compute=compute, kinds=kinds)
    starts = {
        (rank, span.action): span.start_s + span.waited_s
        for rank in range(plan.world_size)
        for span in result.spans(rank)
    }
    for event in events:
        rank = unit[event.chunk, event.micro_batch.replica]
        word = f"{event.chunk}{event.kind}{event.micro_batch.index}"
        if stuck:
            assert starts[rank, word] <= event.time * (1 + 1e-9)
        else:
            assert starts[rank, word] == pytest.approx(event.time, rel=1e-9)


CONGESTED = node_links(2, 3.0, spine_bytes_per_s=4.0)


def congested(case):
    """The case with two ranks to a NIC, and all NICs behind a narrow spine."""
    plan, kinds, compute, memory, comm = case
    comm = dataclasses.replace(comm, bytes_per_s=3.0, links=CONGESTED)
    return plan, kinds, compute, dataclasses.replace(memory, boundary=5), comm


def run_case(case, **options):
    plan, kinds, compute, memory, comm = case
    return run(plan, compute=compute, memory=memory, comm=comm, kinds=kinds, **options)


@pytest.mark.slow
@given(case=priced().map(congested))
@settings(max_examples=examples(200))
def test_what_holds_of_every_iteration(case):
    """Actions once and in order, one computation at a time, a critical path without gaps; bounded
    by work and by an idle network; links that carry no more than they can."""
    plan, kinds, compute, memory, comm = case
    lists, result = lower_plan(plan), run_case(case)
    for rank, actions in enumerate(map(from_norm, lists.ranks)):
        assert [span.action for span in result.spans(rank)] == list(map(str, actions))
        last_s = 0.0
        for action, span in zip(actions, result.spans(rank), strict=True):
            assert 0 <= span.waited_s <= span.end_s - span.start_s + 1e-9
            if action.kind in COMPUTE | {Kind.STEP, Kind.SCALE, Kind.NORM, Kind.TIE}:
                assert span.start_s + span.waited_s >= last_s - 1e-9
                last_s = span.end_s
    path = result.critical_path
    assert (path[0].start_s, path[-1].end_s) == (0, result.iteration_s)
    assert all(before.end_s == after.start_s for before, after in pairwise(path))
    idle = Reference(plan=plan, lists=lists, compute=compute, memory=memory, comm=comm, kinds=kinds)
    assert result.iteration_s >= idle.end_s * (1 - 1e-9)
    for usage in result.usage:
        parts = dataclasses.astuple(usage)
        assert sum(parts) == pytest.approx(result.iteration_s) and min(parts) >= -1e-9
    load = {}
    for transfer in transfers_of(result):
        if transfer.num_bytes:
            for name, capacity in CONGESTED(transfer.source, transfer.target):
                load.setdefault((name, capacity), []).append(transfer)
    for (_, capacity), crossing in load.items():
        taken_s = max(t.end_s for t in crossing) - min(t.start_s for t in crossing)
        assert sum(t.num_bytes for t in crossing) <= capacity * taken_s * (1 + 1e-6)


@pytest.mark.slow
@given(case=priced().map(congested))
@settings(max_examples=examples(30))
def test_the_same_input_gives_the_same_result(case):
    first, second = run_case(case), run_case(case)
    assert traces_of(first) == traces_of(second)
    assert first.critical_path == second.critical_path
    assert (first.usage, first.memory) == (second.usage, second.memory)


def test_lists_that_wait_for_each_other_are_refused():
    plan = even_plan(2, 1, 1)
    lists = lower_plan(plan)
    first = list(lists.ranks[0])
    at = next(i for i, a in enumerate(first) if str(a).startswith("0SEND_F0"))
    # The first activation is sent only after the backward that it leads to.
    first.insert(first.index(Action(kind=Kind.BACKWARD, chunk=0, micro_batch=0)), first.pop(at))
    stuck = dataclasses.replace(lists, ranks=(tuple(first), lists.ranks[1]))
    with pytest.raises(SimulationError, match=r"can proceed:\nrank 0 at 4: .*0F0 0RECV_B0.* »0B0«"):
        run(plan, lists=stuck)


def test_ends_of_a_transfer_that_differ_are_refused():
    plan = even_plan(2, 1, 2)
    lists = lower_plan(plan)
    first = [a for a in lists.ranks[0] if not str(a).startswith("0SEND_F")]
    sends = [a for a in lists.ranks[0] if str(a).startswith("0SEND_F")]
    swapped = dataclasses.replace(
        lists, ranks=((*first[:2], *sends[::-1], *first[2:]), lists.ranks[1])
    )
    with pytest.raises(
        SimulationError, match=r"sends 0SEND_F1>1\[1:2\] where rank 1 has 1RECV_F0<0"
    ):
        run(plan, lists=swapped)


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("0SEND_F0", "sends and"),
        ("1REDUCE_GRAD", "1REDUCE_GRAD in the lists of 1"),
        ("NORM", "NORM in the lists"),
    ],
)
def test_lists_that_do_not_fit_together_are_refused(drop, message):
    plan = even_plan(2, 2, 2)
    lists = lower_plan(plan)
    rank = 2 if drop[0] == "1" else 0
    kept = tuple(a for a in lists.ranks[rank] if not str(a).startswith(drop))
    ranks = (*lists.ranks[:rank], kept, *lists.ranks[rank + 1 :])
    with pytest.raises(SimulationError, match=message):
        run(plan, lists=dataclasses.replace(lists, ranks=ranks))


def test_inputs_that_do_not_fit_the_plan_are_refused():
    with pytest.raises(SimulationError, match="3 kinds"):
        run(even_plan(2, 1, 1), kinds=["x"] * 3)
    with pytest.raises(SimulationError, match="fixed_bytes for 1"):
        run(even_plan(2, 1, 1), fixed_bytes=[1])


def test_recompute_and_offload_do_not_change_the_lists():
    plan = even_plan(2, 2, 3)
    groups = tuple(
        dataclasses.replace(
            group,
            recompute=Recompute(mode="full"),
            offload=Offload(activations=True, optimizer_state=True),
        )
        for group in plan.groups
    )
    assert lower_plan(dataclasses.replace(plan, groups=groups)) == lower_plan(plan)


def test_a_reduction_in_16_bits_sends_half_the_bytes_directly_to_the_owners():
    """Shards of 384 and 256 parameters: the busier rank takes 384 * 2 bytes from the other."""
    comm = FakeComm(bytes_per_s=1.0, collective_latency_s=5.0)
    compute = FakeCompute(forward_s=0.0, backward_s=0.0)
    spans = {}
    for comm_dtype in (None, "bf16"):
        plan = one_group((1, 1), (1, 1), weights=[3.0, 2.0], grad_reduce_dtype=comm_dtype)
        result = run(plan, compute=compute, comm=comm)
        (spans[comm_dtype],) = [
            s.end_s - s.start_s for s in result.spans(0) if s.action == "0REDUCE_GRAD"
        ]
    assert spans == {None: 5 + 640 * 4 / 2, "bf16": 5 + 384 * 2}


def test_a_reduction_with_memory_of_its_own_waits_for_the_one_before():
    """One group, three chunks: 2REDUCE_GRAD takes until 45 s, and 1REDUCE_GRAD comes at 37 s.

    The three gathers before the first pass take 30 s.

    In 16 bits the main stream waits there for it, as the runtime does; 0B0 comes after that.
    """
    ends = {}
    for dtype in (None, "bf16"):
        plan = dealt_out(even_plan(1, 2, 1), 3, schedule="interleaved")
        group = dataclasses.replace(plan.groups[0], grad_reduce_dtype=dtype)
        result = run(
            dataclasses.replace(plan, groups=(group,)), comm=FakeComm(collective_latency_s=10.0)
        )
        spans = {span.action: span for span in result.spans(0)}
        assert (spans["2REDUCE_GRAD"].end_s, spans["1B0"].end_s) == (45.0, 37.0)
        ends[dtype] = spans["0B0"].end_s
    assert ends == {None: 39.0, "bf16": 47.0}


def test_groups_are_priced_in_the_types_that_they_compute_in():
    """Group 0 in fp32: three times as slow, and as many bytes; messages are the narrower ones."""
    plan = even_plan(2, 1, 1)
    groups = (dataclasses.replace(plan.groups[0], compute_dtype="fp32"), plan.groups[1])
    plan = dataclasses.replace(plan, groups=groups)
    slow = DtypeCosts(
        compute=FakeCompute(forward_s=3.0, backward_s=6.0), memory=FakeMemory(boundary=12)
    )
    comm = FakeComm(bytes_per_s=1.0)
    costs = {"memory": FakeMemory(boundary=4), "comm": comm}
    result = run(plan, **costs, by_dtype={"fp32": slow})
    assert [t.num_bytes for t in transfers_of(result)] == [4, 4]
    forward_s, backward_s = 3 + 4 + 1, 2 + 4 + 6
    assert result.iteration_s == forward_s + backward_s
    # Types without costs count as the job's.
    assert run(plan, **costs).iteration_s == (1 + 4 + 1) + (2 + 4 + 2)
    # The output, its narrower copy on its way, and the gradient that is already waited for.
    assert result.memory[0].by_category_bytes[Category.BUFFERS] == 12 + 4 + 4
