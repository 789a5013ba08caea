"""New counts: against brute force, under noise, and that their lists fit where the plan's do."""

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import isclose

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.strategies import in_ascending_order, lowerable_plans, plans
from tests.unit.made_plans import plan_of, replica
from zorse_megatron.live.batch_schedule import BatchSchedule, plan_for_batch
from zorse_megatron.live.rebalance import (
    Balancer,
    Counts,
    Preparation,
    Prepared,
    ReplicaTime,
    best_counts,
    counts_of,
    held,
    with_counts,
    workers_of,
)
from zorse_megatron.plan.plan import ExpertParallel, Plan, Schedule
from zorse_megatron.plan.rules import problems_of
from zorse_megatron.schedule.actions import Action, ActionLists, Kind, edges_of
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.pipeline_schedules import Worker
from zorse_megatron.schedule.samples import micro_batches, rank_micro_batches
from zorse_megatron.schedule.validate import check_executable

TIMES = st.builds(
    ReplicaTime,
    micro_batch_size=st.integers(1, 4),
    num_microbatches=st.integers(1, 5),
    seconds=st.integers(1, 40).map(lambda n: n / 8),
)


@settings(max_examples=examples(150))
@given(replicas=st.lists(TIMES, min_size=1, max_size=4))
def test_counts_are_the_best_of_all(replicas: list[ReplicaTime]) -> None:
    counts = best_counts(replicas)
    sizes = [each.micro_batch_size for each in replicas]
    batch = sum(each.micro_batch_size * each.num_microbatches for each in replicas)
    assert all(counts) and sum(map(int.__mul__, sizes, counts)) == batch

    def busy_s(of: tuple[int, ...]) -> float:
        return max(count * each.seconds for count, each in zip(of, replicas, strict=True))

    least = min(
        busy_s(each)
        for each in itertools.product(*(range(1, batch // size + 1) for size in sizes))
        if sum(map(int.__mul__, sizes, each)) == batch
    )
    assert isclose(busy_s(counts), least, rel_tol=1e-9)


@settings(max_examples=examples(100))
@given(
    replicas=st.lists(TIMES, min_size=1, max_size=3),
    batch=st.integers(1, 40),
)
def test_smaller_batches_take_no_longer(replicas: list[ReplicaTime], batch: int) -> None:
    """The best counts that are done when the slowest replica is done now, if there are any."""
    busiest_s = max(each.busy_s for each in replicas)
    choices = (range(1, int(busiest_s / each.seconds + 1e-9) + 1) for each in replicas)
    times = {
        max(count * each.seconds for count, each in zip(counts, replicas, strict=True))
        for counts in itertools.product(*choices)
        if sum(n * each.micro_batch_size for n, each in zip(counts, replicas, strict=True)) == batch
    }
    if not times:
        with pytest.raises(ValueError, match=f"make {batch} samples"):
            best_counts(replicas, batch=batch)
        return
    found = best_counts(replicas, batch=batch)
    assert sum(n * e.micro_batch_size for n, e in zip(found, replicas, strict=True)) == batch
    longest_s = max(count * each.seconds for count, each in zip(found, replicas, strict=True))
    assert isclose(longest_s, min(times), rel_tol=1e-9)


ANY_PLAN = st.one_of(
    plans(max_world=8, max_ranks_per_replica=2).map(in_ascending_order), lowerable_plans(8, 4)
)


@settings(max_examples=examples(60))
@given(plan=ANY_PLAN, data=st.data())
def test_any_plan_has_batches_down_to_a_sample_for_each_replica(
    plan: Plan, data: st.DataObject
) -> None:
    least = max(len([r for r in group.replicas if r.num_microbatches]) for group in plan.groups)
    size = data.draw(st.integers(least, plan.global_batch_size))
    smaller = plan_for_batch(plan, size)
    assert list(problems_of(smaller)) == [] and smaller.global_batch_size == size
    check_executable(lower_plan(smaller))
    for mine, its in zip(smaller.groups, plan.groups, strict=True):
        for one, other in zip(mine.replicas, its.replicas, strict=True):
            assert one.micro_batch_size <= other.micro_batch_size
            assert bool(one.num_microbatches) == bool(other.num_microbatches)
    with pytest.raises(ValueError, match=f"make {least - 1} samples"):
        plan_for_batch(plan, least - 1)


def test_micro_batches_of_ranks_that_share_experts_stay_whole() -> None:
    """Each of these has a sample of its own; another replica's are halved."""
    shared = ExpertParallel(experts=(1, 3), samples=(3, 1))
    pair = replica(0, 1, size=4, count=2, expert_parallel=shared)
    plan = plan_of([pair, replica(2, size=4, count=2)], [replica(3, size=4, count=4)])
    smaller = plan_for_batch(plan, 6)
    (kept, halved), (alone,) = (group.replicas for group in smaller.groups)
    assert kept == replace(pair, num_microbatches=1) and halved.num_samples == 2
    assert alone.num_samples == 6 and alone.expert_parallel is None
    check_executable(lower_plan(smaller))
    with pytest.raises(ValueError, match="make 4 samples"):
        plan_for_batch(plan, 4)


STEPS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 9)), max_size=4, unique_by=lambda s: s[0]
)


