"""Gradients in host memory: which leave, when, and what that takes, against closed forms."""

import dataclasses

import pytest

from tests.unit.fake_costs import FakeComm, FakeCompute, FakeMemory
from tests.unit.made_plans import one_group, with_groups
from tests.unit.simulation import run
from zorse_megatron.costs.process_memory import pinned_bytes
from zorse_megatron.plan.plan import Chunk, Offload, Schedule
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.simulate.memory_ledger import Category
from zorse_megatron.simulate.result import host_bytes

SHARD_BYTES = 4 * 640
HOST_BYTES_PER_S = float(SHARD_BYTES)


def four_chunks(**offload):
    plan = dataclasses.replace(
        one_group((1, 2), layers=4),
        chunks=tuple(Chunk(group=0, layers=(at, at + 1)) for at in range(4)),
        schedule=Schedule(name="breadth_first"),
    )
    return with_groups(plan, offload=Offload(**offload))


@pytest.mark.parametrize(
    ("tied", "expected"),
    [
        (
            False,
            "3REDUCE_GRAD 3OFFLOAD_GRAD 2REDUCE_GRAD 2OFFLOAD_GRAD 1REDUCE_GRAD 1OFFLOAD_GRAD "
            "0REDUCE_GRAD TIE SCALE "
            "0STEP 1STEP 2STEP 3STEP",
        ),
        (
            True,
            "3REDUCE_GRAD 2REDUCE_GRAD 2OFFLOAD_GRAD 1REDUCE_GRAD 1OFFLOAD_GRAD 0REDUCE_GRAD TIE "
            "SCALE 0STEP 1STEP 2STEP 3STEP",
        ),
    ],
)
def test_all_but_the_last_and_the_tied_ones_leave(tied, expected):
    (actions,) = lower_plan(four_chunks(gradients=True), tied=tied).ranks
    shown = {Kind.REDUCE_GRAD, Kind.OFFLOAD_GRAD, Kind.TIE, Kind.SCALE, Kind.STEP}
    words = " ".join(str(action) for action in actions if action.kind in shown)
    assert words == (expected if tied else expected.replace(" TIE", ""))


def test_what_it_takes():
    """A copy takes 1 s. Those of chunks 3 and 2 are hidden behind longer backwards, that of chunk 1
    is not; then three come back for their norm, and once more for the update."""
    compute, comm = FakeCompute(), FakeComm(host_bytes_per_s=HOST_BYTES_PER_S)
    on_gpu, in_host = (
        run(four_chunks(gradients=each), compute=compute, comm=comm) for each in (False, True)
    )
    assert in_host.iteration_s - on_gpu.iteration_s == pytest.approx(1 + 3 + 3)


def test_what_it_holds():
    """When chunk 0 is reduced, the shard of chunk 1 leaves and the unsharded gradients of chunk 0
    are there; in the step the shard of chunk 0, and two that pass."""
    comm = FakeComm(host_bytes_per_s=HOST_BYTES_PER_S)
    result = run(four_chunks(gradients=True), comm=comm)
    assert host_bytes(result, 0) == {"gradients": 3 * pinned_bytes(SHARD_BYTES)}
    peak = result.memory[0].by_category_bytes[Category.GRADIENTS]
    assert peak == 3 * SHARD_BYTES
    kept = run(four_chunks(), comm=comm).memory[0].by_category_bytes[Category.GRADIENTS]
    assert kept == 4 * SHARD_BYTES
    assert FakeMemory().layer_parameters() * 4 == SHARD_BYTES
