"""Orders that know how long messages are on their way."""

import dataclasses
from collections import defaultdict
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import lowerable_plans, plans
from tests.unit.fake_costs import FakeComm, FakeMemory
from tests.unit.simulation import run
from tests.unit.test_schedules import even_plan
from zorse_megatron.plan.plan import Hop, Plan
from zorse_megatron.schedule.actions import COMPUTE
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.micro_batch_order import pipeline_for
from zorse_megatron.schedule.pipeline_schedules import interleaved, one_f_one_b
from zorse_megatron.schedule.samples import Boundaries

pipelined_plans = st.one_of(plans(), lowerable_plans(schedule_names=("interleaved",)))


def with_hops(plan: Plan, hop: Hop | None) -> Plan:
    """The plan with this hop between all chunks of different groups."""
    follows = [*(chunk.group for chunk in plan.chunks[1:]), None]
    chunks = tuple(
        dataclasses.replace(chunk, hop=None if after in (None, chunk.group) else hop)
        for chunk, after in zip(plan.chunks, follows, strict=True)
    )
    return dataclasses.replace(plan, chunks=chunks)


def pipeline(plan: Plan, *, forward_only: bool = False):
    policy = interleaved(plan) if plan.schedule.name == "interleaved" else one_f_one_b(plan)
    return pipeline_for(plan, Boundaries(plan), policy, forward_only=forward_only)


def group_time_of(simulation) -> int:
    """How long a group computes, in the simulation's unit."""
    worker = next(iter(simulation.workers.values()))
    return 3 * len(worker.queue) * sum(worker.costs.values())


NUM = 20


def two_groups(hop: Hop | None) -> Plan:
    """Forwards of 1, backwards of 2; so much in flight that only the hop makes anyone wait."""
    plan = even_plan(2, 1, NUM)
    groups = tuple(
        dataclasses.replace(group, extra_in_flight=extra)
        for group, extra in zip(plan.groups, (5, 1), strict=True)
    )
    return with_hops(dataclasses.replace(plan, groups=groups), hop)


@pytest.mark.parametrize("latency", [0.0, 2.0, 3.5])
def test_the_schedule_takes_as_long_as_the_hop_asks_for(latency):
    """Messages of 3, one after the other; the last one's gradient comes back as long."""
    simulation = pipeline(two_groups(Hop(latency=latency / (3 * NUM), load=1.0)))
    end = max(event.end for event in simulation.simulate())
    ideal = 1 + NUM * 3 + latency + 1 + 2 + 3 + latency + 2
    assert end / group_time_of(simulation) * 3 * NUM == pytest.approx(ideal, rel=1e-7)


def test_an_order_that_knows_the_hop_is_ideal_and_one_that_does_not_is_longer():
    slow = {"memory": FakeMemory(boundary=3), "comm": FakeComm(bytes_per_s=1.0)}
    known = run(two_groups(Hop(latency=0.0, load=1.0)), **slow)
    unknown = run(two_groups(None), **slow)
    assert known.iteration_s == pytest.approx(3 * NUM + 9)
    # It waits for a second forward before each backward, so the last two are late.
    assert unknown.iteration_s == pytest.approx(3 * NUM + 12)


@pytest.mark.slow
@settings(deadline=None)
@given(plan=pipelined_plans, forward_only=st.booleans())
def test_nothing_starts_before_its_inputs_have_arrived(plan, forward_only):
    """Arrivals are found again from the events alone, hop by hop."""
    simulation = pipeline(plan, forward_only=forward_only)
    events = list(simulation.simulate())
    events = [event for event in events if event.kind in COMPUTE]
    starts = {(e.chunk, e.forward, e.micro_batch.key): e.time for e in events}
    assert len(starts) == len(events)
    group_time, sent = group_time_of(simulation), defaultdict(list)
    for event in events:
        lower = event.chunk if event.forward else event.chunk - 1
        if 0 <= lower < len(plan.chunks) - 1:
            link = simulation.boundaries.after_chunk[lower]
            pieces = (link.by_source if event.forward else link.by_target)[event.micro_batch.key]
            sent[lower, event.forward] += [(event.end, piece) for piece in pieces]
    for (lower, forward), messages in sent.items():
        hop = plan.chunks[lower].hop or Hop(latency=0.0, load=0.0)
        per_sample = group_time * Fraction(hop.load) / plan.global_batch_size
        free = 0
        for moment in sorted({time for time, _ in messages}):
            together = [piece for time, piece in messages if time == moment]
            samples = sum(piece.stop - piece.start for piece in together)
            free = max(free, moment) + int(samples * per_sample)
            arrival = free + round(group_time * Fraction(hop.latency))
            for piece in together:
                chunk, micro_batch = (lower + 1, piece.target) if forward else (lower, piece.source)
                assert starts[chunk, forward, micro_batch.key] >= arrival


@pytest.mark.slow
@settings(deadline=None)
@given(plan=pipelined_plans, forward_only=st.booleans())
def test_hops_that_take_no_time_change_no_order(plan, forward_only):
    none, no_time = with_hops(plan, None), with_hops(plan, Hop(latency=0.0, load=0.0))
    options = {"forward_only": forward_only}
    assert lower_plan(no_time, **options) == lower_plan(none, **options)


@pytest.mark.slow
@settings(deadline=None)
@given(plan=lowerable_plans(schedule_names=("breadth_first",)))
def test_breadth_first_ignores_hops(plan):
    assert lower_plan(plan) == lower_plan(with_hops(plan, None))
