"""Latency and bandwidth of timed messages, the curves of the profile, and the cluster file."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.seen_nodes import MEASURED, clusters, ranks_of, timed
from zorse_megatron.costs.topology import topology_of
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.profile import LinkCurve, Profile, Source, dump_profile, parse_profile
from zorse_megatron.measure.machine import kinds_of_gpu, nodes_of
from zorse_megatron.measure.measured_cluster import (
    LARGEST_ERROR,
    cluster_text,
    fit_line,
    kinds_in,
    link_curve,
)
from zorse_megatron.measure.measured_profile import with_links, with_transfers, without_transfers
from zorse_megatron.measure.tasks import link_tasks

latencies = st.floats(1e-7, 1e-1)
bandwidths = st.floats(1e6, 1e12)
SIZES = tuple(1024 * 8**power for power in range(6))


def empty() -> Profile:
    return Profile(schema_version=1, sources=(Source(name="zorse discover", kind="measured"),))


@given(latencies, bandwidths)
def test_a_line_is_found_again(latency_s: float, bytes_per_s: float) -> None:
    found = fit_line(SIZES, [latency_s + size / bytes_per_s for size in SIZES])
    for size in SIZES:
        assert found.at(size) == pytest.approx(latency_s + size / bytes_per_s, rel=1e-6)


@pytest.mark.slow
@given(latencies, bandwidths, st.lists(st.floats(0.8, 1.25), min_size=6, max_size=6))
def test_noise_moves_a_line_no_further_than_itself(
    latency_s: float, bytes_per_s: float, noise: list[float]
) -> None:
    """Least squares: the fit is no further from the points than the true line is.

    As long as the largest message shows the bandwidth at all.
    """
    assume(SIZES[-1] / bytes_per_s > latency_s)
    times = [(latency_s + n / bytes_per_s) * e for n, e in zip(SIZES, noise, strict=True)]
    found = fit_line(SIZES, times)

    def distance(line) -> float:
        return sum((line(n) / t - 1) ** 2 for n, t in zip(SIZES, times, strict=True))

    assert found.latency_s >= 0 and found.bytes_per_s > 0
    assert distance(found.at) <= distance(lambda n: latency_s + n / bytes_per_s) + 1e-9


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=6))
def test_any_times_make_a_line_that_can_be_used(times: list[float]) -> None:
    found = fit_line(SIZES[: len(times)], times)
    assert found.latency_s >= 0 and 0 < found.bytes_per_s < float("inf")


def test_times_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        fit_line([1024], [0.0])


@pytest.mark.slow
@given(clusters, latencies, bandwidths)
def test_the_cluster_file_loads_back(
    cluster: list[list[str]], latency_s: float, bytes_per_s: float
) -> None:
    nodes = nodes_of(ranks_of(cluster, nics=2))
    answers = [timed(t, latency_s=latency_s, bytes_per_s=bytes_per_s) for t in link_tasks(nodes)]
    known = {kind: MEASURED for kind in kinds_of_gpu(nodes)}
    found = parse_cluster(cluster_text(nodes, known, answers, name="lab").encode())
    assert found.gpu_kinds == tuple(kind for names in cluster for kind in names)
    assert [node.name for node in found.nodes] == [node.name for node in nodes]
    for node, names in zip(found.nodes, cluster, strict=True):
        if len(names) > 1:
            assert node.link.bandwidth_bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)
            assert node.link.latency_s == pytest.approx(latency_s, rel=1e-3, abs=1e-9)
        if len(cluster) > 1:
            assert node.nics is not None and node.nics.count == 2
            assert node.nics.latency_s == pytest.approx(latency_s, rel=1e-3, abs=1e-9)
            partners = [len(other) for other in cluster if other is not names]
            most = min(len(names), max(partners))
            assert node.nics.total_bytes_per_s == pytest.approx(most * bytes_per_s, rel=1e-3)


def test_an_unknown_kind_is_described_and_a_known_one_is_not() -> None:
    nodes = nodes_of(ranks_of([["T4"], ["Z1"]]))
    known = {"T4": MEASURED, "Z1": MEASURED}
    known["T4"] = kinds_in(parse_cluster(b"nodes: [{gpus: 1 x T4}]"))["T4"]
    text = cluster_text(nodes, known, [timed(task) for task in link_tasks(nodes)])
    found = parse_cluster(text.encode())
    assert found.kinds["T4"] == GPU_KINDS["T4"]
    assert found.kinds["Z1"].memory_bytes == MEASURED.memory_bytes
    assert found.kinds["Z1"].peak.float16_flops_per_s == 4e12
    assert kinds_in(found)["Z1"] == MEASURED


@pytest.mark.slow
@given(clusters, st.floats(1e-6, 1e-4), st.floats(1e8, 1e11))
def test_curves_are_near_their_points_or_left_out(
    cluster: list[list[str]], latency_s: float, bytes_per_s: float
) -> None:
    """Whatever is written can be read by the planner, and prices the messages that were timed."""
    nodes = nodes_of(ranks_of(cluster))
    answers = [timed(t, latency_s=latency_s, bytes_per_s=bytes_per_s) for t in link_tasks(nodes)]
    known = {kind: MEASURED for kind in kinds_of_gpu(nodes)}
    profile = empty()
    for answer in answers:
        profile = with_transfers(profile, answer)
    profile = with_links(profile, "zorse discover", filter(None, map(link_curve, answers)))
    assert parse_profile(dump_profile(profile).encode()) == profile
    spec = topology_of(parse_cluster(cluster_text(nodes, known, answers).encode()), profile)
    for node in spec.nodes:
        for sharing, curve in node.nic_curves:
            errors = sorted(
                abs(curve.transfer_s(size) / (latency_s + size / bytes_per_s) * sharing - 1)
                for size in SIZES
            )
            assert (errors[2] + errors[3]) / 2 <= LARGEST_ERROR + 1e-6


def test_a_message_that_is_timed_again_replaces_the_old_times() -> None:
    (task, *_) = link_tasks(nodes_of(ranks_of([["T4", "T4"]])))
    profile = with_transfers(empty(), timed(task, latency_s=1.0))
    profile = with_transfers(profile, timed(task, latency_s=2.0))
    assert [transfers.time_s[0] > 2 for transfers in profile.transfers] == [True]
    assert without_transfers(profile, [task.key]).transfers == ()
    assert without_transfers(profile, [("send", (), ())]) == profile


def curve(source: str, kind: str) -> LinkCurve:
    return LinkCurve(
        link="intra-node",
        gpu_kind=kind,
        gpus_sharing=2,
        quadratic=0.0,
        linear=1.0,
        constant=10.0,
        max_bytes_per_s=1e10,
        source=source,
    )


def test_curves_of_an_earlier_run_do_not_stay_and_imported_ones_do() -> None:
    old = [curve("zorse discover", "T4"), curve("table", "L4"), curve("table", "A100-40")]
    profile = replace(empty(), links=tuple(old))
    measured = curve("zorse discover", "L4")
    found = with_links(profile, "zorse discover", [measured]).links
    assert found == (curve("table", "A100-40"), measured)