@given(later=STEPS, first=st.integers(1, 9), consumed=st.integers(0, 80))
def test_changes_are_where_a_count_of_samples_finds_them(
    later: list[tuple[int, int]], first: int, consumed: int
) -> None:
    sizes = sorted([first, *(size for _, size in later)])
    steps = [*zip([0, *sorted(at for at, _ in later)], sizes, strict=True)]
    words = [f"{10 * at}:{size}" for at, size in steps]
    schedule = BatchSchedule.parse(" ".join(words), sequence_length=10)
    changes = dict(schedule.changes_after(consumed))
    size = changes[0]
    for number in range(90):
        size = changes.get(number, size)
        assert size == [s for at, s in steps if at <= consumed][-1]
        consumed += size


@pytest.mark.parametrize("text", ["0:8 1K:4", "0:inf", "0:1 infB:2", "0:0", "1K:8", "0:8,0:9", "0"])
def test_a_schedule_that_megatron_could_not_use_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"schedule|finite|smaller|convert|unpack"):
        BatchSchedule.parse(text, sequence_length=10)


def test_equals_are_dealt_out_equally() -> None:
    replicas = [ReplicaTime(micro_batch_size=2, num_microbatches=n, seconds=1.0) for n in (9, 1, 5)]
    assert best_counts(replicas) == (5, 5, 5)


def test_a_slower_replica_gets_less() -> None:
    replicas = [ReplicaTime(micro_batch_size=4, num_microbatches=16, seconds=t) for t in (1.5, 1.0)]
    assert best_counts(replicas) == (13, 19)


def _plan(*groups: tuple[tuple[int, int], ...]) -> Plan:
    """Groups of replicas of (size, count), one layer each."""
    ranks = itertools.count()
    return plan_of(
        *([replica(next(ranks), size=s, count=count) for s, count in group] for group in groups)
    )


# As many micro-batches as the emulated cluster's, few of them, and one replica with one.
NOISY = (
    _plan(((2, 32), (2, 32)), ((4, 16), (4, 16)), ((2, 32), (2, 32)), ((4, 16), (4, 16))),
    _plan(((4, 4), (4, 4)), ((2, 8), (2, 8))),
    _plan(((1, 1), (1, 7)), ((4, 1), (4, 1))),
)


