"""Breadth-first ministages: order, what is unsharded when, and how often it is gathered."""

import dataclasses
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.strategies import lowerable_plans, plans, without_halves
from tests.unit.fake_costs import FakeComm, FakeMemory
from tests.unit.made_plans import dealt_out, even_plan, ministages, with_owners
from tests.unit.simulation import run
from zorse_megatron.plan.plan import Offload, Plan, Schedule
from zorse_megatron.schedule.actions import COMPUTE, TRANSFERS, Action, Kind
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.pipeline_schedules import (
    PER_MICRO_BATCH,
    PER_PASS,
    RESIDENT,
    parameters_setting,
)
from zorse_megatron.simulate.memory_ledger import Category

breadth_first_plans = lowerable_plans(schedule_names=("breadth_first",))


def words(actions: tuple[Action, ...], *, transfers: bool = False) -> str:
    return " ".join(str(a) for a in actions if transfers or a.kind not in TRANSFERS)


def test_one_group_is_layered_accumulation() -> None:
    """Cephalo: all micro-batches of a layer, then the next layer; one gather, one reduction."""
    (actions,) = lower_plan(ministages(1, 1, 2, 4)).ranks
    assert words(actions, transfers=True) == (
        "0UNSHARD 1UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 1F0 1F1 1RESHARD 3UNSHARD 2F0 2F1 "
        "3F0 3B0 3F1 3B1 3REDUCE_GRAD 3RESHARD 1UNSHARD 2B0 2B1 "
        "2REDUCE_GRAD 2RESHARD 0UNSHARD 1B0 1B1 1REDUCE_GRAD 1RESHARD 0B0 0B1 0REDUCE_GRAD "
        "0RESHARD "
        "SCALE NORM 0STEP 1STEP 2STEP 3STEP"
    )


def test_the_list_in_the_docs_is_current() -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    assert f"```\n{lower_plan(ministages(1, 1, 2, 3))}\n```" in text


def test_resident_parameters_are_gathered_after_the_step() -> None:
    plan = ministages(2, 1, 1, 2, parameters=RESIDENT)
    first, _ = lower_plan(plan).ranks
    assert words(first) == (
        "0F0 2F0 2B0 2REDUCE_GRAD 0B0 0REDUCE_GRAD SCALE NORM 0STEP 0UNSHARD 2STEP 2UNSHARD"
    )
    assert words(lower_plan(plan, forward_only=True).ranks[0]) == "0F0 2F0"


def test_gathered_for_each_micro_batch() -> None:
    (actions,) = lower_plan(ministages(1, 1, 2, 2, parameters=PER_MICRO_BATCH)).ranks
    assert words(actions) == (
        "0UNSHARD 0F0 0RESHARD 0UNSHARD 1UNSHARD 0F1 0RESHARD 1F0 1B0 1RESHARD 1UNSHARD 0UNSHARD "
        "1F1 1B1 1REDUCE_GRAD 1RESHARD 0B0 0RESHARD 0UNSHARD 0B1 0REDUCE_GRAD 0RESHARD SCALE NORM "
        "0STEP 1STEP"
    )


