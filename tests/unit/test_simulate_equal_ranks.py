"""Simulating one of several equal ranks gives what simulating all of them gives."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.strategies import with_random_transfers
from tests.unit.fake_costs import FakeComm, FakeCompute, FakeMemory, node_links
from tests.unit.made_plans import even_plan, ministages, one_group, plan_of, replica, with_owners
from tests.unit.simulation import run, traces_of, transfers_of
from zorse_megatron.plan.plan import (
    ModelFingerprint,
    Offload,
    Plan,
    Recompute,
    Schedule,
)
from zorse_megatron.schedule.actions import from_norm
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.pipeline_schedules import RESIDENT, parameters_setting
from zorse_megatron.simulate import equal_ranks
from zorse_megatron.simulate.assumptions import RUNTIME, STOCK_1F1B, STOCK_INTERLEAVED, Perturbation


def shaped(shapes: list[tuple[int, int]], batch: int, order=None, weights=(1.0,)) -> Plan:
    """Groups of R replicas with micro-batches of m samples, as (R, m).

    Ranks in the given order; shard weights in turn.
    """
    ranks = iter(order or range(sum(count for count, _ in shapes)))
    return plan_of(
        *(
            [
                replica(
                    next(ranks),
                    size=size,
                    count=batch // (count * size),
                    weight=weights[index % len(weights)],
                )
                for index in range(count)
            ]
            for count, size in shapes
        )
    )


@st.composite
def schedules(draw, plan):
    """The plan, or the same groups with several chunks each under another schedule."""
    if draw(st.booleans()):
        return plan
    name = draw(st.sampled_from(["breadth_first", "breadth_first", "interleaved"]))
    groups = len(plan.groups)
    owners = list(range(groups)) * draw(st.integers(1, 3))
    if draw(st.booleans()):
        owners = draw(st.permutations(owners))
    settings = [{}, {"parameters": "resident"}, {"parameters": "per_micro_batch"}]
    parameters = draw(st.sampled_from(settings)) if name == "breadth_first" else {}
    plan = with_owners(plan, owners, name, **parameters)
    if name == "breadth_first" and parameters_setting(plan) != RESIDENT:
        group = dataclasses.replace(plan.groups[0], offload=Offload(parameters=True))
        plan = dataclasses.replace(
            plan, groups=(draw(st.sampled_from([group, plan.groups[0]])), *plan.groups[1:])
        )
    return plan


def with_one_more(draw, plan):
    """The plan; sometimes the first or every other replicas of groups run more than the rest do."""
    groups = []
    for group in plan.groups:
        count, total = len(group.replicas), group.replicas[0].num_microbatches
        busier = draw(st.sampled_from([0, 0, *(n for n in range(1, count) if n % 2 == 0)]))
        step = draw(st.sampled_from([1, 1, 2]))
        more = draw(st.integers(1, 2)) * (count - busier)
        less = busier * more // (count - busier) if busier else 0
        if not busier or less >= total or step * busier > count:
            groups.append(group)
            continue
        chosen = range(0, step * busier, step)
        replicas = tuple(
            dataclasses.replace(
                replica, num_microbatches=total + more if at in chosen else total - less
            )
            for at, replica in enumerate(group.replicas)
        )
        groups.append(dataclasses.replace(group, replicas=replicas))
    return dataclasses.replace(plan, groups=tuple(groups))


def with_order(draw, plan):
    """Times and limits of groups whose replicas are equal, so that it merges."""
    has_limits = plan.schedule.name != "breadth_first" and draw(st.booleans())
    has_times = draw(st.booleans())
    seconds = st.sampled_from([0.5, 1.0, 1.5, 2.0])
    groups = []
    for number, group in enumerate(plan.groups):
        split = draw(st.booleans())
        own = {
            "compute_s": tuple(
                (draw(seconds), draw(seconds), draw(seconds)) for _ in plan.chunks_of_group(number)
            )
            if has_times
            else None,
            "max_in_flight": draw(st.integers(1, 64)) if has_limits else None,
            "max_delayed_wgrad": draw(st.none() | st.integers(0, 32)) if split else None,
        }
        replicas = tuple(dataclasses.replace(each, **own) for each in group.replicas)
        groups.append(dataclasses.replace(group, replicas=replicas, split_backward=split))
    return dataclasses.replace(plan, groups=tuple(groups))


def with_own_settings(draw, plan):
    """The plan; sometimes a replica in so many recomputes or offloads differently."""
    every = draw(st.sampled_from([None, None, 1, 2, 4]))
    if every is None:
        return plan
    own = {
        "recompute": draw(st.sampled_from([None, Recompute(mode="full")])),
        "offload": draw(st.sampled_from([None, Offload(optimizer_state=True), Offload()])),
    }
    number = draw(st.integers(0, len(plan.groups) - 1))
    replicas = tuple(
        dataclasses.replace(replica, **own) if at % every == 0 else replica
        for at, replica in enumerate(plan.groups[number].replicas)
    )
    group = dataclasses.replace(plan.groups[number], replicas=replicas)
    groups = (*plan.groups[:number], group, *plan.groups[number + 1 :])
    return dataclasses.replace(plan, groups=groups)


@st.composite
def equal_plans(draw):
    """Plans of equal work, and the kind of GPU of each rank; most groups have one kind."""
    mixed = draw(st.sampled_from([0, 0, 2]))
    size = st.sampled_from([1, 2, 4])
    shapes = draw(
        st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 8]), size), min_size=1, max_size=3)
    )
    batch = math.lcm(*(count * size for count, size in shapes)) * draw(st.integers(1, 3))
    world = sum(count for count, _ in shapes)
    order = draw(st.one_of(st.just(list(range(world))), st.permutations(range(world))))
    weights = draw(st.sampled_from([[1.0], [1.0], [1.0, 2.0]]))
    plan = with_one_more(draw, shaped(shapes, batch, order, weights))
    kinds = [""] * world
    for number, group in enumerate(plan.groups):
        for index, rank in enumerate(group.ranks):
            kinds[rank] = "xyz"[(number + index // mixed) % 3] if mixed else "xyz"[number]
    plan = with_order(draw, with_own_settings(draw, draw(schedules(plan))))
    return dataclasses.replace(plan, chunks=with_random_transfers(draw, plan.chunks)), kinds


COMPUTE = FakeCompute(
    factors={"y": 1.7, "z": 0.4},
    step_per_parameter_s=0.01,
    head_s=0.3,
    recomputed_s={"full": 0.7},
)
MEMORY = FakeMemory(layer_count=64 * 24, boundary=6, head=11)


@st.composite
def stock_plans(draw):
    """Stock's layouts, and the kind of GPU of each rank."""
    stages, width, size = (draw(st.integers(low, 4)) for low in (2, 1, 1))
    batch = stages * width * size * draw(st.integers(1, 3))
    plan = shaped([(width, size)] * stages, batch, list(range(stages * width)), [1.0])
    virtual = draw(st.integers(1, 3))
    schedule = "1f1b" if virtual == 1 else "interleaved"
    plan = with_owners(plan, list(range(stages)) * virtual, schedule)
    return plan, ["xyz"[rank // width % 3] for rank in range(stages * width)]


LINKS = {
    "ranks_per_node": st.sampled_from([1, 2, 4]),
    "nic": st.sampled_from([3.0, 8.0, 1000.0]),
    "spine": st.sampled_from([None, 7.0]),
}


@pytest.mark.slow
@given(case=equal_plans(), **LINKS)
@settings(max_examples=examples(100))
def test_merged_equals_whole(case, **cluster):
    plan, _ = case
    merged = merged_as_whole(case, RUNTIME, **cluster)
    lists = lower_plan(plan)
    for rank in merged.simulated_ranks:
        words = [span.action for span in merged.spans(rank)]
        assert words == [str(action) for action in from_norm(lists.ranks[rank])]


@pytest.mark.slow
@given(case=stock_plans(), **LINKS)
@settings(max_examples=examples(50))
def test_merged_equals_whole_as_stock_trains(case, **cluster):
    plan, _ = case
    framework = STOCK_1F1B if plan.schedule.name == "1f1b" else STOCK_INTERLEAVED
    merged_as_whole(case, framework, **cluster)


def merged_as_whole(case, framework, *, ranks_per_node, nic, spine):
    """Simulate both, and compare them; returns the merged one."""
    plan, kinds = case
    links = node_links(ranks_per_node, nic, spine_bytes_per_s=spine)
    comm = FakeComm(latency_s=0.1, bytes_per_s=5.0, statistic_s=0.2, links=links)
    options = {
        "compute": COMPUTE,
        "memory": MEMORY,
        "comm": comm,
        "kinds": kinds,
        "framework": framework,
    }
    whole = run(plan, **options)
    merged = run(plan, **options, merge_equal_ranks=True)
    assert merged.iteration_s == pytest.approx(whole.iteration_s, rel=1e-9)
    assert merged.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=1e-9)
    for rank in range(plan.world_size):
        for name in ("busy_s", "communication_s", "wait_s", "idle_s"):
            one, other = (getattr(r.usage[rank], name) for r in (merged, whole))
            assert one == pytest.approx(other, rel=1e-9, abs=1e-9)
        first, second = (r.memory[rank].by_category_bytes for r in (merged, whole))
        # What arrives at the same moment may arrive in another order when times are rounded.
        assert first == pytest.approx(second, abs=2 * 6 * 4 * 4)
    for rank in merged.simulated_ranks:
        one, other = ([(s.action, s.start_s) for s in r.spans(rank)] for r in (merged, whole))
        assert [action for action, _ in one] == [action for action, _ in other]
        starts = [start_s for _, start_s in other]
        assert [start_s for _, start_s in one] == pytest.approx(starts, abs=1e-6)
    return merged


@pytest.mark.parametrize(
    ("shapes", "batch", "simulated"),
    [
        ([(64, 1)] * 4, 256, 4),
        ([(64, 4), (128, 1)], 2048, 2 + 4),  # rounds of 256 and 128 samples in blocks of 4
        ([(6, 2), (4, 3)], 24, 1 * 3 + 2),  # rounds of 12 in blocks of 6: two copies
        ([(8, 3)], 48, 1),
        ([(3, 1), (4, 1)], 12, 7),  # nothing in common
    ],
)
def test_how_many_ranks_are_left(shapes, batch, simulated):
    memory = FakeMemory(layer_count=64 * 48)  # so that all shards are equal
    result = run(shaped(shapes, batch), memory=memory, merge_equal_ranks=True)
    assert len(result.simulated_ranks) == simulated
    assert set(result.stands_in) == set(result.simulated_ranks)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "breadth_first"])
