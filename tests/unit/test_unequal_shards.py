"""What collectives over unequal shards cost: measured, in the profile, and in the price."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.seen_nodes import ranks_of, timed
from zorse_megatron.costs.communication import GraphComm
from zorse_megatron.costs.topology import topology_of
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.profile import (
    Profile,
    Source,
    dump_profile,
    parse_profile,
    unequal_parts,
)
from zorse_megatron.measure.machine import nodes_of
from zorse_megatron.measure.measured_profile import (
    unequal_factors,
    with_transfers,
    with_unequal_shards,
)
from zorse_megatron.measure.tasks import link_tasks

MB = 10**6


def measured(nodes, factors):
    """A profile of a cluster on which unequal shards take so many times longer. By operation."""
    profile = Profile(schema_version=1, sources=(Source(name="zorse discover", kind="measured"),))
    for task in link_tasks(nodes_of(ranks_of(nodes))):
        answer = timed(task, latency_s=0.0)
        factor = factors.get(task.operation.removesuffix("_unequal"), 1.0)
        if task.operation.endswith("_unequal"):
            answer = replace(answer, time_s=tuple(factor * time_s for time_s in answer.time_s))
        profile = with_transfers(profile, answer)
    found = unequal_factors(profile.transfers)
    profile = with_unequal_shards(profile, "zorse discover", found)
    assert parse_profile(dump_profile(profile).encode()) == profile
    return profile


def comm_of(nodes, profile):
    lines = "".join(f"  - {{gpus: 1 x {kind}, nics: 80 Gb/s}}\n" for kind in nodes)
    return GraphComm(topology_of(parse_cluster(f"nodes:\n{lines}".encode()), profile))


@given(st.integers(2, 6), st.floats(1.5, 4.0), st.floats(1.5, 4.0))
def test_what_was_timed_is_what_is_priced(count, gather, reduction):
    """Of shards like the measured ones; the ring of one node's GPUs has no latency here."""
    nodes = [["T4"] * count]
    profile = measured(nodes, {"all_gather": gather, "reduce_scatter": reduction})
    link = "{type: nvlink, bandwidth: 8 Gb/s, latency: 0 us}"
    cluster = f"nodes:\n  - {{gpus: {count} x T4, link: {link}}}\n"
    comm = GraphComm(topology_of(parse_cluster(cluster.encode()), profile))
    ranks = tuple(range(count))
    parts = unequal_parts(count)
    total = 12 * count * sum(parts) * MB
    unequal = tuple(total // sum(parts) * part for part in parts)
    equal = (total // count,) * count
    assert comm.all_gather_s(ranks, unequal) == pytest.approx(
        gather * comm.all_gather_s(ranks, equal)
    )
    assert comm.reduce_scatter_s(ranks, unequal) == pytest.approx(
        reduction * comm.reduce_scatter_s(ranks, equal)
    )


def test_unequal_shards_are_never_faster_than_equal_ones():
    """On CPUs the two forms take as long; for less unequal shards the bytes tell less."""
    profile = measured([["T4"], ["T4"]], {"all_gather": 1.0})
    comm = comm_of(["T4", "T4"], profile)
    equal_s = comm.all_gather_s((0, 1), (50 * MB, 50 * MB))
    assert comm.all_gather_s((0, 1), (55 * MB, 45 * MB)) == pytest.approx(equal_s)
    assert comm.all_gather_s((0, 1), (75 * MB, 25 * MB)) == pytest.approx(equal_s)


def test_without_a_measurement_of_these_gpus_it_is_cephalos():
    profile = measured([["T4"], ["T4"]], {"all_gather": 3.0})
    assert {(each.link, each.gpu_kinds) for each in profile.unequal_shards} == {
        ("inter-node", ("T4",))
    }
    sizes = (75 * MB, 25 * MB)
    for kind, changes in (("T4", True), ("L4", False)):
        plain, known = comm_of([kind] * 2, None), comm_of([kind] * 2, profile)
        ratio = known.all_gather_s((0, 1), sizes) / plain.all_gather_s((0, 1), sizes)
        # Their bytes alone take 1.5 times as long: the largest shard, in place of half the buffer.
        assert ratio == pytest.approx(3.0 / 1.5 / 1.25 if changes else 1.0)


def test_the_largest_message_of_both_counts_and_the_slower_of_two_nodes():
    tasks = [
        t for t in link_tasks(nodes_of(ranks_of([["T4", "T4"]]))) if "all_gather" in t.operation
    ]
    equal, unequal = (timed(task, latency_s=0.0) for task in tasks)
    cut = replace(
        unequal,
        num_bytes=unequal.num_bytes[:3],
        time_s=tuple(2 * time_s for time_s in unequal.time_s[:3]),
    )
    (found,) = unequal_factors([equal, cut])
    assert found.factor == pytest.approx(2 / 1.5)
    other = [replace(each, nodes=("another kind",)) for each in (equal, unequal)]
    for order in ([equal, cut, *other], [*other, equal, cut]):
        (found,) = unequal_factors(order)
        assert found.factor == pytest.approx(2 / 1.5)
    assert unequal_factors([equal]) == []