def test_offloaded_shards_are_fetched_one_chunk_ahead_of_the_gather() -> None:
    plan = ministages(1, 1, 1, 5)
    groups = (dataclasses.replace(plan.groups[0], offload=Offload(parameters=True)),)
    (actions,) = lower_plan(dataclasses.replace(plan, groups=groups)).ranks
    assert words(actions) == (
        "0FETCH 0UNSHARD 1FETCH 1UNSHARD 2FETCH 0F0 0RESHARD 0OFFLOAD 2UNSHARD 3FETCH "
        "1F0 1RESHARD 1OFFLOAD 3UNSHARD 4FETCH 2F0 2RESHARD 2OFFLOAD 4UNSHARD 3F0 2FETCH 4F0 4B0 "
        "4REDUCE_GRAD 4RESHARD 4OFFLOAD 2UNSHARD 1FETCH 3B0 3REDUCE_GRAD 3RESHARD 3OFFLOAD "
        "1UNSHARD 0FETCH "
        "2B0 2REDUCE_GRAD 2RESHARD 2OFFLOAD 0UNSHARD 1B0 1REDUCE_GRAD 1RESHARD 1OFFLOAD "
        "0B0 0REDUCE_GRAD 0RESHARD 0OFFLOAD SCALE NORM 0STEP 1STEP 2STEP 3STEP 4STEP"
    )


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(200))
@given(plan=breadth_first_plans, forward_only=st.booleans())
def test_what_is_done_chunk_after_chunk(plan: Plan, forward_only: bool) -> None:
    """All micro-batches of a chunk, then the next chunk; what is computed is unsharded, at most two
    chunks are; gathers and reductions as the closed form has them, each reduction after its chunk's
    last backward and before the next chunk's first."""
    is_resident = parameters_setting(plan) == RESIDENT
    for rank, actions in enumerate(lower_plan(plan, forward_only=forward_only).ranks):
        computed = [str(action) for action in actions if action.kind in COMPUTE]
        assert computed == order_of_chunks(plan, rank, forward_only=forward_only)
        unsharded: set[int | None] = set()
        chunks = plan.chunks_of_group(plan.group_of_rank(rank))
        to_reduce = [] if forward_only else list(reversed(chunks))
        gathers: Counter[int] = Counter()
        for action in actions:
            if action.kind is Kind.UNSHARD:
                gathers[action.chunk or 0] += 1
                assert is_resident or action.chunk not in unsharded
                unsharded.add(action.chunk)
            elif action.kind is Kind.RESHARD:
                unsharded.remove(action.chunk)
            elif action.kind in COMPUTE:
                assert is_resident or action.chunk in unsharded
                assert action.kind is Kind.FORWARD or action.chunk == to_reduce[0]
            elif action.kind is Kind.REDUCE_GRAD:
                assert action.chunk == to_reduce.pop(0)
            assert is_resident or len(unsharded) <= 2
        assert not to_reduce and (is_resident or not unsharded)
        assert gathers == expected_gathers(
            plan, plan.group_of_rank(rank), forward_only=forward_only
        )


def order_of_chunks(plan: Plan, rank: int, *, forward_only: bool) -> list[str]:
    """Forwards of all chunks; the last chunk of all by turns; backwards of all others."""
    group, replica = plan.replica_of_rank(rank)
    count = plan.groups[group].replicas[replica].num_microbatches
    chunks, last = plan.chunks_of_group(group), len(plan.chunks) - 1
    if forward_only:
        return [f"{chunk}F{m}" for chunk in chunks for m in range(count)]
    order = [f"{chunk}F{m}" for chunk in chunks if chunk < last for m in range(count)]
    if last in chunks:
        order += [f"{last}{kind}{m}" for m in range(count) for kind in "FB"]
    return order + [f"{c}B{m}" for c in reversed(chunks) if c < last for m in range(count)]


def expected_gathers(plan: Plan, group: int, *, forward_only: bool) -> Counter[int]:
    """Closed forms: see docs/how-it-works.md."""
    chunks = plan.chunks_of_group(group)
    last = len(plan.chunks) - 1
    match parameters_setting(plan):
        case "resident":
            return Counter(() if forward_only else chunks)
        case "per_pass":
            once = chunks if forward_only else chunks[-2:]
            return Counter({chunk: 1 if chunk in once else 2 for chunk in chunks})
    most = max(replica.num_microbatches for replica in plan.groups[group].replicas)
    gathers = Counter(
        {chunk: most if forward_only or chunk == last else 2 * most for chunk in chunks}
    )
    if most == 1 and last in chunks and len(chunks) > 1 and not forward_only:
        gathers[chunks[-2]] -= 1  # the turn is one computation: there is no time to drop it
    return gathers


@pytest.mark.slow
@settings(deadline=None)
@given(plan=plans().map(without_halves))
def test_one_chunk_per_group_does_what_1f1b_does(plan: Plan) -> None:
    resident = Schedule(name="breadth_first", parameters={"parameters": RESIDENT})
    always_unsharded = lower_plan(dataclasses.replace(plan, schedule=resident))
    per_pass = lower_plan(dataclasses.replace(plan, schedule=Schedule(name="breadth_first")))
    for one, other, released in zip(
        lower_plan(plan).ranks, always_unsharded.ranks, per_pass.ranks, strict=True
    ):
        assert Counter(one) == Counter(other)
        more = Counter(released) - Counter(one)
        assert {a.kind for a in more} == {Kind.RESHARD}
        assert not Counter(one) - Counter(released)


LAYER = 64 * 24


def peaks(plan: Plan, rank: int, **costs: float) -> dict[Category, int]:
    comm = FakeComm(**costs)
    result = run(plan, memory=FakeMemory(layer_count=LAYER), comm=comm)
    return result.memory[rank].by_category_bytes


