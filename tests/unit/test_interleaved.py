"""Interleaved 1F1B: Megatron's order for equal groups, and bounds for others."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings

from tests.examples import examples
from tests.strategies import lowerable_plans, plans
from tests.unit.made_plans import dealt_out, even_plan, with_owners
from tests.unit.simulation import run
from zorse_megatron.plan.plan import Plan, Schedule
from zorse_megatron.schedule.actions import COMPUTE, ActionLists, Kind
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.micro_batch_order import Pipeline
from zorse_megatron.schedule.pipeline_schedules import policy_of
from zorse_megatron.schedule.samples import Boundaries


def computations(lists: ActionLists, rank: int) -> list[str]:
    return [str(a) for a in lists.ranks[rank] if a.kind in COMPUTE]


def megatron_interleaved(stage: int, stages: int, num_chunks: int, count: int) -> list[str]:
    """The order of forward_backward_pipelining_with_interleaving, written from its rules.

    `get_schedule_table` with groups of `stages` micro-batches; backwards take the chunks in
    reverse; `get_pp_rank_microbatches` says how many forwards come first.
    """
    table = [
        (chunk, micro_batch)
        for first in range(0, count, stages)
        for chunk in range(num_chunks)
        for micro_batch in range(first, first + stages)
    ]
    forwards = [f"{chunk * stages + stage}F{m}" for chunk, m in table]
    backwards = [f"{(num_chunks - 1 - chunk) * stages + stage}B{m}" for chunk, m in table]
    warmup = min(2 * (stages - stage - 1) + (num_chunks - 1) * stages, len(table))
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(table) - warmup :]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_chunks", [2, 3, 5])
@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("replicas", [1, 2])
def test_equal_groups_give_megatrons_order(
    stages: int, num_chunks: int, rounds: int, replicas: int
) -> None:
    count = rounds * stages
    plan = dealt_out(even_plan(stages, replicas, count), num_chunks, schedule="interleaved")
    lists = lower_plan(plan)
    for rank in range(plan.world_size):
        expected = megatron_interleaved(rank // replicas, stages, num_chunks, count)
        assert computations(lists, rank) == expected


def test_evaluation_takes_stages_micro_batches_through_all_chunks() -> None:
    plan = dealt_out(even_plan(2, 1, 4), 2, schedule="interleaved")
    lists = lower_plan(plan, forward_only=True)
    assert computations(lists, 0) == ["0F0", "0F1", "2F0", "2F1", "0F2", "0F3", "2F2", "2F3"]


@pytest.mark.slow
@settings(deadline=None)
@given(plan=plans())
def test_one_chunk_per_group_does_what_1f1b_does(plan: Plan) -> None:
    other = lower_plan(dataclasses.replace(plan, schedule=Schedule(name="interleaved")))
    for one, two in zip(lower_plan(plan).ranks, other.ranks, strict=True):
        assert Counter(one) == Counter(two)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(150))
@given(plan=lowerable_plans(schedule_names=("interleaved",)) | plans())
def test_what_is_in_flight_stays_within_the_limits(plan: Plan) -> None:
    """But for one micro-batch, which may always be, and where nothing else could go on."""
    policy = policy_of(plan)
    pipeline = Pipeline(plan, Boundaries(plan), policy, forward_only=False)
    events = list(pipeline.simulate())
    in_flight: Counter[tuple[int, int]] = Counter()
    ends = [(e.end, 0, e) for e in events if e.kind is Kind.BACKWARD]
    starts = [(e.time, 1, e) for e in events if e.forward]
    for _, starting, event in sorted(ends + starts, key=lambda entry: entry[:2]):
        worker = plan.chunks[event.chunk].group, event.micro_batch.replica
        first, stop = plan.chunks[event.chunk].layers
        weight = (stop - first) * event.micro_batch.size if policy.counts_layers else 1
        in_flight[worker] += weight if starting else -weight
        if starting and not pipeline.was_stuck:
            assert in_flight[worker] <= max(weight, policy.limits[worker])
    assert not any(in_flight.values())


def test_gradients_are_reduced_as_soon_as_they_are_complete() -> None:
    """The last chunk's reduction is not after the backwards of the chunks before it."""
    plan = dealt_out(even_plan(2, 1, 4), 3, schedule="interleaved")
    for rank, actions in enumerate(lower_plan(plan).ranks):
        at = {str(a): position for position, a in enumerate(actions)}
        assert at[f"{rank + 4}B3"] < at[f"{rank + 4}REDUCE_GRAD"] < at[f"{rank}B3"]
        assert [a.kind for a in actions][-8:] == [
            Kind.SCALE,
            Kind.NORM,
            *[Kind.STEP, Kind.UNSHARD] * 3,
        ]


def test_groups_that_hold_neighbouring_chunks_do_not_get_stuck() -> None:
    """Orders that Megatron has no name for."""
    for owners in ([0, 0, 1, 1], [0, 1, 1, 0], [0, 1, 0, 0, 1], [1, 0, 0, 0]):
        plan = with_owners(even_plan(2, 2, 3), owners, "interleaved")
        result = run(plan)
        assert result.iteration_s < 2 * 3 * 3 * len(owners)  # never one after the other


def test_more_chunks_shorten_the_bubble() -> None:
    """(P - 1) / V of a stage's work per micro-batch: Narayanan et al., SC 2021, section 2.2."""
    one = even_plan(4, 1, 8)
    for num_chunks in (2, 4):
        plan = dealt_out(one, num_chunks, schedule="interleaved")
        work_s = 8 * 3 * num_chunks
        assert run(plan).iteration_s == work_s + (4 - 1) * 3