@pytest.mark.parametrize(
    ("shapes", "counts", "simulated"),
    [
        # Rounds of 4 and 4, of 2 and 2: two copies.
        ([(8, 1), (4, 1)], [[6] * 4 + [4] * 4, [11, 11, 9, 9]], 4 + 2),
        ([(8, 1), (4, 1)], [[6, 4] * 4, [10] * 4], 2 + 1),
        # Rounds of 11 and 9 may be mixed: only where they are apart.
        ([(4, 1), (4, 1)], [[11, 9, 11, 9], [10] * 4], 8),
        # One copy would have its longer queue first, the other its shorter one.
        ([(4, 1), (4, 1)], [[11, 8, 8, 11], [10, 9] * 2], 8),
        ([(8, 2), (8, 1)], [[6] * 4 + [4] * 4, [10] * 8], 2 + 2),
    ],
)
def test_replicas_with_more_micro_batches_than_others(schedule, shapes, counts, simulated):
    batch = sum(counts[0]) * shapes[0][1]
    shapes[1] = (shapes[1][0], batch // sum(counts[1]))
    plan = shaped(shapes, batch)
    groups = tuple(
        dataclasses.replace(
            group,
            replicas=tuple(
                dataclasses.replace(replica, num_microbatches=count)
                for replica, count in zip(group.replicas, row, strict=True)
            ),
        )
        for group, row in zip(plan.groups, counts, strict=True)
    )
    plan = dataclasses.replace(plan, groups=groups, schedule=Schedule(name=schedule))
    memory = FakeMemory(layer_count=64 * 48, boundary=6)
    comm = FakeComm(latency_s=0.1, bytes_per_s=5.0, links=node_links(8, 9.0))
    merged = run(plan, memory=memory, comm=comm, merge_equal_ranks=True)
    whole = run(plan, memory=memory, comm=comm)
    assert len(merged.simulated_ranks) == simulated
    assert merged.iteration_s == pytest.approx(whole.iteration_s, rel=1e-9)
    for rank in merged.simulated_ranks:
        starts = [span.start_s for span in merged.spans(rank)]
        assert starts == pytest.approx([span.start_s for span in whole.spans(rank)], abs=1e-6)


def test_a_shared_nic_counts_all_copies():
    """Four pipelines from one node to another through one NIC: a quarter for each."""
    plan = shaped([(4, 1), (4, 1)], 4)
    comm = FakeComm(bytes_per_s=8.0, links=node_links(4, 8.0))
    result = run(plan, memory=FakeMemory(boundary=8), comm=comm, merge_equal_ranks=True)
    assert result.simulated_ranks == (0, 4)
    assert [t.end_s - t.start_s for t in transfers_of(result)] == [4.0, 4.0]


def lopsided(source, target):
    """One NIC for each rank, but ranks 0 and 1 share theirs."""
    return ((f"nic{max(1, source)}", 5.0),)


def test_copies_that_share_a_link_are_told_apart_from_those_that_do_not():
    plan = even_plan(2, 4, 2)
    options = {"comm": FakeComm(bytes_per_s=5.0, links=lopsided), "memory": FakeMemory(boundary=9)}
    merged = run(plan, merge_equal_ranks=True, **options)
    whole = run(plan, **options)
    assert merged.stands_in == (0, 0, 2, 2, 4, 4, 6, 6)
    assert merged.usage == whole.usage
    assert traces_of(merged)[0] != traces_of(merged)[2]


@pytest.mark.parametrize(
    ("most", "stands_in"), [(16, (0, 1, 1, 3, 0, 1, 1, 3)), (15, (0, 0, 0, 0, 0, 0, 0, 0))]
)
def test_the_ends_of_a_ring_over_two_nodes_are_told_apart(monkeypatch, most, stands_in):
    """With a link to each GPU, the reductions' ring loads those of the first and the last only.

    Of more ranks than are told apart, copies are alike; no flow shares a link with the ring here.
    """
    monkeypatch.setattr(equal_ranks, "MOST_TOLD_APART", most)

    def links(source, target):
        here, there = source // 4, target // 4
        if here == there:
            return ()
        nics = ((f"nic{here}>", 20.0), (f"nic{there}<", 20.0))
        return ((f"gpu{source}>", 9.0), *nics, (f"gpu{target}<", 9.0))

    plan = even_plan(2, 8, 3)
    memory = FakeMemory(boundary=9)
    options = {"comm": FakeComm(bytes_per_s=9.0, links=links), "memory": memory}
    merged = run(plan, merge_equal_ranks=True, **options)
    whole = run(plan, **options)
    assert merged.stands_in[:8] == stands_in
    assert merged.iteration_s == pytest.approx(whole.iteration_s, rel=1e-9)


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (one_group((1, 2), (2, 1)), {}),
        (one_group((1, 2), (1, 0)), {}),
        (one_group((1, 1), (1, 1), weights=[1.0, 2.0]), {}),
        (even_plan(2, 2, 2), {"kinds": ["x", "x", "x", "y"]}),
        (even_plan(2, 2, 2), {"fixed_bytes": [1, 2, 1, 1]}),
        (even_plan(2, 2, 2), {"perturbation": Perturbation(jitter=0.1)}),
        (even_plan(2, 2, 2), {"perturbation": Perturbation(rank_factors={1: 2.0})}),
        (
            dataclasses.replace(
                even_plan(2, 2, 2), model=ModelFingerprint(num_layers=2, tied_embeddings=True)
            ),
            {},
        ),
    ],
)
def test_unequal_ranks_are_all_simulated(plan, options):
    result = run(plan, merge_equal_ranks=True, **options)
    assert result.simulated_ranks == tuple(range(plan.world_size))


def test_ranks_that_were_not_simulated_have_no_spans():
    result = run(even_plan(2, 2, 2), merge_equal_ranks=True)
    with pytest.raises(ValueError, match="rank 0 stands in"):
        result.spans(1)


@pytest.mark.parametrize("schedule", ["breadth_first", "interleaved"])
def test_several_chunks_are_merged_too(schedule):
    plan = with_owners(even_plan(4, 16, 8), [0, 1, 2, 3] * 3, schedule)
    memory = FakeMemory(layer_count=64 * 16, boundary=3)
    options = {"memory": memory, "comm": FakeComm(bytes_per_s=900.0, links=node_links(8, 5000.0))}
    merged = run(plan, merge_equal_ranks=True, **options)
    assert len(merged.simulated_ranks) == 4
    assert merged.iteration_s == pytest.approx(run(plan, **options).iteration_s, rel=1e-9)


def test_one_group_with_a_tied_embedding_is_merged():
    """Both copies of the embedding have the same owners, so nothing is swapped."""
    plan = ministages(1, 4, 2, 3)
    plan = dataclasses.replace(plan, model=dataclasses.replace(plan.model, tied_embeddings=True))
    assert run(plan, merge_equal_ranks=True).simulated_ranks == (0,)
