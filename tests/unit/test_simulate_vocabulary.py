"""Actions on parameters: ministages that are gathered and released, and offload."""

import dataclasses

import pytest

from tests.unit.fake_costs import FakeComm, FakeMemory
from tests.unit.simulation import run
from tests.unit.test_simulate_times import one_group
from zorse_megatron.plan.plan import Chunk, ModelFingerprint, Offload
from zorse_megatron.schedule.actions import parse_action_lists
from zorse_megatron.simulate.assumptions import SimulationError
from zorse_megatron.simulate.memory_ledger import Category

MINISTAGES = (
    "rank {r}: 0GATHER 1GATHER 0F0 0RELEASE 1F0 1B0 1RELEASE 1REDUCE 0GATHER 0B0 0RELEASE 0REDUCE "
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
        assert work["1GATHER"] == (0.5, 1.0)  # after 0GATHER, while 0F0 waits for that one only
        assert work["0F0"] == (0.5, 1.5)
        assert work["1F0"] == (1.5, 2.5)
        assert work["1B0"] == (2.5, 4.5)
        assert work["1REDUCE"] == (4.5, 5.5)
        assert work["0GATHER"] == (5.5, 6.0)  # one collective of a rank at a time
        assert work["0B0"] == (6.0, 8.0)
        assert work["0REDUCE"] == (8.0, 9.0)
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
    assert parameters[1.5] == shard + unsharded  # 0RELEASE
    assert parameters[4.5] == unsharded + shard  # 1RELEASE, and 0GATHER is issued
    assert parameters[8.0] == 2 * shard
    assert gradients[0.0] == 0
    assert gradients[2.5] == 4 * 640  # 1B0
    assert gradients[6.0] == 4 * 640 + 4 * 640  # 0B0
    assert gradients[8.0] == 4 * 320 + 4 * 640  # 0REDUCE waits for 1REDUCE, which leaves the shard
    assert gradients[9.0] == 0  # after STEP
    assert result.memory[0].by_category[Category.OPTIMIZER_STATE].num_bytes == 12 * 640


def fetching_plan(**offload):
    return one_group((1, 1), (1, 0), offload=Offload(**offload))


FETCHING = parse_action_lists(
    "\n".join(
        f"rank {rank}: 0FETCH 0GATHER {words} 0REDUCE 0RELEASE 0OFFLOAD SCALE 0STEP"
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
    assert work["0GATHER"] == (2.0, 3.0)
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
    words = "0FETCH 0F0 0F1 0F2 0OFFLOAD 0FETCH 0F3 0B0 0B1 0B2 0B3 0REDUCE SCALE 0STEP 0OFFLOAD"
    plan = one_group((1, 4), offload=Offload(parameters=True, activations=True))
    comm = FakeComm(host_bytes_per_s=1280 / 5)
    result = run(plan, lists=parse_action_lists(f"rank 0: {words}"), comm=comm)
    ends = {span.action: span.end_s for span in reversed(result.spans(0))}
    away_s = 1000 / 256
    assert (ends["0F2"], ends["0OFFLOAD"]) == (6 + away_s + 1, 6 + 2 * away_s)


def test_what_a_step_has_changed_is_copied_to_the_host():
    lists = parse_action_lists("rank 0: 0FETCH 0F0 0B0 0REDUCE SCALE 0STEP 0OFFLOAD")
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
    state = result.memory[0].by_category[Category.OPTIMIZER_STATE]
    assert (state.num_bytes, state.action) == (12 * 320, "0STEP")


def test_a_chunk_of_the_same_group_takes_what_is_there():
    """What chunk 0 leaves is kept until chunk 1 takes it, like a message that has arrived."""
    plan = dataclasses.replace(
        one_group((1, 2)),
        model=ModelFingerprint(num_layers=2),
        chunks=(Chunk(group=0, layers=(0, 1)), Chunk(group=0, layers=(1, 2))),
    )
    lists = parse_action_lists(
        "rank 0: 0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1 0REDUCE 1REDUCE 0STEP 1STEP"
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
        (None, "0GATHER 0F0 0B0 0RELEASE 0F1 0B1", "runs 0F1, but .* released"),
        (None, "0FETCH 0F0 0B0 0F1 0B1", "does not name them"),
        (Offload(optimizer_state=True), "0FETCH 0F0 0B0 0F1 0B1", "does not name them"),
        (Offload(parameters=True), "0F0 0B0 0F1 0B1 0OFFLOAD", "0F0, but .* in host memory"),
        (Offload(parameters=True), "0FETCH 0F0 0B0 0OFFLOAD 0GATHER", "in host memory"),
        (None, "1RELEASE", "not a chunk of its group"),
    ],
)
def test_what_is_not_there_cannot_be_used(offload, words, message):
    plan = one_group((1, 2), offload=offload)
    with pytest.raises(SimulationError, match=message):
        run(plan, lists=parse_action_lists(f"rank 0: {words}"), memory=FakeMemory())