def _switches(
    plan: Plan, factors: dict[Worker, tuple[int, float]], *, steps: int, seed: int
) -> list[tuple[int, Counts]]:
    """(step, counts) of each change; factors: worker -> (from which step on, how much slower).

    Each forward and backward of a micro-batch takes 10 % more or less, log-normal. A group's
    replicas are busy for the same time when none is slow.
    """
    rng = random.Random(seed)
    balancer, found = Balancer(plan=plan), []
    base = {w: 1.0 / plan.groups[w[0]].replicas[w[1]].num_microbatches for w in workers_of(plan)}
    for step in range(1, steps):
        seconds = {}
        for worker in workers_of(plan):
            start, factor = factors.get(worker, (0, 1.0))
            level = base[worker] * (factor if step >= start else 1.0)
            count = balancer.plan.groups[worker[0]].replicas[worker[1]].num_microbatches
            forwards, backwards = (
                sorted(rng.lognormvariate(0, 0.1) for _ in range(count))[count // 2] for _ in "FB"
            )
            seconds[worker] = level * (forwards + 2 * backwards) / 3
        balancer.add(step, seconds)
        if balancer.proposal is not None:
            found.append((step, balancer.proposal))
            balancer.change_to(with_counts(plan, balancer.proposal))
    return found


@pytest.mark.parametrize("plan", NOISY)
@pytest.mark.parametrize("seed", range(3))
def test_noise_alone_changes_nothing(plan: Plan, seed: int) -> None:
    """10 % jitter for 200 iterations; the aim allows one change."""
    assert _switches(plan, {}, steps=200, seed=seed) == []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("start", [0, 2, 3, 40])
def test_a_slow_replica_is_found_soon(start: int, seed: int) -> None:
    """Of 16 micro-batches each, one and a half times as slow: at most one more change than needed.

    Slow from the first step on it is found after four; later, noise has to be told from change.
    """
    found = _switches(NOISY[0], {(1, 0): (start, 1.5)}, steps=start + 160, seed=seed)
    assert 1 <= len(found) <= 2
    step, counts = found[0]
    assert step <= max(start, 1) + 5
    assert counts[1] in {(12, 20), (13, 19)} and counts[0] == (32, 32)
    assert found[-1][1][1] in {(12, 20), (13, 19)}


def test_replicas_that_are_not_waited_for_stay_as_they_are() -> None:
    """The slow replica's group has time to spare: another one is busy for as long."""
    plan = _plan(((1, 8), (1, 8)), ((1, 8), (1, 8)))
    balancer = Balancer(plan=plan)
    for step in range(10):
        balancer.add(step, {(0, 0): 1.0, (0, 1): 1.0, (1, 0): 0.9, (1, 1): 0.5})
    assert balancer.proposal is None


def test_what_was_refused_is_not_wished_again() -> None:
    plan = _plan(((1, 8), (1, 8)))
    balancer = Balancer(plan=plan)
    for step in range(10):
        balancer.add(step, {(0, 0): 2.0, (0, 1): 1.0})
    assert balancer.proposal == ((5, 11),)
    balancer.refuse(balancer.proposal)
    for step in range(10, 20):
        balancer.add(step, {(0, 0): 2.0, (0, 1): 1.0})
    assert balancer.proposal is None


PLANS = lowerable_plans(
    max_chunks_per_group=2,
    global_batch_size=st.integers(12, 40),
    schedule_names=("interleaved",),
)


@settings(max_examples=examples(80))
@given(data=st.data(), plan=PLANS)
def test_other_counts_run_where_the_plan_fits(data: st.DataObject, plan: Plan) -> None:
    """Whatever times are measured: the lists end, or are refused for what they would hold."""
    counts = _counts_for(plan, lambda _: data.draw(st.sampled_from([1.0, 1.2, 1.5, 3.0])))
    everywhere = frozenset(itertools.permutations(range(plan.world_size), 2))
    lists = lower_plan(plan)
    prepared = Preparation.of(plan, lists, tied=False, links=everywhere).prepare(counts)
    if isinstance(prepared, str):
        event("refused")
        assert "would hold more" in prepared
        return
    event("other counts" if counts != counts_of(plan) else "the same")
    assert problems_of(prepared.plan) == ()
    assert counts_of(prepared.plan) == counts
    for rank in range(plan.world_size):
        before, after = (_most_kept(of, one, rank) for of, one in ((plan, lists), _ran(prepared)))
        assert after <= before
    for before, after in zip(plan.groups, prepared.plan.groups, strict=True):
        assert micro_batches(after)[-1].stop == plan.global_batch_size
        for old, new in zip(before.replicas, after.replicas, strict=True):
            assert bool(old.num_microbatches) == bool(new.num_microbatches)
            count, halved = old.num_microbatches, old.halved
            assert replace(new, num_microbatches=count, halved=halved) == old
            if halved is None or halved.num_whole <= new.num_microbatches:
                assert new.halved == halved


def _ran(prepared: Prepared) -> tuple[Plan, ActionLists]:
    return prepared.plan, prepared.lists


def _most_kept(plan: Plan, lists: ActionLists, rank: int) -> int:
    """Most layers of samples that a rank keeps from forwards to backwards at any one time."""
    sizes = [each.size for each in rank_micro_batches(plan, rank)]
    kept: Counter[tuple[int | None, int | None]] = Counter()
    most = 0
    for action in lists.ranks[rank]:
        if action.kind is Kind.FORWARD:
            first, stop = plan.chunks[action.chunk or 0].layers
            kept[action.chunk, action.micro_batch] = (stop - first) * sizes[action.micro_batch or 0]
        elif action.kind is Kind.BACKWARD:
            del kept[action.chunk, action.micro_batch]
        most = max(most, kept.total())
    return most


def test_counts_that_would_take_more_memory_are_refused() -> None:
    """Breadth first has all micro-batches in flight, but on the last chunk."""
    plan = replace(
        _plan(((1, 4), (1, 4)), ((1, 4), (1, 4))), schedule=Schedule(name="breadth_first")
    )
    lists = lower_plan(plan)
    preparation = Preparation.of(
        plan, lists, tied=False, links=frozenset(itertools.permutations(range(4), 2))
    )
    refused = preparation.prepare(((2, 6), (4, 4)))
    assert isinstance(refused, str) and refused.startswith("rank 1 would hold more")


def _counts_for(plan: Plan, seconds_of: Callable[[Worker], float]) -> Counts:
    rows = []
    for number, group in enumerate(plan.groups):
        active = [index for index, each in enumerate(group.replicas) if each.num_microbatches]
        times = [
            ReplicaTime(
                micro_batch_size=group.replicas[index].micro_batch_size,
                num_microbatches=group.replicas[index].num_microbatches,
                seconds=seconds_of((number, index)),
            )
            for index in active
        ]
        found = dict(zip(active, best_counts(times), strict=True))
        rows.append(tuple(found.get(index, 0) for index in range(len(group.replicas))))
    return tuple(rows)


def test_ranks_without_a_link_do_not_get_to_send() -> None:
    plan = _plan(((1, 4), (1, 4)), ((1, 4), (1, 4)))
    lists = lower_plan(plan)
    links = frozenset(edges_of([lists]))
    assert len(links) == 4  # each rank has one neighbour
    prepared = Preparation.of(plan, lists, tied=False, links=links).prepare(((2, 6), (4, 4)))
    assert isinstance(prepared, str) and "has no link to" in prepared


def test_a_proposal_for_what_is_there_changes_nothing() -> None:
    plan = NOISY[0]
    lists = lower_plan(plan)
    links = frozenset(edges_of([lists]))
    prepared = Preparation.of(plan, lists, tied=False, links=links).prepare(counts_of(plan))
    assert isinstance(prepared, Prepared) and prepared.lists == lists


def test_what_a_list_holds() -> None:
    """By hand: 2 chunks of 3 and 1 layers, micro-batches of 2 and 1 samples."""
    list_of = (
        (Kind.FORWARD, 0, 0),
        (Kind.FORWARD, 1, 0),
        (Kind.BACKWARD, 1, 0),
        (Kind.FORWARD, 0, 1),
        (Kind.BACKWARD, 0, 0),
        (Kind.WEIGHT_GRADIENT, 1, 0),
    )
    actions = [Action(kind=kind, chunk=chunk, micro_batch=mb) for kind, chunk, mb in list_of]
    found = held(actions, sizes=(2, 1), layers=(3, 1))
    assert (found.activations, found.delayed) == (6 + 3, 2 + 6)
