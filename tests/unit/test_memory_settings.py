"""Recomputation and offloading of a replica's own."""

import dataclasses

import pytest
from hypothesis import given, settings

from tests.examples import examples
from tests.strategies import lowerable_plans
from tests.unit.fake_costs import FakeComm, FakeCompute, FakeMemory
from tests.unit.simulation import run
from tests.unit.test_simulate_times import one_group
from zorse_megatron.errors import PlanError
from zorse_megatron.plan.memory_settings import settings_by_rank
from zorse_megatron.plan.plan import Offload, Recompute
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.schedule.lower import lower_plan, refuse_unlowered, refuse_unsupported
from zorse_megatron.schedule.validate import check_executable
from zorse_megatron.simulate.result import host_bytes

FULL, SELECTIVE = Recompute(mode="full"), Recompute(mode="selective")
STATE = Offload(optimizer_state=True)


def told(plan, *own, **of_group):
    """The plan of one group whose replicas have settings of their own; None: none."""
    (group,) = plan.groups
    replicas = tuple(
        dataclasses.replace(replica, **(more or {}))
        for replica, more in zip(group.replicas, own, strict=True)
    )
    group = dataclasses.replace(group, replicas=replicas, **of_group)
    return dataclasses.replace(plan, groups=(group,))


def test_a_replica_overrides_its_group():
    plan = one_group((1, 1), (1, 1))
    plan = told(
        plan, {"recompute": SELECTIVE}, {"offload": Offload()}, recompute=FULL, offload=STATE
    )
    found = settings_by_rank(plan)
    assert [found[rank].recompute for rank in range(2)] == [SELECTIVE, FULL]
    assert [found[rank].offload for rank in range(2)] == [STATE, Offload()]


# Rules.


def test_what_is_refused_names_the_place_that_says_it():
    refuse_unsupported(told(one_group((1, 1)), {"offload": Offload(activations=True)}))
    plan = told(one_group((1, 1), (1, 1)), None, {"offload": Offload(parameters=True)})
    with pytest.raises(PlanError) as caught:
        refuse_unlowered(plan)
    assert [problem.where for problem in caught.value.problems] == [
        "groups[0].replicas[1].offload.parameters"
    ]


# Lists.


def moved_to_replicas(plan):
    """The same settings, said by every replica instead of the group."""
    groups = []
    for group in plan.groups:
        replicas = tuple(
            dataclasses.replace(
                replica,
                recompute=replica.recompute or group.recompute,
                offload=replica.offload or group.offload,
            )
            for replica in group.replicas
        )
        groups.append(dataclasses.replace(group, replicas=replicas, recompute=None, offload=None))
    return dataclasses.replace(plan, groups=tuple(groups))


def said_by_groups(plan, offloads):
    """All ranks of a group offload the same, as it says."""
    groups = tuple(
        dataclasses.replace(
            group,
            offload=offloads[number],
            replicas=tuple(dataclasses.replace(r, offload=None) for r in group.replicas),
        )
        for number, group in enumerate(plan.groups)
    )
    return dataclasses.replace(plan, groups=groups)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(60))
@given(lowerable_plans())
def test_lists_of_mixed_groups(plan):
    """Of a group with ranks that offload shards: the copies, on these ranks alone."""
    lists = lower_plan(plan)
    check_executable(lists, [r.ranks for group in plan.groups for r in group.replicas])
    assert lower_plan(moved_to_replicas(plan)) == lists
    found = settings_by_rank(plan)
    some = [
        Offload(
            parameters=any(found[rank].offload.parameters for rank in group.ranks),
            gradients=any(found[rank].offload.gradients for rank in group.ranks),
        )
        for group in plan.groups
    ]
    for rank, actions in enumerate(lower_plan(said_by_groups(plan, some)).ranks):
        own = found[rank].offload
        copies = set() if own.parameters else {Kind.FETCH, Kind.OFFLOAD}
        copies |= set() if own.gradients else {Kind.OFFLOAD_GRADIENTS}
        assert lists.ranks[rank] == tuple(a for a in actions if a.kind not in copies)


# Time and memory.


def test_each_replica_takes_its_own_time_and_memory():
    plan = one_group((1, 2), (1, 2), (1, 2), layers=4, weights=[1.0, 1.0, 1.0])
    own = {"recompute": FULL}, {"recompute": Recompute(mode="full", num_layers=1)}, None
    compute = FakeCompute(recomputed_s={"full": 1.0})
    mixed = run(told(plan, *own), compute=compute)
    for rank, of_group in enumerate(own):
        alone = run(told(plan, None, None, None, **(of_group or {})), compute=compute)
        assert mixed.usage[rank].busy_s == alone.usage[rank].busy_s
        assert mixed.memory[rank].total_bytes == alone.memory[rank].total_bytes
    busy_s = [usage.busy_s for usage in mixed.usage]
    assert busy_s[0] - busy_s[2] == pytest.approx(2 * 4)
    assert busy_s[1] - busy_s[2] == pytest.approx(2 * 1)
    # The slowest replica decides.
    assert mixed.iteration_s == run(told(plan, *[None] * 3, **own[0]), compute=compute).iteration_s


def test_each_replica_offloads_its_own():
    plan = one_group((1, 3), (1, 3), layers=2)
    comm = FakeComm(host_bytes_per_s=50_000.0)
    both = Offload(optimizer_state=True, activations=True)
    own = {"offload": both, "recompute": FULL}, None
    mixed = run(told(plan, *own), comm=comm)
    for rank, of_group in enumerate(own):
        alone = run(told(plan, None, None, **(of_group or {})), comm=comm)
        assert dict(host_bytes(mixed, rank)) == dict(host_bytes(alone, rank))
        assert mixed.memory[rank].total_bytes == alone.memory[rank].total_bytes
    assert host_bytes(mixed, 0)
    assert not host_bytes(mixed, 1)


def test_replicas_of_other_settings_are_simulated_apart():
    plan = one_group((1, 2), (1, 2), (1, 2), (1, 2), layers=4)
    memory = FakeMemory(layer_count=64 * 48)
    plan = told(plan, None, {"recompute": FULL}, None, {"offload": STATE})
    merged = run(plan, memory=memory, merge_equal_ranks=True)
    assert merged.stands_in == (0, 1, 0, 3)
    whole = run(plan, memory=memory)
    assert merged.iteration_s == whole.iteration_s
    assert [m.total_bytes for m in merged.memory] == [m.total_bytes for m in whole.memory]
