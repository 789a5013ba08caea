"""Simulated memory, and what moves parameters: closed forms, and sums over random spans."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.action_words import parse_action_lists
from tests.examples import examples
from tests.unit.fake_costs import FakeComm, FakeCompute, FakeMemory
from tests.unit.made_plans import even_plan, one_group, with_groups
from tests.unit.simulation import costs_of, run
from tests.unit.test_simulate_times import priced, run_case
from zorse_megatron.costs.interface import DtypeCosts
from zorse_megatron.inputs.model import JobRecompute
from zorse_megatron.plan.plan import Chunk, ModelFingerprint, Offload, Recompute, Schedule
from zorse_megatron.schedule import shards
from zorse_megatron.schedule.actions import Kind, from_norm
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.simulate.assumptions import SimulationError
from zorse_megatron.simulate.memory_ledger import Category
from zorse_megatron.simulate.rank_bytes import RankSizes


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("count", [1, 3, 12])
def test_1f1b_keeps_one_micro_batch_for_each_stage_after(stages, count):
    """Stage s of S holds min(n, S - s) micro-batches: Narayanan et al., SC 2021, section 2.2."""
    result = run(even_plan(stages, 1, count, size=2))
    for stage in range(stages):
        peak = result.memory[stage].by_category_bytes[Category.ACTIVATIONS]
        assert peak == min(count, stages - stage) * 2 * 1000


def test_state_is_unsharded_parameters_and_gradients_and_a_shard():
    plan = one_group((1, 2), (1, 1), (1, 0), weights=[1.0, 0.0, 3.0], layers=2)
    memory = FakeMemory(layer_count=1024, embedding_count=512, head_count=1536)
    result = run(plan, memory=memory, fixed_bytes=[7, 8, 9])
    total = 2 * 1024 + 512 + 1536
    for rank, share in enumerate((0.25, 0, 0.75)):
        peak = result.memory[rank]
        assert peak.by_category_bytes[Category.PARAMETERS] == 2 * total
        assert peak.by_category_bytes[Category.GRADIENTS] == 4 * total
        assert peak.by_category_bytes[Category.OPTIMIZER_STATE] == 12 * total * share
        assert peak.by_category_bytes[Category.FIXED] == 7 + rank
    assert result.memory[2].total_bytes == (2 + 4 + 9) * total + 9


def test_a_tied_head_in_one_group_has_no_parameters_of_its_own():
    memory = FakeMemory(layer_count=64, head_count=640)
    for tied, expected in ((True, 2 * 64), (False, 2 * (64 + 640))):
        plan = dataclasses.replace(
            one_group((1, 1)), model=ModelFingerprint(num_layers=1, tied_embeddings=tied)
        )
        parameters = run(plan, memory=memory).memory[0].by_category_bytes[Category.PARAMETERS]
        assert parameters == expected


def test_logits_live_from_forward_to_backward_on_the_last_chunk():
    result = run(even_plan(2, 1, 4), memory=FakeMemory(head=50))
    assert result.memory[0].by_category_bytes[Category.LOGITS] == 0
    assert result.memory[1].by_category_bytes[Category.LOGITS] == 50


@pytest.mark.parametrize(
    ("recompute", "saved", "working"),
    [
        (None, 4000, 0),
        (Recompute(mode="selective"), 2800, 300),
        (Recompute(mode="full"), 400, 900),
        (Recompute(mode="full", num_layers=1), 3100, 0),
        (Recompute(mode="full", num_layers=3), 1300, 0),
    ],
)
def test_recomputation_keeps_less_and_works_on_one_layer(recompute, saved, working):
    """What the last layers have kept is gone when the first ones are computed again."""
    result = run(one_group((1, 3), layers=4, recompute=recompute))
    peak = result.memory[0].by_category_bytes[Category.ACTIVATIONS]
    assert peak == saved + working


def peak_of_backward(layers, recomputed, at_once, bytes_of):
    """Layer by layer, from the last to the first; those that are recomputed are the first ones."""
    whole, saved, left = bytes_of
    held = [whole] * (layers - recomputed) + [saved] * (recomputed // at_once)
    peaks = [sum(held)]
    for at, each in enumerate(held):
        count = 1 if each == whole else at_once
        held[at] = count * whole
        peaks.append(sum(held))
        held[at] = count * left
    return max(*peaks, sum(held))


@given(
    others=st.integers(0, 5),
    groups=st.integers(0, 4),
    at_once=st.integers(1, 3),
    saved=st.integers(1, 999),
    left=st.integers(0, 1500),
)
def test_backwards_recompute_layer_by_layer(others, groups, at_once, saved, left):
    """Also where weight gradients come apart, for which each layer leaves something."""
    layers = max(1, others + groups * at_once)
    recompute = JobRecompute(mode="full", num_layers=groups * at_once, layers_at_once=at_once)
    memory = FakeMemory(saved={"none": 1000, "full": saved}, delayed=left)
    for splits in (False, True):
        plan = with_groups(one_group((1, 1), layers=layers), split_backward=splits)
        sizes = RankSizes(
            plan, costs_of(plan, memory=memory, recompute=recompute if groups else None)
        )
        bytes_of = sizes.micro_batch_bytes(0, 0, 0)
        expected = peak_of_backward(
            layers, groups * at_once, at_once, (1000, saved, left if splits else 0)
        )
        assert max(bytes_of.saved, bytes_of.delayed) + bytes_of.working == expected


def test_buffers_of_a_first_stage():
    """Outputs of 10 bytes take 2 s to send at f = 1: four forwards, then backwards.

    A gradient is received from the start of the second computation before its backward on. What was
    sent is given back when six computations have ended since, or before NORM.
    """
    memory, comm = FakeMemory(layer_count=0, boundary=10), FakeComm(bytes_per_s=5.0)
    buffers = buffers_over_time(run(even_plan(4, 1, 4), memory=memory, comm=comm))
    assert buffers[0.0] == 10  # output of F0, whose send starts at 1 s
    assert buffers[1.0] == 20
    assert buffers[2.0] == 40  # F2's output, and the receive of the first gradient
    assert buffers[3.0] == 60  # F3's output, the receive of the second gradient
    assert buffers[34.0] == 40  # B3 has started, the seventh computation after F0's send
    assert buffers[41.0] == 0


def buffers_over_time(result) -> dict[float, int]:
    over_time = result.memory_over_time(0)
    return {step.time_s: step.by_category_bytes[Category.BUFFERS] for step in over_time}


def test_a_batch_in_pieces_is_copied():
    """A micro-batch of 2 samples to replicas of 1 sample each: the output, and a copy of each."""
    one = even_plan(2, 1, 1, size=2)
    two = even_plan(2, 2, 1, size=1)
    third = dataclasses.replace(two.groups[1].replicas[0], ranks=(1,))
    fourth = dataclasses.replace(two.groups[1].replicas[1], ranks=(2,))
    group = dataclasses.replace(one.groups[1], replicas=(third, fourth))
    plan = dataclasses.replace(one, groups=(one.groups[0], group))
    memory = FakeMemory(layer_count=0, boundary=10)
    comm = FakeComm(bytes_per_s=1000.0)
    result = run(plan, memory=memory, comm=comm)
    # 20 of the output, 10 + 10 of the copies, and receives of both gradients are under way.
    assert result.memory[0].by_category_bytes[Category.BUFFERS] == 60


def test_offloaded_activations_leave_the_gpu():
    """Copies take 0.1 s: of eight micro-batches in flight at most three are on the GPU.

    While the last forward runs, the one before it leaves and the first one comes back.
    """
    plan = even_plan(8, 1, 8)
    with_offload = with_groups(plan, offload=Offload(activations=True))
    comm = FakeComm(host_bytes_per_s=10_000.0)
    saved = run(plan, comm=comm)
    offloaded = run(with_offload, comm=comm)
    assert offloaded.iteration_s == saved.iteration_s
    assert saved.memory[0].by_category_bytes[Category.ACTIVATIONS] == 8000
    assert offloaded.memory[0].by_category_bytes[Category.ACTIVATIONS] == 3000
    # The last stage runs each backward right after its forward, so nothing is copied.
    assert offloaded.memory[7] == saved.memory[7]


def test_slow_copies_are_waited_for():
    """The first of four stages, four micro-batches; each copy takes 10 s.

    After the second forward the rank waits until the first one's has left, at 11 s, and so on: the
    last forward begins at 21 s, and with it the first copy back. What that forward keeps stays.
    """
    plan = even_plan(4, 1, 4)
    first = dataclasses.replace(plan.groups[0], offload=Offload(activations=True))
    plan = dataclasses.replace(plan, groups=(first, *plan.groups[1:]))
    result = run(plan, comm=FakeComm(host_bytes_per_s=100.0))
    ends = {span.action: span.end_s for span in result.spans(0)}
    assert [ends[f"0B{n}"] for n in range(4)] == [31 + 2, 41 + 2, 51 + 2, 53 + 2]


def test_logits_gradients_and_what_comes_back_are_there_at_once():
    """One rank, two chunks, two micro-batches. With the last chunk's last backward the activations
    of the first chunk begin to come back, while there are logits and gradients already.
    """
    chunks = (Chunk(group=0, layers=(0, 1)), Chunk(group=0, layers=(1, 2)))
    plan = dataclasses.replace(
        one_group((1, 2), layers=2, offload=Offload(activations=True)),
        chunks=chunks,
        schedule=Schedule(name="breadth_first"),
    )
    memory = FakeMemory(layer_count=10, head=10_000)
    result = run(plan, memory=memory, comm=FakeComm(host_bytes_per_s=1e6))
    at_peak = result.memory[0].at_peak_bytes
    assert at_peak[Category.LOGITS] == 10_000
    assert at_peak[Category.GRADIENTS] == 4 * 10
    assert at_peak[Category.ACTIVATIONS] == 2 * 1000


def test_activations_come_back_before_parameters_that_are_asked_for_later():
    """A FETCH in the list between two backwards is asked for after the second one's activations,
    which the first backward has asked for as it began.
    """
    plan = dataclasses.replace(
        one_group((1, 4), layers=3, offload=Offload(activations=True, parameters=True)),
        chunks=tuple(Chunk(group=0, layers=(first, first + 1)) for first in range(3)),
        schedule=Schedule(name="breadth_first", parameters={"parameters": "per_micro_batch"}),
    )
    result = run(plan, comm=FakeComm(host_bytes_per_s=1e3))
    track, start_s = result.timeline.program.tracks[0], result.timeline.times.start_s
    fetches = {
        at: start_s[track.tasks[at]]
        for at, action in enumerate(track.actions)
        if action.kind is Kind.FETCH
    }
    pairs = [
        (start_s[track.copies[back]], fetches[position])
        for at, back in track.brings.items()
        for position in range(at + 1, back)
        if position in fetches
    ]
    assert pairs and all(activations_s < fetch_s for activations_s, fetch_s in pairs)


def test_what_would_come_back_at_once_stays():
    """Three micro-batches in flight: nothing would be computed while one is neither leaving nor
    coming."""
    plan = even_plan(3, 1, 3)
    slow = FakeComm(host_bytes_per_s=100.0)
    away = run(with_groups(plan, offload=Offload(activations=True)), comm=slow)
    here = run(plan, comm=slow)
    assert away.iteration_s == here.iteration_s
    assert away.memory == here.memory


def test_offloaded_state_passes_through_the_gpu_in_the_step():
    plan = one_group((1, 1), offload=Offload(optimizer_state=True))
    result = run(plan, comm=FakeComm(host_bytes_per_s=64.0))
    state = result.memory[0].by_category_bytes[Category.OPTIMIZER_STATE]
    assert state == 12 * 640
    assert result.iteration_s == 3 + 2 * 12 * 640 / 64  # there, and back
    held = [s.by_category_bytes[Category.OPTIMIZER_STATE] for s in result.memory_over_time(0)]
    assert held[-1] == 0


@pytest.mark.parametrize("num_pieces", [1, 2, 5, 10])
def test_pieces_of_offloaded_state_come_while_others_are_stepped(monkeypatch, num_pieces):
    """A piece takes c seconds each way and s to be stepped: in all n s + (n + 1) c.

    The first one comes; from then on the next one comes while one is stepped and leaves.
    """
    monkeypatch.setattr(shards, "STATE_PIECE_ELEMENTS", 640 // num_pieces)
    plan = one_group((1, 1), offload=Offload(optimizer_state=True))
    compute = FakeCompute(step_per_parameter_s=0.01)
    result = run(plan, compute=compute, comm=FakeComm(host_bytes_per_s=64.0))
    copy_s = 12 * 640 / 64 / num_pieces
    assert result.iteration_s == pytest.approx(3 + 6.4 + (num_pieces + 1) * copy_s)


@pytest.mark.parametrize(("fraction", "kept"), [(0.01, 9), (0.35, 6), (0.5, 5), (1.0, 0)])
def test_what_stays_of_the_state_is_not_moved(monkeypatch, fraction, kept):
    """The first pieces, as long as fewer than the fraction are left."""
    monkeypatch.setattr(shards, "STATE_PIECE_ELEMENTS", 64)
    offload = Offload(optimizer_state=True, optimizer_state_fraction=fraction)
    result = run(one_group((1, 1), offload=offload), comm=FakeComm(host_bytes_per_s=64.0))
    assert result.iteration_s == pytest.approx(3 + (10 - kept + 1) * 12)  # there, and back
    held = [s.by_category_bytes[Category.OPTIMIZER_STATE] for s in result.memory_over_time(0)]
    assert held[-1] == min(held) == kept * 12 * 64
    assert max(held) == min(10, kept + 2) * 12 * 64


class WithoutMain(FakeMemory):
    """Parameters are stepped themselves: their state is moments only."""

    def state_bytes(self, num_parameters):
        return 8 * num_parameters


@pytest.mark.parametrize(("fraction", "kept"), [(None, 0), (0.35, 6)])
def test_offloaded_state_is_that_of_the_type_that_its_group_computes_in(
    monkeypatch, fraction, kept
):
    monkeypatch.setattr(shards, "STATE_PIECE_ELEMENTS", 64)
    offload = Offload(optimizer_state=True, optimizer_state_fraction=fraction)
    plan = with_groups(one_group((1, 1)), offload=offload, compute_dtype="fp32")
    comm = FakeComm(host_bytes_per_s=64.0)
    fp32 = DtypeCosts(compute=FakeCompute(), memory=WithoutMain())
    result = run(plan, comm=comm, by_dtype={"fp32": fp32})
    assert result.iteration_s == pytest.approx(3 + (10 - kept + 1) * 8)
    held = [s.by_category_bytes[Category.OPTIMIZER_STATE] for s in result.memory_over_time(0)]
    assert (min(held), max(held)) == (kept * 8 * 64, (kept + 2) * 8 * 64)


class NarrowGradients(FakeMemory):
    """Gradients are accumulated in 16 bits."""

    def gradient_bytes(self, num_parameters):
        return 2 * num_parameters


@pytest.mark.parametrize(
    ("offload", "copied"),
    [({}, 8), ({"parameters": True}, 3), ({"gradients": True}, 3), ({"optimizer_state": True}, 1)],
)
def test_a_step_has_copies_in_fp32_of_gradients_in_16_bits(offload, copied, monkeypatch):
    """Of all 8 layers, of the largest chunk, or of a piece as large as a layer; none is released
    before the step, so these are the most but for the unsharded ones of the passes."""
    monkeypatch.setattr(shards, "STATE_PIECE_ELEMENTS", 256)
    plan = dataclasses.replace(
        one_group((1, 1), (1, 1), layers=8),
        chunks=tuple(Chunk(group=0, layers=each) for each in [(0, 2), (2, 3), (3, 6), (6, 8)]),
        schedule=Schedule(name="breadth_first"),
    )
    plan = with_groups(plan, offload=Offload(**offload))
    slow = FakeCompute(step_per_parameter_s=1.0)
    result = run(plan, memory=NarrowGradients(layer_count=512), compute=slow)
    stepped_s = max(span.end_s for span in result.spans(0) if span.action.endswith("STEP"))
    over_time = [each for each in result.memory_over_time(0) if each.time_s < stepped_s]
    steps = [each.by_category_bytes[Category.GRADIENTS] for each in over_time]
    owned = 512 // 2
    stays = 2 if offload.get("gradients") else 8
    passing = 2 * 5 * owned if offload.get("gradients") else 0
    assert max(steps) == 4 * copied * owned + 2 * stays * owned + passing


@pytest.mark.parametrize("parameters", [False, True])
def test_two_chunks_of_what_is_in_the_host_are_on_the_gpu_in_a_step(parameters):
    """Of the ones that have most: 3 and 2 of 8 layers. Each rank has its part of them."""
    layers, weights = [(0, 2), (2, 3), (3, 6), (6, 8)], (1.0, 3.0, 0.0)
    plan = dataclasses.replace(
        one_group((1, 1), (1, 1), (1, 1), weights=weights, layers=8),
        chunks=tuple(Chunk(group=0, layers=interval) for interval in layers),
        schedule=Schedule(name="breadth_first"),
    )
    plan = with_groups(plan, offload=Offload(optimizer_state=True, parameters=parameters))
    result = run(plan, memory=FakeMemory(layer_count=512))
    for rank, weight in enumerate(weights):
        owned = 512 * weight / sum(weights)
        stepping = max(
            result.memory_over_time(rank),
            key=lambda at: at.by_category_bytes[Category.OPTIMIZER_STATE],
        )
        held = stepping.by_category_bytes
        assert held[Category.OPTIMIZER_STATE] == 12 * 5 * owned
        assert held[Category.GRADIENTS] == 4 * 8 * owned
        assert held[Category.PARAMETERS] == 2 * (5 if parameters else 8) * owned


OPTIONS = {
    "recompute": st.sampled_from([None, Recompute(mode="selective"), Recompute(mode="full")]),
    "offload": st.sampled_from([None, Offload(activations=True, optimizer_state=True)]),
}


@st.composite
def priced_with_options(draw):
    plan, *costs = draw(priced())
    groups = tuple(
        dataclasses.replace(group, **{name: draw(value) for name, value in OPTIONS.items()})
        for group in plan.groups
    )
    return dataclasses.replace(plan, groups=groups), *costs


@pytest.mark.slow
@given(case=priced_with_options())
def test_an_iteration_gives_back_what_it_took(case):
    result = run_case(case)
    for rank in range(case[0].world_size):
        steps = result.memory_over_time(rank)
        assert steps[-1].by_category_bytes == steps[0].by_category_bytes
        assert all(min(step.by_category_bytes) >= 0 for step in steps)


@pytest.mark.slow
@given(case=priced())
@settings(max_examples=examples(50))
def test_activations_are_those_between_forward_and_backward(case):
    """The number in flight is counted from the spans alone."""
    plan, _, _, memory, _ = case
    result = run_case(case)
    sizes = RankSizes(plan, costs_of(plan, memory=memory))
    for rank, actions in enumerate(lower_plan(plan).ranks):
        starts, ends = [], []
        for action, span in zip(from_norm(actions), result.spans(rank), strict=True):
            if action.kind not in (Kind.FORWARD, Kind.BACKWARD):
                continue
            saved = sizes.micro_batch_bytes(rank, action.chunk, action.micro_batch).saved
            if action.kind is Kind.FORWARD:
                starts.append((span.start_s + span.waited_s, saved))
            else:
                ends.append((span.end_s, saved))
        most = max(
            (
                sum(b for s, b in starts if s <= t) - sum(b for e, b in ends if e <= t)
                for t, _ in starts
            ),
            default=0,
        )
        assert result.memory[rank].by_category_bytes[Category.ACTIVATIONS] == most


def test_a_reduction_in_16_bits_holds_its_messages_while_it_reduces():
    """Of 640 parameters rank 0 owns 384: it sends 256 and gets 384 of each of two others."""
    plan = one_group((1, 1), (1, 1), (1, 0), weights=[3.0, 2.0, 0.0], grad_reduce_dtype="fp16")
    result = run(plan, comm=FakeComm(bytes_per_s=1.0))
    for rank, elements in enumerate((256 + 2 * 384, 384 + 2 * 256, 640)):
        buffers = result.memory[rank].by_category_bytes[Category.BUFFERS]
        assert buffers == 2 * elements


# Parameters that come and go.

MINISTAGES = (
    "rank {r}: 0UNSHARD 1UNSHARD 0F0 0RESHARD 1F0 1B0 1RESHARD 1REDUCE_GRAD 0UNSHARD 0B0 0RESHARD "
    "0REDUCE_GRAD "
    "SCALE 0STEP 1STEP"
)


def ministage_plan():
    """Two ranks in one group that holds two chunks of one layer."""
    return dataclasses.replace(
        one_group((1, 1), (1, 1)),
        model=ModelFingerprint(num_layers=2),
        chunks=(Chunk(group=0, layers=(0, 1)), Chunk(group=0, layers=(1, 2))),
    )


def ministage_lists():
    return parse_action_lists("\n".join(MINISTAGES.format(r=rank) for rank in (0, 1)))


def works(result, rank):
    """Action -> start and end of its work; of actions that come twice, the last."""
    return {s.action: (s.start_s + s.waited_s, s.end_s) for s in result.spans(rank)}


def test_gathers_and_reductions_overlap_with_computation():
    # A gather of 1280 bytes over two ranks crosses 640, a reduction of 2560 crosses 1280.
    result = run(ministage_plan(), lists=ministage_lists(), comm=FakeComm(bytes_per_s=1280.0))
    for rank in (0, 1):
        work = works(result, rank)
        assert work["1UNSHARD"] == (0.5, 1.0)  # after 0UNSHARD, while 0F0 waits for that one only
        assert work["0F0"] == (0.5, 1.5)
        assert work["1F0"] == (1.5, 2.5)
        assert work["1B0"] == (2.5, 4.5)
        assert work["1REDUCE_GRAD"] == (4.5, 5.5)
        assert work["0UNSHARD"] == (5.5, 6.0)  # one collective of a rank at a time
        assert work["0B0"] == (6.0, 8.0)
        assert work["0REDUCE_GRAD"] == (8.0, 9.0)
        assert work["1STEP"] == (9.0, 9.0)
    assert result.iteration_s == 9.0
    assert result.usage[0].communication_s == pytest.approx(0.5 + 1.5 + 1.0)


def test_released_chunks_have_their_parameters_and_gradients_while_in_use():
    result = run(ministage_plan(), lists=ministage_lists(), comm=FakeComm(bytes_per_s=1280.0))
    taken = {step.time_s: step.by_category_bytes for step in result.memory_over_time(0)}
    parameters = {at: by[Category.PARAMETERS] for at, by in taken.items()}
    gradients = {at: by[Category.GRADIENTS] for at, by in taken.items()}
    unsharded, shard = 2 * 640, 2 * 320
    assert parameters[0.0] == 2 * unsharded  # both gathers are issued at once
    assert parameters[1.5] == shard + unsharded  # 0RESHARD
    assert parameters[4.5] == unsharded + shard  # 1RESHARD, and 0UNSHARD is issued
    assert parameters[8.0] == 2 * shard
    assert gradients[0.0] == 0
    assert gradients[2.5] == 4 * 640  # 1B0
    assert gradients[6.0] == 4 * 640 + 4 * 640  # 0B0
    assert (
        gradients[8.0] == 4 * 320 + 4 * 640
    )  # 0REDUCE_GRAD waits for 1REDUCE_GRAD, which leaves the shard
    assert gradients[9.0] == 0  # after STEP
    assert result.memory[0].by_category_bytes[Category.OPTIMIZER_STATE] == 12 * 640


def fetching_plan(**offload):
    return one_group((1, 1), (1, 0), offload=Offload(**offload))


FETCHING = parse_action_lists(
    "\n".join(
        f"rank {rank}: 0FETCH 0UNSHARD {words} 0REDUCE_GRAD 0RESHARD 0OFFLOAD SCALE 0STEP"
        for rank, words in enumerate(("0F0 0B0", ""))
    )
)
SHARD = 2 * 320


def test_a_shard_is_fetched_and_then_gathered():
    result = run(
        fetching_plan(parameters=True),
        lists=FETCHING,
        comm=FakeComm(host_bytes_per_s=SHARD / 2, bytes_per_s=SHARD),
    )
    work = works(result, 0)
    assert work["0FETCH"] == (0.0, 2.0)
    assert work["0UNSHARD"] == (2.0, 3.0)
    assert work["0F0"] == (3.0, 4.0)
    # The host's copy is still good, so the shard is dropped and nothing is copied; for the step
    # it comes, and leaves as the new one.
    assert work["0OFFLOAD"] == (6.0, 6.0)
    assert work["0STEP"] == (8.0, 12.0)
    parameters = [
        (step.time_s, step.by_category_bytes[Category.PARAMETERS])
        for step in result.memory_over_time(0)
    ]
    assert dict(parameters)[0.0] == 2 * SHARD  # the gather's result is taken at once
    assert parameters[-1][1] == 0


def test_parameters_that_are_only_dropped_do_not_queue_behind_copies():
    """0F0's activations are on their way to the host from 6 s until 6 + 1000 / 256 s.

    After 0F1 the rank waits for them, after 0F2 for those of 0F1; 0F2's own leave from then on.
    """
    words = (
        "0FETCH 0F0 0F1 0F2 0OFFLOAD 0FETCH 0F3 0B0 0B1 0B2 0B3 0REDUCE_GRAD SCALE 0STEP 0OFFLOAD"
    )
    plan = one_group((1, 4), offload=Offload(parameters=True, activations=True))
    comm = FakeComm(host_bytes_per_s=1280 / 5)
    result = run(plan, lists=parse_action_lists(f"rank 0: {words}"), comm=comm)
    ends = {span.action: span.end_s for span in reversed(result.spans(0))}
    away_s = 1000 / 256
    assert (ends["0F2"], ends["0OFFLOAD"]) == (6 + away_s + 1, 6 + 2 * away_s)


def test_what_a_step_has_changed_is_copied_to_the_host():
    lists = parse_action_lists("rank 0: 0FETCH 0F0 0B0 0REDUCE_GRAD SCALE 0STEP 0OFFLOAD")
    plan = one_group((1, 1), offload=Offload(parameters=True))
    result = run(plan, lists=lists, comm=FakeComm(host_bytes_per_s=1280 / 5))
    work = works(result, 0)
    assert work["0F0"] == (5.0, 6.0)
    assert work["0STEP"] == (8.0, 8.0)
    assert work["0OFFLOAD"] == (8.0, 13.0)


def test_offloaded_state_is_not_fetched():
    """It passes through the GPU during STEP, as do the parameters: there, and back."""
    plan = fetching_plan(parameters=True, optimizer_state=True)
    result = run(plan, lists=FETCHING, comm=FakeComm(host_bytes_per_s=SHARD))
    start_s, end_s = works(result, 0)["0STEP"]
    assert end_s - start_s == 2 * (1 + 12 * 320 / SHARD)
    state = result.memory[0].by_category_bytes[Category.OPTIMIZER_STATE]
    assert state == 12 * 320


def test_a_chunk_of_the_same_group_takes_what_is_there():
    """What chunk 0 leaves is kept until chunk 1 takes it, like a message that has arrived."""
    plan = dataclasses.replace(
        one_group((1, 2)),
        model=ModelFingerprint(num_layers=2),
        chunks=(Chunk(group=0, layers=(0, 1)), Chunk(group=0, layers=(1, 2))),
    )
    lists = parse_action_lists(
        "rank 0: 0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1 0REDUCE_GRAD 1REDUCE_GRAD 0STEP 1STEP"
    )
    result = run(plan, lists=lists, memory=FakeMemory(boundary=10))
    buffers = {
        step.time_s: step.by_category_bytes[Category.BUFFERS] for step in result.memory_over_time(0)
    }
    assert buffers == {
        0.0: 10,  # 0F0's output
        1.0: 20,
        2.0: 10,  # 1F0 has taken the first one: it is an activation now
        3.0: 20,  # 1B0's gradient
        5.0: 10,
        6.0: 20,
        8.0: 20,  # a gradient is given back after the backward that takes it
        10.0: 10,
        12.0: 0,
    }


@pytest.mark.parametrize(
    ("offload", "words", "message"),
    [
        (None, "0UNSHARD 0F0 0B0 0RESHARD 0F1 0B1", "runs 0F1, but .* released"),
        (None, "0FETCH 0F0 0B0 0F1 0B1", "does not name them"),
        (Offload(optimizer_state=True), "0FETCH 0F0 0B0 0F1 0B1", "does not name them"),
        (Offload(parameters=True), "0F0 0B0 0F1 0B1 0OFFLOAD", "0F0, but .* in host memory"),
        (Offload(parameters=True), "0FETCH 0F0 0B0 0OFFLOAD 0UNSHARD", "in host memory"),
        (None, "1RESHARD", "not a chunk of its group"),
    ],
)
def test_what_is_not_there_cannot_be_used(offload, words, message):
    plan = one_group((1, 2), offload=offload)
    with pytest.raises(SimulationError, match=message):
        run(plan, lists=parse_action_lists(f"rank 0: {words}"), memory=FakeMemory())