@pytest.mark.parametrize("num_chunks", range(1, 9))
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_memory_of_equal_chunks(num_chunks: int, replicas: int) -> None:
    """Two unsharded chunks and shards of the others: about 2 / c of a stage (Zorse, table 1)."""
    plan = ministages(2, replicas, 3, num_chunks)
    unsharded, others = min(2, num_chunks), max(0, num_chunks - 2)
    # Reductions are slow, so that the gradients of two chunks are there at a time.
    found = peaks(plan, 0, bytes_per_s=3000.0)
    assert found[Category.PARAMETERS] == 2 * (LAYER * unsharded + LAYER // replicas * others)
    gradients = 4 * (LAYER * unsharded + LAYER // replicas * others)
    if replicas > 1:
        assert found[Category.GRADIENTS] == gradients
    resident = peaks(dealt_out(plan, num_chunks, parameters=RESIDENT), 0)
    assert resident[Category.PARAMETERS] == 2 * LAYER * num_chunks
    assert resident[Category.GRADIENTS] == 4 * LAYER * num_chunks


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(150))
@given(
    plan=lowerable_plans(schedule_names=("breadth_first",)),
    bytes_per_s=st.sampled_from([float("inf"), 3000.0, 100.0]),
)
def test_memory_of_unequal_chunks(plan: Plan, bytes_per_s: float) -> None:
    """Parameters: the closed form; gradients: never more than theirs, whatever overlaps."""
    if parameters_setting(plan) != PER_PASS:
        return
    memory = FakeMemory(layer_count=LAYER, embedding_count=640, head_count=320)
    result = run(plan, memory=memory, comm=FakeComm(bytes_per_s=bytes_per_s, host_bytes_per_s=1e9))
    sizes = result.timeline.sizes
    for rank in range(plan.world_size):
        chunks = plan.chunks_of_group(plan.group_of_rank(rank))
        pairs = list(pairwise(chunks)) or [chunks]
        if not sizes.settings[rank].offload.parameters:
            highest = max(_bytes(sizes, rank, chunks, pair) for pair in pairs)
            peak = result.memory[rank].by_category_bytes[Category.PARAMETERS]
            assert peak == 2 * highest
        # Backwards come from the last chunk: after a pair only shards are left.
        most = max(_bytes(sizes, rank, [c for c in chunks if c >= pair[0]], pair) for pair in pairs)
        gradients = result.memory[rank].by_category_bytes[Category.GRADIENTS]
        assert gradients <= 4 * most


def _bytes(sizes, rank: int, chunks, unsharded) -> int:
    """Numbers of some unsharded chunks, and of the shards of the others."""
    return sum(sizes.parameters[c] if c in unsharded else sizes.shards[c][rank] for c in chunks)


def test_offloaded_shards_leave_two_unsharded_chunks() -> None:
    plan = ministages(1, 4, 2, 8)
    groups = (dataclasses.replace(plan.groups[0], offload=Offload(parameters=True)),)
    found = peaks(dataclasses.replace(plan, groups=groups), 0)
    # And one shard that has been fetched ahead.
    assert found[Category.PARAMETERS] == 2 * (2 * LAYER + LAYER // 4)


def test_gathers_overlap_with_the_chunk_before() -> None:
    """A chunk runs 4 s forward, 8 s backward; a gather takes 2 s and a reduction 4 s."""
    plan = ministages(1, 2, 4, 4)
    bytes_per_s = 2 * LAYER / 2 / 2
    slow = run(plan, memory=FakeMemory(layer_count=LAYER), comm=FakeComm(bytes_per_s=bytes_per_s))
    free = run(plan, memory=FakeMemory(layer_count=LAYER))
    # Left over: the first gather and the last reduction.
    assert slow.iteration_s == pytest.approx(free.iteration_s + 2 + 4)


def test_neighbouring_chunks_of_a_group_are_handed_over_on_the_rank() -> None:
    plan = with_owners(even_plan(2, 1, 2), [0, 0, 1, 1])
    first, last = lower_plan(plan).ranks
    assert {a.chunk for a in first if a.kind in TRANSFERS} == {1}
    assert {a.chunk for a in last if a.kind in TRANSFERS} == {2}
    run(plan)


def test_a_replica_without_micro_batches_takes_part() -> None:
    plan = ministages(1, 2, 2, 3)
    first, second = plan.groups[0].replicas
    replicas = (
        dataclasses.replace(first, num_microbatches=4),
        dataclasses.replace(second, num_microbatches=0),
    )
    plan = dataclasses.replace(
        plan, groups=(dataclasses.replace(plan.groups[0], replicas=replicas),)
    )
    busy, idle = lower_plan(plan).ranks
    assert list(idle) == [a for a in busy if a.kind not in COMPUTE]
    run(plan)
